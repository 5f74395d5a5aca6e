"""`generate`: the text of a language model, token by token, on a cache.

The model reads the prompt except for the last token of each row. All later steps are alike: the
model takes each row's last token, and the next token is chosen from its logits. So there is one
loop, compiled once, see `searches`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from jattn._explicit import partition_spec_of, partitioned_by_xla, sharding_of, without_mesh
from jattn._types import AnyArray, Tree
from jattn.checks import check_array, check_function, check_size
from jattn.functions import integers
from jattn.functions.programs import TracedFunction
from jattn.generation.arguments import (
    Numbers,
    check_caches,
    check_model,
    check_vocabulary,
    checked_sampling,
    logit_changes,
    rows_per_prompt,
    stop_tokens,
)
from jattn.generation.choosing import (
    Processor,
    check_processors,
    forbid_stop,
    penalize_repetition,
    sample_tokens,
    traced_processors,
)
from jattn.generation.searches import (
    Ending,
    Generated,
    Progress,
    advance,
    beam_search,
    begin,
    each_token,
    length_penalties,
)
from jattn.nn.variables import lasting_functions


@runtime_checkable
class LanguageModel(Protocol):
    """A model that `generate` accepts: a Flax NNX module with these two methods, such as
    `jattn.nn.DecoderOnly`."""

    def start(self, batch: int, length: int) -> Any:
        """Returns empty caches for up to `length` tokens in each row."""
        ...

    def step(
        self, tokens: Any, caches: Tree, *, valid: Any = None, deterministic: bool | None = None
    ) -> tuple[Any, Any]:
        """Appends `tokens [B, T]` to the caches; returns logits `[B, T, vocabulary]` and the new
        caches. `valid [B, T]` is False for padding."""
        ...


def generate(
    model: LanguageModel,
    prompt: Int[AnyArray, "B T"],
    *,
    max_tokens: int,
    min_tokens: int = 0,
    samples: int = 1,
    beams: int = 1,
    length_penalty: float = 0.6,
    repetition_penalty: float = 1.0,
    processors: Sequence[Processor] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    stop: int | Iterable[int] = (),
    pad: int = 0,
    valid: Bool[AnyArray, "B T"] | None = None,
    caches: Tree = None,
    prefill_chunk: int | None = None,
    callback: Callable[[np.ndarray], object] | None = None,
) -> Generated:
    """Continues a prompt: returns `tokens [B, max_tokens]`, `lengths [B]` and `log_probs [B]`.

    The program is compiled once for each shape of the prompt; changing numbers such as the
    temperature, a penalty or the key does not recompile it. Dropout is off.

    The logits are changed by the repetition penalty, then by the processors in their order, then by
    `min_tokens`. `log_probs` and beams use these logits. Then a token is drawn with temperature,
    `top_k` and `top_p`, applied in this order.

    Args:
        model: a Flax NNX module with the methods of `LanguageModel`.
        prompt: tokens `[B, T]`, at least one in each row.
        max_tokens: the largest number of tokens to generate in each row.
        min_tokens: the number of tokens before which a row generates no stop token.
        samples: the number of samples of each prompt, n. The prompt is read once and its caches are
            forked by `reorder`, so that samples share the pages of a `PagedCache`. The result has
            B·n rows; sample i of prompt b is row b·n + i.
        beams: the number of beams of a beam search, see `jattn.generation.beam_search`; the result
            is the best hypothesis of each prompt. Beams share pages too.
        length_penalty: the exponent α by which a beam search divides log probabilities of n tokens
            by ((5 + n) / 6)^α (Wu et al. 2016).
        repetition_penalty: divides positive logits, and multiplies others, of tokens in the prompt,
            without padding, and in the output (Keskar et al. 2019); above 1 against repetition.
        processors: functions `f(logits, tokens, lengths) -> logits` that change float32 logits
            `[B, vocabulary]`. The text so far, without padding, is the first `lengths [B]` tokens
            of each row of `tokens [B, T + max_tokens]`. They are traced, and must be pure. Arrays
            of a `jax.tree_util.Partial` may change without compiling again.
        temperature: the divisor of the logits before a token is drawn; at 0, the default, the
            likeliest token is chosen, and the first one of a tie.
        top_k: draw from this many of the likeliest tokens; needs a temperature above 0.
        top_p: draw from the nucleus, the smallest set of these tokens with at least this total
            probability (Holtzman et al. 2020); needs a temperature above 0.
        key: a JAX random key, required for a temperature above 0. The draws of a row depend on the
            row's index, and not on other rows.
        stop, pad: tokens that end a row, and the token that fills a row after its stop token.
        valid: bool `[B, T]`, False for padding, on either side of a row.
        caches: caches that `model.step` returned for the tokens before the prompt, or caches of
            another kind from `model.start`, with B rows; by default
            `model.start(B, T + max_tokens − 1)`. Samples and beams share the pages of the prompt in
            a `PagedCache`, and need further ones: pass `num_pages` to `start`. The caches are not
            returned; a program that goes on with them calls `model.step` itself.
        prefill_chunk: the most tokens of the prompt that the model reads at a time, which limits
            the memory that a long prompt takes; by default all.
        callback: a function called after each step with its tokens, a NumPy array `[B]` with `pad`
            in rows that have ended. The loop then runs in Python around a compiled step.

    Returns:
        `Generated(tokens, lengths, log_probs)`. Tokens are −1 where the logits contain NaN or +∞ or
        forbid all tokens, for example after a cache has overflowed or a traced token was outside
        the vocabulary; in a beam search all tokens of the row. `log_probs` is then not finite.

    Raises TypeError and ValueError for invalid arguments, such as concrete tokens outside the
    vocabulary and caches that lack room.

    >>> sizes = {"features": 8, "num_heads": 2, "feed_forward": 16, "num_layers": 1}
    >>> model, prompt = nn.DecoderOnly(9, **sizes, rngs=nnx.Rngs(0)), jnp.ones((2, 5), int)
    >>> jattn.generate(model, prompt, max_tokens=4, temperature=0.8, key=jax.random.key(0)).lengths
    Array([4, 4], dtype=int32)
    """
    check_model(model, prompt)
    check_size("max_tokens", max_tokens)
    sampling = checked_sampling(temperature, top_k, top_p, key)
    check_size("pad", pad, -1)
    copies = rows_per_prompt(samples, beams, sampling is not None)
    if prefill_chunk is not None:
        check_size("prefill_chunk", prefill_chunk)
    if valid is not None:
        check_array("valid", valid, "[B, T]", "boolean", shape=tuple(prompt.shape))
        if integers.is_known(valid) and not np.all(np.any(np.asarray(valid), axis=1)):
            raise ValueError("valid: expected a token in every row of the prompt, got none in some")
        valid = jnp.asarray(valid)
    stops = stop_tokens(stop)
    check_vocabulary(model, prompt, valid, stops)
    check_caches(caches, prompt, valid, max_tokens, samples, beams)
    definition, variables = nnx.split(model)
    penalties = length_penalties(max_tokens, length_penalty)
    penalty, least = logit_changes(repetition_penalty, min_tokens, max_tokens)
    numbers = Numbers(penalties if beams > 1 else None, penalty, least, sampling)
    tokens = jnp.asarray(integers.clamped(prompt))
    inputs = _Inputs(variables, tokens, valid, caches, numbers, ())
    ending = Ending(max_tokens, stops, int(pad))
    model_functions = lasting_functions(model)
    options = _Options(ending, top_k, copies, beams, prefill_chunk, model_functions, ())
    if checked := check_processors(processors):
        vocabulary = _vocabulary(definition, options, inputs)
        shape, length = (len(tokens) * copies, vocabulary), tokens.shape[1] + max_tokens
        programs, operands = traced_processors(checked, shape, length)
        options, inputs = options._replace(processors=programs), inputs._replace(operands=operands)
    if callback is None:
        return _all_tokens(definition, options, inputs)
    return _token_by_token(definition, options, inputs, callback)


class _Options(NamedTuple):
    """The static options: a change of any of these compiles a new program."""

    ending: Ending
    top_k: int | None
    copies: int  # of each row of the prompt: samples, or beams
    beams: int
    prefill_chunk: int | None
    functions: tuple[Any, ...]  # the functions of the model's masks and scores, by value
    processors: tuple[TracedFunction, ...]


class _Inputs(NamedTuple):
    """The arrays of a call of `generate`."""

    variables: Tree  # the model's
    prompt: Array
    valid: Array | None
    caches: Tree
    numbers: Numbers
    operands: tuple[Any, ...]  # of each processor


class _State(NamedTuple):
    """The state of the model between two tokens, for R rows: samples or beams of each prompt.

    The text is the tokens that the model has read, and None if no processor reads it.
    """

    place: Array  # [], the number of tokens generated
    caches: Tree
    text: Any  # [R, T + max_tokens]
    lengths: Any  # [R], the number of tokens in the text


def _token_by_token(
    definition: nnx.GraphDef, options: _Options, inputs: _Inputs, callback: Any
) -> Generated:
    """Generates tokens in a loop of Python, which hands each step's to the callback."""
    check_function("callback", callback)
    if options.beams > 1:
        raise ValueError(
            "callback: expected None with beams > 1, which give no tokens before the end"
        )
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(inputs)):
        raise ValueError("callback: expected None inside a compiled function, got a function")
    progress = _begun(definition, options, inputs)
    for _ in range(options.ending.length):
        progress = _advanced(definition, options, progress, inputs)
        callback(np.asarray(progress.last))
        if not np.any(progress.active):
            break
    return progress.generated


@functools.partial(jax.jit, static_argnums=(0, 1))
def _all_tokens(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> Generated:
    """Generates all tokens in one compiled program."""

    @partitioned_by_xla(lambda inputs: lambda _: PartitionSpec(sharding_of(inputs.prompt)[0]))
    def run(inputs: _Inputs) -> Generated:
        model = nnx.merge(definition, inputs.variables)
        next_logits, choose = _logits_function(model, options, inputs), _choice(options, inputs)
        first, state = _read_prompt(model, options, inputs)
        if options.beams == 1:
            return each_token(next_logits, state, first, choose, options.ending)
        return _beams(next_logits, state, first[:: options.beams], options, inputs.numbers)

    return run(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begun(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> Progress:
    def shardings(inputs: _Inputs) -> Any:
        """Shards every array whose first axis has the size R like the rows of the prompt."""
        rows, R = sharding_of(inputs.prompt)[0], len(inputs.prompt) * options.copies
        return lambda x: PartitionSpec(*[rows for size in x.shape[:1] if size == R])

    @partitioned_by_xla(shardings)
    def run(inputs: _Inputs) -> Progress:
        first, state = _read_prompt(nnx.merge(definition, inputs.variables), options, inputs)
        return begin(state, first, options.ending)

    return run(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _advanced(
    definition: nnx.GraphDef, options: _Options, progress: Progress, inputs: _Inputs
) -> Progress:
    @partitioned_by_xla(lambda progress, _: jax.tree.map(partition_spec_of, progress))
    def run(progress: Progress, inputs: _Inputs) -> Progress:
        next_logits = _logits_function(nnx.merge(definition, inputs.variables), options, inputs)
        return advance(next_logits, progress, _choice(options, inputs), options.ending)

    return run(progress, inputs)


def _vocabulary(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> int:
    """Returns the number of logits of a token."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    with without_mesh():
        return _first_logits.eval_shape(definition, options, types).shape[-1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first_logits(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> Array:
    model, first = nnx.merge(definition, inputs.variables), inputs.prompt[:, :1]
    caches = model.start(len(first), 1) if inputs.caches is None else inputs.caches
    return model.step(first, caches, deterministic=True)[0]


def _read_prompt(model: LanguageModel, options: _Options, inputs: _Inputs) -> tuple[Array, _State]:
    """Returns each row's last token `[R]`, and the state after the prompt's other tokens."""
    prompt, valid, caches = inputs.prompt, inputs.valid, inputs.caches
    B, T = prompt.shape
    if caches is None:
        caches = model.start(B, T + options.ending.length - 1)
    lengths = jnp.full(B, T, jnp.int32)
    text, last = prompt, prompt[:, -1]
    if valid is not None:  # moves the padding, which may hold any number, behind the tokens
        lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
        order = jnp.argsort(~valid, axis=1, stable=True)
        text = jnp.take_along_axis(jnp.where(valid, prompt, 0), order, axis=1)
        last = jnp.take_along_axis(text, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        last = jnp.where(lengths > 0, last, -1)
        valid = jnp.arange(T - 1, dtype=jnp.int32)[None, :] < lengths[:, None] - 1
    caches = _prefilled(model, text[:, :-1], valid, caches, options.prefill_chunk)
    rows = jnp.arange(B * options.copies, dtype=jnp.int32) // options.copies
    if options.copies > 1:
        caches, last = _reordered(caches, rows), last[rows]
    place = jnp.zeros((), jnp.int32)
    if not options.processors and inputs.numbers.repetition_penalty is None:
        return last, _State(place, caches, None, None)
    text = jnp.pad(text, ((0, 0), (0, options.ending.length)))[rows]
    return last, _State(place, caches, text, jnp.maximum(lengths - 1, 0)[rows])


def _prefilled(
    model: LanguageModel, tokens: Array, valid: Array | None, caches: Tree, chunk: int | None
) -> Tree:
    """Returns the caches after `tokens [B, T]`, of which the model reads a chunk at a time."""

    def read(caches: Tree, chunk: tuple[Array, Array | None]) -> tuple[Tree, None]:
        # The logits are unused, so the compiler removes their computation.
        tokens, valid = chunk
        return model.step(tokens, caches, valid=valid, deterministic=True)[1], None

    B, T = tokens.shape
    if T == 0:
        return caches
    if chunk is None or chunk >= T:
        return read(caches, (tokens, valid))[0]
    count = -(-T // chunk)
    size = -(-T // count)
    if count * size > T and valid is None:
        valid = jnp.ones((B, T), bool)

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * size - T)))
        return jnp.swapaxes(padded.reshape(B, count, size), 0, 1)

    return jax.lax.scan(read, caches, jax.tree.map(chunks, (tokens, valid)))[0]


def _reordered(caches: Tree, rows: Array) -> Tree:
    """Returns caches of these rows: by their method `reorder`, or the first axis of arrays."""
    select = lambda x: x.reorder(rows) if hasattr(x, "reorder") else x[rows]  # noqa: E731
    return jax.tree.map(select, caches, is_leaf=lambda x: hasattr(x, "reorder"))


def _logits_function(model: LanguageModel, options: _Options, inputs: _Inputs) -> Any:
    """Returns the function that the searches call: the model, followed by the processors."""
    numbers = inputs.numbers

    def next_logits(state: _State, tokens: Array) -> tuple[Array, _State]:
        place, caches, text, lengths = state
        if state.text is not None:
            text = text.at[jnp.arange(len(text)), lengths].set(tokens)
            lengths = lengths + 1
        logits, caches = model.step(tokens[:, None], caches, deterministic=True)
        logits = logits[:, 0].astype(jnp.float32)
        if numbers.repetition_penalty is not None:
            logits = penalize_repetition(logits, text, lengths, numbers.repetition_penalty)
        for processor, operands in zip(options.processors, inputs.operands, strict=True):
            logits = processor(logits, text, lengths, *operands)
        if numbers.min_tokens is not None:
            logits = forbid_stop(logits, options.ending, place < numbers.min_tokens)
        return logits, _State(place + 1, caches, text, lengths)

    return next_logits


def _choice(options: _Options, inputs: _Inputs) -> Any:
    """Returns the function that chooses tokens from logits."""
    sampling = inputs.numbers.sampling

    def choose(logits: Array, place: Array) -> Array:
        chosen = jnp.argmax(logits, axis=-1)
        if sampling is not None:
            key = jax.random.fold_in(sampling.key, place)
            rows = jnp.arange(len(logits), dtype=jnp.uint32)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
            _, temperature, top_p = sampling
            chosen = sample_tokens(keys, logits, temperature, options.top_k, top_p)
        # XLA's maximum of many numbers with NaN among them is not always NaN on a CPU.
        is_number = jnp.all(logits < jnp.inf, axis=-1)
        impossible = jnp.all(logits == -jnp.inf, axis=-1) | ~is_number
        return jnp.where(impossible, -1, chosen.astype(jnp.int32))

    return choose


def _beams(
    next_logits: Any, state: _State, first: Array, options: _Options, numbers: Numbers
) -> Generated:
    """Returns the best hypothesis of each prompt."""

    def reorder(state: _State, rows: Array) -> _State:
        place, caches, *text = state
        return _State(place, _reordered(caches, rows), *jax.tree.map(lambda x: x[rows], text))

    ending, penalties = options.ending, numbers.length_penalties
    assert penalties is not None
    beams = {"beams": options.beams, "penalties": penalties, "reorder": reorder}
    hypotheses = beam_search(next_logits, state, first, ending, **beams)
    tokens, lengths, log_probs = (x[:, 0] for x in hypotheses[:3])
    possible = log_probs > -jnp.inf
    return Generated(
        jnp.where(possible[:, None], tokens, -1),
        jnp.where(possible, lengths, ending.length),
        log_probs,
    )
