"""Text generation by a language model, one token at a time, on a cache.

One step of the model processes the prompt except for the last token of each row. All later steps
are alike: the model takes each row's last token, and the next token is chosen from its logits. So
there is one loop, compiled once, and tokens are chosen in one place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jattn._explicit import partition_spec_of, partitioned_by_xla, sharding_of
from jattn._types import AnyArray, Tree
from jattn.cache import Cache, RollingCache
from jattn.checks import check_array, check_function, check_key, check_number, check_size, shown
from jattn.functions import integers
from jattn.nn.variables import lasting_functions


__all__ = ["Generated", "LanguageModel", "generate", "sample_tokens"]


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


class Generated(NamedTuple):
    """The generated tokens.

    Attributes:
        tokens: `[B, max_tokens]`, up to and including the row's first stop token, then `pad`.
        lengths: `[B]`, the number of tokens generated in each row, including the stop token.
    """

    tokens: Int[Array, "B n"]
    lengths: Int[Array, " B"]


def generate(
    model: LanguageModel,
    prompt: Int[AnyArray, "B T"],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    stop: int | Sequence[int] = (),
    pad: int = 0,
    valid: Bool[AnyArray, "B T"] | None = None,
    caches: Tree = None,
    callback: Callable[[np.ndarray], object] | None = None,
) -> Generated:
    """Continues a prompt: returns `tokens [B, max_tokens]` and `lengths [B]`.

    The program is compiled once for each shape of the prompt; changing the temperature, `top_p` or
    key does not recompile it. Dropout is off.

    Args:
        model: a Flax NNX module with the methods of `LanguageModel`.
        prompt: tokens `[B, T]`, at least one in each row.
        max_tokens: the largest number of tokens to generate in each row.
        temperature: the divisor of the logits before a token is drawn; at 0, the default, the
            likeliest token is chosen, and the first one of a tie.
        top_k: draw from this many of the likeliest tokens.
        top_p: draw from the nucleus, the smallest set of these tokens with at least this total
            probability (Holtzman et al. 2020).
        key: a JAX random key, required for a temperature above 0. The draws of a row depend on the
            row's index, and not on other rows.
        stop, pad: tokens that end a row, and the token that fills a row after its stop token.
        valid: bool `[B, T]`, False for padding, on either side of a row.
        caches: caches that `model.step` returned for the tokens before the prompt, or caches of
            another kind from `model.start`; by default `model.start(B, T + max_tokens − 1)`.
        callback: a function called after each step with its tokens, a NumPy array `[B]` with `pad`
            in rows that have ended. The loop then runs in Python around a compiled step.

    Returns:
        `Generated(tokens, lengths)`. Tokens are −1 where the model's logits contain NaN, for
        example after a cache has overflowed or a traced token was outside the vocabulary.

    Raises TypeError and ValueError for invalid arguments.

    >>> sizes = {"features": 8, "num_heads": 2, "feed_forward": 16, "num_layers": 1}
    >>> model, prompt = nn.DecoderOnly(9, **sizes, rngs=nnx.Rngs(0)), jnp.ones((2, 5), int)
    >>> jattn.generate(model, prompt, max_tokens=4, temperature=0.8, key=jax.random.key(0)).lengths
    Array([4, 4], dtype=int32)
    """
    _check_model(model, prompt)
    check_size("max_tokens", max_tokens)
    sampling = _sampling(temperature, top_k, top_p, key)
    check_size("pad", pad, -1)
    options = _Options(max_tokens, top_k, _stop_tokens(stop), int(pad), lasting_functions(model))
    if valid is not None:
        check_array("valid", valid, "[B, T]", "boolean", shape=tuple(prompt.shape))
        if integers.is_known(valid) and not np.all(np.any(np.asarray(valid), axis=1)):
            raise ValueError("valid: expected a token in every row of the prompt, got none in some")
        valid = jnp.asarray(valid)
    _check_room(caches, prompt.shape[1] + max_tokens - 1)
    definition, variables = nnx.split(model)
    tokens = jnp.asarray(integers.clamped(prompt))
    inputs = _Inputs(variables, tokens, valid, caches, sampling)
    if callback is None:
        return _all_tokens(definition, options, inputs)
    return _token_by_token(definition, options, inputs, callback)


def _check_model(model: Any, prompt: Any) -> None:
    is_model = hasattr(model, "start") and hasattr(model, "step")
    if not isinstance(model, nnx.Module) or not is_model:
        got = type(model).__name__
        raise TypeError(f"model: expected an nnx.Module with methods start and step, got {got}")
    check_array("prompt", prompt, "[B, T]", "integer")
    if len(prompt.shape) != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected [B, T] with T >= 1, got {list(prompt.shape)}")


class _Options(NamedTuple):
    """The static options: a change of any of these compiles a new program."""

    max_tokens: int
    top_k: int | None
    stop: tuple[int, ...]
    pad: int
    functions: tuple[Any, ...]  # the functions of the model's masks and scores, by value


class _Sampling(NamedTuple):
    """The parameters of drawing tokens."""

    key: Array
    temperature: Array
    top_p: Array | None


class _Inputs(NamedTuple):
    """The arrays of a call of `generate`."""

    variables: Tree  # the model's
    prompt: Array
    valid: Array | None
    caches: Tree
    sampling: _Sampling | None


class _State(NamedTuple):
    """The state of the loop between two tokens."""

    place: Array  # [], the number of tokens generated
    last: Array  # [B], the model's next input
    active: Array  # [B], True for rows that have not ended
    tokens: Array  # [B, max_tokens]
    lengths: Array  # [B]
    caches: Tree


def _token_by_token(
    definition: nnx.GraphDef, options: "_Options", inputs: "_Inputs", callback: Any
) -> Generated:
    """Generates tokens in a loop of Python, which hands each step's to the callback."""
    check_function("callback", callback)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(inputs)):
        raise ValueError("callback: expected None inside a compiled function, got a function")
    state = _begun(definition, options, inputs._replace(sampling=None))
    for _ in range(options.max_tokens):
        state = _advanced(definition, options, inputs.variables, state, inputs.sampling)
        callback(np.asarray(state.last))
        if not np.any(state.active):
            break
    return Generated(state.tokens, state.lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _all_tokens(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> Generated:
    """Generates all tokens in one compiled program."""

    def shardings(inputs: _Inputs) -> Generated:
        rows = sharding_of(inputs.prompt)[0]
        specs: Any = PartitionSpec(rows, None), PartitionSpec(rows)
        return Generated(*specs)

    @partitioned_by_xla(shardings)
    def run(inputs: _Inputs) -> Generated:
        model = nnx.merge(definition, inputs.variables)

        def goes_on(state: _State) -> Array:
            return (state.place < options.max_tokens) & jnp.any(state.active)

        def advance(state: _State) -> _State:
            return _advance(model, state, inputs.sampling, options)

        state = jax.lax.while_loop(goes_on, advance, _begin(model, inputs, options))
        return Generated(state.tokens, state.lengths)

    return run(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begun(definition: nnx.GraphDef, options: _Options, inputs: _Inputs) -> _State:
    def shardings(inputs: _Inputs) -> Any:
        """Shards every array whose first axis has the prompt's size B as the prompt is sharded."""
        rows, B = sharding_of(inputs.prompt)[0], len(inputs.prompt)
        return lambda x: PartitionSpec(*[rows for size in x.shape[:1] if size == B])

    @partitioned_by_xla(shardings)
    def begin(inputs: _Inputs) -> _State:
        return _begin(nnx.merge(definition, inputs.variables), inputs, options)

    return begin(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advanced(
    definition: nnx.GraphDef,
    options: _Options,
    variables: Tree,
    state: _State,
    sampling: _Sampling | None,
) -> _State:
    @partitioned_by_xla(lambda state, *_: jax.tree.map(partition_spec_of, state))
    def advance(state: _State, variables: Tree, sampling: _Sampling | None) -> _State:
        return _advance(nnx.merge(definition, variables), state, sampling, options)

    return advance(state, variables, sampling)


def _begin(model: LanguageModel, inputs: _Inputs, options: _Options) -> _State:
    """Returns the state after the prompt except for each row's last token."""
    _, prompt, valid, caches, _ = inputs
    B, T = prompt.shape
    if caches is None:
        caches = model.start(B, T + options.max_tokens - 1)
    if valid is None:
        first, last = prompt[:, :-1], prompt[:, -1]
    else:
        end = T - 1 - jnp.argmax(valid[:, ::-1], axis=1)[:, None]
        last = jnp.where(jnp.any(valid, axis=1), jnp.take_along_axis(prompt, end, axis=1)[:, 0], -1)
        valid = valid & (jnp.arange(T, dtype=end.dtype)[None, :] != end)
        first = jnp.where(valid, prompt, 0)  # padding may hold any number
    if T > 1:
        # These logits are unused, so the compiler removes their computation.
        _, caches = model.step(first, caches, valid=valid, deterministic=True)
    return _State(
        jnp.zeros((), jnp.int32),
        last,
        jnp.ones(B, bool),
        jnp.full((B, options.max_tokens), options.pad, jnp.int32),
        jnp.zeros(B, jnp.int32),
        caches,
    )


def _advance(
    model: LanguageModel, state: _State, sampling: _Sampling | None, options: _Options
) -> _State:
    """Appends one token to each row that has not ended."""
    logits, caches = model.step(state.last[:, None], state.caches, deterministic=True)
    logits = logits[:, 0].astype(jnp.float32)
    chosen = jnp.argmax(logits, axis=-1)
    if sampling is not None:
        key = jax.random.fold_in(sampling.key, state.place)
        rows = jnp.arange(len(logits), dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        chosen = sample_tokens(keys, logits, sampling.temperature, options.top_k, sampling.top_p)
    chosen = jnp.where(jnp.any(jnp.isnan(logits), axis=-1), -1, chosen.astype(jnp.int32))
    chosen = jnp.where(state.active, chosen, options.pad)
    stops = jnp.isin(chosen, jnp.asarray(options.stop, jnp.int32))
    return _State(
        state.place + 1,
        chosen,
        state.active & ~stops,
        state.tokens.at[:, state.place].set(chosen),
        state.lengths + state.active.astype(jnp.int32),
        caches,
    )


def sample_tokens(
    keys: Array,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""] | float = 1.0,
    top_k: int | None = None,
    top_p: Float[Array, ""] | float | None = None,
) -> Int[Array, " B"]:
    """Draws a token for each row of logits.

    Temperature, `top_k` and `top_p` are applied in this order and mean the same as in `generate`.

    Args:
        keys: JAX random keys, one for each row.
        logits: float32.
        temperature: above 0.
        top_k, top_p: as in `generate`.
    """
    # Subtracts the maximum first: at low temperatures, large logits would overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits)
    top, tokens = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    if top_p is not None:
        probabilities = jax.nn.softmax(top)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        top = jnp.where((likelier < top_p) | (top_p >= 1), top, -jnp.inf)
    places = jax.vmap(jax.random.categorical)(keys, top)
    return jnp.take_along_axis(tokens, places[:, None], axis=-1)[:, 0]


def _sampling(temperature: Any, top_k: Any, top_p: Any, key: Any) -> _Sampling | None:
    """Returns the parameters of drawing tokens, or None if the likeliest token is chosen."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if hasattr(value, "shape"):
            raise TypeError(f"{name}: expected a Python number, got an array")
    check_number("temperature", temperature)
    if temperature < 0:
        raise ValueError(f"temperature: expected temperature >= 0, got {shown(temperature)}")
    if top_k is not None:
        check_size("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p, positive=True)
        if top_p > 1:
            raise ValueError(f"top_p: expected 0 < top_p <= 1, got {shown(top_p)}")
    if key is not None:
        check_key("key", key)
    if temperature < np.finfo(np.float32).tiny:
        return None
    if key is None:
        raise ValueError(f"key: needed for temperature = {temperature}, got None")
    share = None if top_p is None else jnp.float32(top_p)
    return _Sampling(key, jnp.float32(temperature), share)


def _stop_tokens(stop: Any) -> tuple[int, ...]:
    """Returns the tokens that end a row as Python integers."""
    if integers.is_integer(stop):
        stop = (stop,)
    if not hasattr(stop, "__iter__"):
        raise TypeError(f"stop: expected a token or several, got {shown(stop)}")
    for token in stop:
        check_size("stop", token, 0)
    return tuple(map(int, stop))


def _check_room(caches: Tree, tokens: int) -> None:
    """Raises TypeError for caches with other leaves than arrays, ValueError if they lack room."""
    if not all(hasattr(x, "dtype") for x in jax.tree.leaves(caches)):
        raise TypeError(f"caches: expected what model.step gives, got {shown(caches)}")
    for cache in jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Cache)):
        if not isinstance(cache, Cache) or isinstance(cache, RollingCache):
            continue
        _, most = integers.known_range(cache.lengths) or (0, 0)
        if most + tokens > cache.capacity:
            raise ValueError(
                f"caches: expected room for {most + tokens} tokens, got {cache.capacity}"
            )
