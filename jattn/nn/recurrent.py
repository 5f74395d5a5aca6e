"""RNNsearch (Bahdanau, Cho and Bengio 2014): recurrent layers with additive attention between.

The equations are those of the paper's appendix A, with the biases that it omits; embeddings are
multiplied by the square root of their width. Products that do not depend on the previous state are
computed for all positions at once, before the recurrence.

Axes in addition to those of `jattn._types`: E is the width of a layer's input, H of a recurrent
state, C = 2H of the memory to which the decoder attends, A of the alignment network.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised_by
from jattn._types import accumulation
from jattn.cache.rows import picked_rows
from jattn.checks import check_array, check_flag, check_function, check_rate, check_size
from jattn.functions import integers
from jattn.functions.integers import is_integer
from jattn.masks import Lengths
from jattn.mechanisms import additive_attention
from jattn.nn._types import Ids, RowLengths, RunOptions, run_options
from jattn.nn.additive import AdditiveAttention
from jattn.nn.embedding import DEFAULT_INIT, OutputProjection, TokenEmbedding
from jattn.nn.layers import LECUN, ZEROS, Dropout, linear, product, promote, sharded
from jattn.nn.module import (
    ConstructorSignature,
    Module,
    check_features,
    check_integers,
    check_module,
)


ORTHOGONAL = nnx.initializers.orthogonal()

_ZEROS = functools.partial(ZEROS)  # a bare function in a class would be a method


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentOptions:
    """The keyword arguments that the modules of this file have in common.

    kernel_init: the initializer of all matrices except for the recurrent ones, embeddings and the
        output projection.
    recurrent_init: the initializer of each of the three square matrices of a gated unit.
    bias_init: the initializer of the biases.
    dtype: the dtype of the computation, by default that of inputs and parameters, promoted.
    param_dtype: the dtype of the parameters.

    >>> nn.GRU(8, 6, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).candidate.dtype
    dtype(bfloat16)
    """

    kernel_init: Initializer = LECUN
    recurrent_init: Initializer = ORTHOGONAL
    bias_init: Initializer = _ZEROS
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    def __post_init__(self):
        for name in ("kernel_init", "recurrent_init", "bias_init"):
            check_function(name, getattr(self, name))

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def linear(
        self, features: int, *out: int, use_bias: bool = True, rngs: nnx.Rngs
    ) -> nnx.LinearGeneral:
        """Makes a map of `[..., features]` to `[..., *out]`; the last axis has the name "state"."""
        names = (*(None,) * (len(out) - 1), "state")
        options = {"kernel_init": self.kernel_init, "bias_init": self.bias_init, **self.dtypes}
        options |= {"use_bias": use_bias, "rngs": rngs}
        return linear(nnx.LinearGeneral, features, out, ("embed", *names), **options)


class RecurrentArguments(TypedDict, total=False):
    """The fields of `RecurrentOptions` as keyword arguments."""

    kernel_init: Initializer
    recurrent_init: Initializer
    bias_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype


class GRU(Module):
    """Gated recurrent unit (Cho et al. 2014; appendix A.1.1), over all positions of a sequence.

    With update gate z, reset gate r and candidate c, whose pre-activations from the input are x:

        z, r = σ(x_z + h U_z), σ(x_r + h U_r);  c = tanh(x_c + (r ∘ h) U);  h' = (1 − z) ∘ h + z ∘ c

    Parameters are `inputs/kernel [E, 3, H]` and `inputs/bias [3, H]` in the order z, r, c,
    `gates [H, 2, H]` (U_z, U_r) and `candidate [H, H]` (U).

    Args:
        in_features: E.
        features: H.
        options: those of `RecurrentOptions`.

    >>> nn.GRU(8, 6, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 6)
    """

    __signature__: Any = ConstructorSignature(RecurrentOptions)

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentArguments],
    ):
        settings = RecurrentOptions(**options)
        check_module(rngs, in_features=in_features, features=features, **settings.dtypes)
        self.in_features = in_features
        self.features = features
        self.dtype = settings.dtype
        self.inputs = settings.linear(in_features, 3, features, rngs=rngs)

        def square() -> Array:
            # JAX does not have all of linear algebra in 16 bits.
            wide = accumulation(settings.param_dtype)
            matrix = settings.recurrent_init(rngs.params(), (features, features), wide)
            return matrix.astype(settings.param_dtype)

        gates = jnp.stack([square(), square()], axis=1)
        self.gates = nnx.Param(gates, **sharded("embed", None, "state"))
        self.candidate = nnx.Param(square(), **sharded("embed", "state"))

    def step(self, x: Float[Array, "*B 3 H"], state: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        """Returns the next state, from the result of `inputs` and from the previous state."""
        arrays = (x, state, self.gates[...], self.candidate[...])
        x, state, gates, candidate = promote(arrays, dtype=self.dtype)
        last = (((state.ndim - 1,), (0,)), ((), ()))
        gate = jax.nn.sigmoid(x[..., :2, :] + product(state, gates, last))
        update, reset = gate[..., 0, :], gate[..., 1, :]
        proposed = jnp.tanh(x[..., 2, :] + product(reset * state, candidate, last))
        return (1 - update) * state + update * proposed

    def __call__(
        self, x: Float[Array, "..."], *, lengths: RowLengths = None, reverse: bool = False
    ) -> Float[Array, "*B T H"]:
        """Returns the state `[*B, T, H]` after each position of `x [*B, T, E]`, from a state of 0.

        Args:
            lengths: `[*B]`, the number of positions of each row that are not padding. The state
                does not change at padding, whose values are ignored.
            reverse: read from each row's last position that is not padding to its first.
        """
        check_features("x", x, "T, E", "in_features", self.in_features)
        check_flag("reverse", reverse)
        x = jnp.moveaxis(x, -2, 0)
        valid = None if lengths is None else _within(lengths, x)
        if valid is not None:
            x = jnp.where(valid[..., None], x, 0)
        inputs = self.inputs(x)

        def advance(state: Array, operands: tuple[Array, Array | None]) -> tuple[Array, Array]:
            x, valid = operands
            new_state = self.step(x, state)
            if valid is not None:
                new_state = jnp.where(valid[..., None], new_state, state)
            return new_state, new_state

        initial = jnp.zeros_like(jnp.sum(inputs[..., 0, :], axis=0))
        _, states = jax.lax.scan(advance, initial, (inputs, valid), reverse=reverse)
        return jnp.moveaxis(states, 0, -2)


def _within(lengths: Ids, x: Array) -> Bool[Array, "..."]:
    """Returns a mask `[T, *B]` of the positions of `x [T, *B, E]` below the lengths `[*B]`."""
    _check_lengths("lengths", lengths, x.shape[1:-1])
    positions = jax.lax.broadcasted_iota(jnp.int32, x.shape[:-1], 0)
    return positions < jnp.asarray(integers.clamped(lengths))[None]


def _check_lengths(name: str, lengths: RowLengths, batch: tuple[int, ...]) -> None:
    if lengths is None:
        return
    check_integers(name, lengths)
    check_array(name, lengths, "[*B]", "integer", shape=batch)


class RecurrentEncoder(Module):
    """A GRU in each direction (appendix A.2.1): maps `[*B, S, E]` to `[*B, S, 2H]`.

    Annotation j is [state of the forward unit after positions 0..j; state of the backward unit
    after the row's last position down to j]. `options` are those of `RecurrentOptions`.

    >>> nn.RecurrentEncoder(8, 6, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 8))).shape
    (2, 7, 12)
    """

    __signature__: Any = ConstructorSignature(RecurrentOptions)

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentArguments],
    ):
        self.forward = GRU(in_features, features, rngs=rngs, **options)
        self.backward = GRU(in_features, features, rngs=rngs, **options)

    def __call__(
        self, x: Float[Array, "..."], *, lengths: RowLengths = None
    ) -> Float[Array, "*B S C"]:
        """Encodes `x [*B, S, E]`; positions from `lengths [*B]` on are padding."""
        both = (self.forward(x, lengths=lengths), self.backward(x, lengths=lengths, reverse=True))
        return jnp.concatenate(both, axis=-1)


class RecurrentState(NamedTuple):
    """The state of a decoder: its hidden state, and the memory with its projected keys."""

    hidden: Float[Array, "*B H"]
    keys: Float[Array, "*B S A"]
    memory: Float[Array, "*B S C"]
    lengths: RowLengths

    def reorder(self, indices: Int[Array, " R"], *, memory: bool = True) -> "RecurrentState":
        """Returns the state of the rows `indices`, as a beam search needs it.

        `memory=False` leaves the memory unchanged, for rows that replace rows with the same memory.
        Raises ValueError for concrete indices of rows that do not exist; traced ones give NaN.
        """
        indices, missing = picked_rows("indices", indices, len(self.hidden))
        missing = missing.reshape(-1, *(1,) * (self.hidden.ndim - 1))
        picked = self._replace(hidden=jnp.where(missing, jnp.nan, self.hidden[indices]))
        if not memory:
            return picked
        lengths = None if self.lengths is None else jnp.asarray(self.lengths)[indices]
        return picked._replace(
            keys=self.keys[indices], memory=self.memory[indices], lengths=lengths
        )


class Maxout(Module):
    """The deep output (appendix A.2.2), maxout: the greater of two linear maps, per feature.

    The inputs are the state, the previous token and the context (U_o, V_o, C_o).

    >>> maxout = nn.Maxout(6, 8, 12, 3, rngs=nnx.Rngs(0))
    >>> maxout(jnp.ones((2, 6)), jnp.ones((2, 8)), jnp.ones((2, 12))).shape
    (2, 3)
    """

    __signature__: Any = ConstructorSignature(RecurrentOptions)

    def __init__(
        self,
        state_features: int,
        token_features: int,
        context_features: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentArguments],
    ):
        settings = RecurrentOptions(**options)
        widths = {"state_features": state_features, "token_features": token_features}
        widths |= {"context_features": context_features, "features": features}
        check_module(rngs, **widths, **settings.dtypes)
        self.widths = tuple(widths.values())
        self.state = settings.linear(state_features, 2, features, use_bias=False, rngs=rngs)
        self.token = settings.linear(token_features, 2, features, rngs=rngs)
        self.context = settings.linear(context_features, 2, features, use_bias=False, rngs=rngs)

    def __call__(
        self,
        state: Float[Array, "*B T H"],
        token: Float[Array, "*B T E"],
        context: Float[Array, "*B T C"],
    ) -> Float[Array, "*B T D"]:
        arrays = {"state": state, "token": token, "context": context}
        for (name, x), width in zip(arrays.items(), self.widths, strict=False):
            check_features(name, x, "T, width", "width", width)
        sums = promote((self.state(state), self.token(token), self.context(context)))
        return jnp.max(sum(sums), axis=-2)


class RecurrentDecoder(Module):
    """A GRU that reads the previous token and, by additive attention, a memory (appendix A.2.2).

    At each position the previous state attends to the memory; the result is the context. The
    previous token, the context and the previous state determine the next state and, through
    `Maxout`, the output. As in the appendix, the output does not depend on the next state.

    Args:
        in_features: E, the width of the tokens.
        features: H, the width of the state.
        memory_features: C, the width of the memory. The initial state is computed from the last H
            entries at position 0, where a `RecurrentEncoder` has its backward unit's last state.
        alignment_features: A, the inner width of the attention.
        out_features: the width of the output.
        options: those of `RecurrentOptions`.

    >>> decoder = nn.RecurrentDecoder(8, 6, 12, 6, 3, rngs=nnx.Rngs(0))
    >>> decoder(jnp.ones((2, 5, 8)), jnp.ones((2, 7, 12))).shape
    (2, 5, 3)
    """

    __signature__: Any = ConstructorSignature(RecurrentOptions)

    def __init__(
        self,
        in_features: int,
        features: int,
        memory_features: int,
        alignment_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentArguments],
    ):
        settings = RecurrentOptions(**options)
        widths = {"in_features": in_features, "features": features, "out_features": out_features}
        widths |= {"memory_features": memory_features, "alignment_features": alignment_features}
        check_module(rngs, **widths, **settings.dtypes)
        self.memory_features = memory_features
        self.unit = GRU(in_features, features, rngs=rngs, **options)
        self.context = settings.linear(memory_features, 3, features, use_bias=False, rngs=rngs)
        self.attention = AdditiveAttention(
            features,
            memory_features,
            alignment_features,
            kernel_init=settings.kernel_init,
            rngs=rngs,
            **settings.dtypes,
        )
        self.first = settings.linear(features, features, rngs=rngs)
        self.output = Maxout(
            features, in_features, memory_features, out_features, rngs=rngs, **options
        )

    def start(
        self, memory: Float[Array, "..."], *, memory_lengths: RowLengths = None
    ) -> RecurrentState:
        """Returns the state before the first token; projects `memory [*B, S, C]` for `step`."""
        check_features("memory", memory, "S, C", "memory_features", self.memory_features)
        _check_lengths("memory_lengths", memory_lengths, memory.shape[:-2])
        # The sum over at most one position is that position, and 0 for an empty memory.
        _, backward = jnp.split(memory, [self.memory_features - self.unit.features], axis=-1)
        last = jnp.sum(backward[..., :1, :], axis=-2)
        hidden = jnp.tanh(self.first(last))
        return RecurrentState(hidden, self.attention.project_keys(memory), memory, memory_lengths)

    def step(
        self, x: Float[Array, "*B T E"], state: RecurrentState
    ) -> tuple[Float[Array, "*B T D"], RecurrentState]:
        """Returns the output after each of T further tokens, and the state after them."""
        check_features("x", x, "T, E", "in_features", self.unit.in_features)
        mask = None if state.lengths is None else Lengths(kv=state.lengths)
        arrays = (*state[:3], self.attention.query[...], self.attention.score[...])
        hidden, keys, memory, query, score = promote(arrays, dtype=self.attention.dtype)

        def advance(hidden: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
            state = hidden[..., None, :]
            contexts = additive_attention(state, keys, memory, query, None, score, mask=mask)
            context = contexts[..., 0, :]
            return self.unit.step(x + self.context(context), hidden), (hidden, context)

        inputs = self.unit.inputs(jnp.moveaxis(x, -2, 0))
        last, results = jax.lax.scan(advance, hidden, inputs)
        states, contexts = (jnp.moveaxis(y, 0, -2) for y in results)
        if self.attention.weights_tap.is_open:  # nothing inside the loop can be captured
            self.attention.attend(states, state.keys, state.memory, mask=mask)
        return self.output(states, x, contexts), state._replace(hidden=last)

    def __call__(
        self,
        x: Float[Array, "*B T E"],
        memory: Float[Array, "..."],
        *,
        memory_lengths: RowLengths = None,
    ) -> Float[Array, "*B T D"]:
        return self.step(x, self.start(memory, memory_lengths=memory_lengths))[0]


class _SourceOptions(RunOptions, total=False):
    """The options of a call of `RNNsearch`."""

    source_lengths: RowLengths


_takes_source_options = advised_by({}, _SourceOptions)


class RNNsearch(Module):
    """The recurrent encoder-decoder with attention, from source and target tokens to logits.

    Bahdanau, Cho and Bengio 2014, appendix A, with the paper's sizes. The logits at position t
    depend on the target tokens 0..t and on the first `source_lengths` tokens of the source.

    Args:
        source_vocabulary, target_vocabulary: the numbers of tokens.
        features: the width of the embedded tokens.
        hidden: H, the width of the recurrent states.
        alignment_features: A, the inner width of the attention; default H.
        maxout_features: the width of the output projection's input; default H/2.
        dropout_rate: the rate of dropout on the embedded tokens and the output projection's input.
        embedding_init: the initializer of token embeddings, `[vocabulary, D]`.
        options: those of `RecurrentOptions`.

    >>> model = nn.RNNsearch(9, 9, features=8, hidden=6, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 7), int), jnp.ones((2, 5), int), source_lengths=jnp.array([7, 3])).shape
    (2, 5, 9)
    """

    __signature__: Any = ConstructorSignature(RecurrentOptions)

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        *,
        features: int = 620,
        hidden: int = 1000,
        alignment_features: int | None = None,
        maxout_features: int | None = None,
        dropout_rate: float = 0.0,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentArguments],
    ):
        settings = RecurrentOptions(**options)
        if not is_integer(hidden):
            check_size("hidden", hidden)
        alignment = hidden if alignment_features is None else alignment_features
        maxout = -(-hidden // 2) if maxout_features is None else maxout_features
        widths = {"features": features, "hidden": hidden}
        widths |= {"alignment_features": alignment, "maxout_features": maxout}
        for name, width in widths.items():
            if is_integer(width) and width < 1:
                raise ValueError(f"{name}: expected a width above 0, got {width}")
        widths |= {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
        functions = {"embedding_init": embedding_init}
        check_module(rngs, functions=functions, **widths, **settings.dtypes)
        check_rate("dropout_rate", dropout_rate)
        tables = {"embedding_init": embedding_init, "rngs": rngs, **settings.dtypes}
        self.source_tokens = TokenEmbedding(source_vocabulary, features, **tables)
        self.target_tokens = TokenEmbedding(target_vocabulary, features, **tables)
        self.dropout = Dropout(dropout_rate, rngs=rngs)
        self.encoder = RecurrentEncoder(features, hidden, rngs=rngs, **options)
        self.decoder = RecurrentDecoder(
            features, hidden, 2 * hidden, alignment, maxout, rngs=rngs, **options
        )
        self.output = OutputProjection(maxout, target_vocabulary, rngs=rngs, **settings.dtypes)

    @_takes_source_options
    def __call__(
        self, source_ids: Ids, target_ids: Ids, **call: Unpack[_SourceOptions]
    ) -> Float[Array, "*B T vocabulary"]:
        """Returns the logits `[*B, T, target_vocabulary]` of source ids `[*B, S]` and target ids
        `[*B, T]`.

        The other arguments are those of the method `RNNsearch.features`.
        """
        return self.logits(self.features(source_ids, target_ids, **call))

    @_takes_source_options
    def features(
        self, source_ids: Ids, target_ids: Ids, **call: Unpack[_SourceOptions]
    ) -> Float[Array, "*B T D"]:
        """Returns the input of `logits`, `[*B, T, maxout_features]`.

        Args:
            source_lengths: `[*B]`, the number of source tokens of each row that are not padding.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: the source of dropout keys, from its stream `dropout`.
        """
        memory = self.encode(source_ids, **call)
        state = self.decoder.start(memory, memory_lengths=call.get("source_lengths"))
        return self._read(target_ids, state, **run_options(call))[0]

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """Applies the output projection."""
        return self.output(features)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """Kernel and bias of `logits`."""
        return self.output.arrays

    @_takes_source_options
    def encode(self, source_ids: Ids, **call: Unpack[_SourceOptions]) -> Float[Array, "*B S C"]:
        """Maps source ids `[*B, S]` to the memory `[*B, S, 2H]` that `decode` reads."""
        lengths = call.get("source_lengths")
        x = self.source_tokens(source_ids)
        _check_lengths("source_lengths", lengths, source_ids.shape[:-1])
        return self.encoder(self.dropout(x, **run_options(call)), lengths=lengths)

    @advised_by({}, RunOptions)
    def decode(
        self,
        target_ids: Ids,
        memory: Float[Array, "..."],
        *,
        memory_lengths: RowLengths = None,
        **run: Unpack[RunOptions],
    ) -> Float[Array, "*B T vocabulary"]:
        """Maps target ids `[*B, T]` and the memory `[*B, S, 2H]` to logits."""
        state = self.decoder.start(memory, memory_lengths=memory_lengths)
        return self.step(target_ids, state, **run)[0]

    @advised_by({}, RunOptions)
    def step(
        self, target_ids: Ids, state: RecurrentState, **run: Unpack[RunOptions]
    ) -> tuple[Float[Array, "*B T vocabulary"], RecurrentState]:
        """Maps further target ids `[*B, T]`, any number, to logits and the state after them.

            state = model.decoder.start(model.encode(source_ids))
            logits, state = model.step(prompt_ids, state)
            logits, state = model.step(next_ids, state)

        The state holds the keys of the memory, which `start` projects once.
        """
        features, state = self._read(target_ids, state, **run)
        return self.logits(features), state

    def _read(
        self, target_ids: Ids, state: RecurrentState, **run: Any
    ) -> tuple[Float[Array, "*B T D"], RecurrentState]:
        tokens = self.dropout(self.target_tokens(target_ids), **run)
        features, state = self.decoder.step(tokens, state)
        return self.dropout(features, **run), state
