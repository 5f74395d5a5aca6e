"""RNNsearch (Bahdanau, Cho and Bengio 2014): recurrent layers with additive attention between.

Equations are those of the paper's appendix A, with the biases that it leaves out. Whatever does not
depend on the state before is computed for all positions in one product, so that a step of the
recurrence has only what must wait for it.

Letters beside those of `jattn._types`: E width of what a layer reads, H width of a recurrent state,
C of the memory that the decoder reads (2H), A of the alignment network.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Bool, Float, Int

from jattn._types import accumulation
from jattn.cache import picked_rows
from jattn.checks import check_array, check_flag, check_function, check_rate, check_size
from jattn.functions import integers
from jattn.functions.integers import is_integer
from jattn.masks import Lengths
from jattn.mechanisms import additive_attention
from jattn.nn._types import Ids, RandomSource, RowLengths
from jattn.nn.additive import AdditiveAttention
from jattn.nn.checks import check_features, check_integers, check_module
from jattn.nn.embedding import DEFAULT_INIT, OutputProjection, TokenEmbedding
from jattn.nn.layers import LECUN, ZEROS, Dropout, promote, sharded
from jattn.nn.module import ConstructorSignature, Module
from jattn.nn.products import product


ORTHOGONAL = nnx.initializers.orthogonal()

_ZEROS = functools.partial(ZEROS)  # a bare function in a class would be a method


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentOptions:
    """The keyword arguments that the modules of this file have in common.

    kernel_init: of all matrices but the recurrent ones, embeddings and the output projection.
    recurrent_init: of each of the three square matrices of a gated unit.
    bias_init: of the biases.
    dtype: of the computation; default: of inputs and parameters together.
    param_dtype: of the parameters.
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
        """From `[..., features]` to `[..., *out]`, of which the last axis is split by "state"."""
        names = (*(None,) * (len(out) - 1), "state")
        return nnx.LinearGeneral(
            features,
            out,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            promote_dtype=promote,
            dot_general=product,
            kernel_metadata=sharded("embed", *names),
            bias_metadata=sharded(*names),
            rngs=rngs,
            **self.dtypes,
        )


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
        given = RecurrentOptions(**options)
        check_module(rngs, in_features=in_features, features=features, **given.dtypes)
        self.in_features = in_features
        self.features = features
        self.dtype = given.dtype
        self.inputs = given.linear(in_features, 3, features, rngs=rngs)

        def square() -> Array:
            # Not all of linear algebra is there in 16 bits.
            wide = accumulation(given.param_dtype)
            found = given.recurrent_init(rngs.params(), (features, features), wide)
            return found.astype(given.param_dtype)

        gates = jnp.stack([square(), square()], axis=1)
        self.gates = nnx.Param(gates, **sharded("embed", None, "state"))
        self.candidate = nnx.Param(square(), **sharded("embed", "state"))

    def step(self, x: Float[Array, "*B 3 H"], state: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        """The next state, from what `inputs` makes of the input and from the state before."""
        arrays = (x, state, self.gates[...], self.candidate[...])
        x, state, gates, candidate = promote(arrays, dtype=self.dtype)
        last = (((state.ndim - 1,), (0,)), ((), ()))
        gate = jax.nn.sigmoid(x[..., :2, :] + product(state, gates, last))
        update, reset = gate[..., 0, :], gate[..., 1, :]
        proposed = jnp.tanh(x[..., 2, :] + product(reset * state, candidate, last))
        return (1 - update) * state + update * proposed

    def __call__(
        self,
        x: Float[Array, "..."],
        *,
        lengths: RowLengths = None,
        reverse: bool = False,
    ) -> Float[Array, "*B T H"]:
        """The state after each position of `x [*B, T, E]`, `[*B, T, H]`, from a state of 0 on.

        Args:
            lengths: `[*B]`, how many positions of each row are not padding. The state does not
                change at padding, and what stands there is not seen.
            reverse: read from each row's last position that is not padding to its first.
        """
        check_features("x", x, "T, E", "in_features", self.in_features)
        check_flag("reverse", reverse)
        x = jnp.moveaxis(x, -2, 0)
        valid = None if lengths is None else _within(lengths, x)
        if valid is not None:
            x = jnp.where(valid[..., None], x, 0)
        inputs = self.inputs(x)

        def step(state: Array, operands: tuple[Array, Array | None]) -> tuple[Array, Array]:
            x, valid = operands
            after = self.step(x, state)
            after = after if valid is None else jnp.where(valid[..., None], after, state)
            return after, after

        first = jnp.zeros_like(jnp.sum(inputs[..., 0, :], axis=0))
        _, states = jax.lax.scan(step, first, (inputs, valid), reverse=reverse)
        return jnp.moveaxis(states, 0, -2)


def _within(lengths: Ids, x: Array) -> Bool[Array, "..."]:
    """Which positions of `x [T, *B, E]` are within the lengths `[*B]`: `[T, *B]`."""
    _check_lengths("lengths", lengths, x.shape[1:-1])
    positions = jax.lax.broadcasted_iota(jnp.int32, x.shape[:-1], 0)
    return positions < jnp.asarray(integers.clamped(lengths))[None]


def _check_lengths(name: str, lengths: RowLengths, batch: tuple[int, ...]) -> None:
    if lengths is None:
        return
    check_integers(name, lengths)
    check_array(name, lengths, "[*B]", "integer", shape=batch)


class RecurrentEncoder(Module):
    """A GRU in each direction, side by side (appendix A.2.1): `[*B, S, E]` to `[*B, S, 2H]`.

    Annotation j is [state of the forward unit after positions 0..j; state of the backward unit
    after the row's last position down to j]. `options` are those of `RecurrentOptions`.
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
        """Positions of `x [*B, S, E]` from `lengths [*B]` on are padding: nothing there is seen."""
        both = (
            self.forward(x, lengths=lengths),
            self.backward(x, lengths=lengths, reverse=True),
        )
        return jnp.concatenate(both, axis=-1)


class RecurrentState(NamedTuple):
    """What a decoder goes on from: its state, and the memory with its keys projected once."""

    hidden: Float[Array, "*B H"]
    keys: Float[Array, "*B S A"]
    memory: Float[Array, "*B S C"]
    lengths: RowLengths

    def reorder(self, indices: Int[Array, " R"], *, memory: bool = True) -> "RecurrentState":
        """Rows picked by index; `memory=False` keeps the memory, where rows that are picked have
        the same as those that they replace.

        Raises ValueError for rows that are known not to be there; the state of others is NaN.
        """
        indices, missing = picked_rows(indices, len(self.hidden))
        missing = missing.reshape(-1, *(1,) * (self.hidden.ndim - 1))
        picked = self._replace(hidden=jnp.where(missing, jnp.nan, self.hidden[indices]))
        if not memory:
            return picked
        lengths = None if self.lengths is None else jnp.asarray(self.lengths)[indices]
        return picked._replace(
            keys=self.keys[indices], memory=self.memory[indices], lengths=lengths
        )


class Maxout(Module):
    """Deep output (appendix A.2.2): the greater of each two sums of what is read, H to D.

    Reads the state, the token before and the context (U_o, V_o, C_o).
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
        given = RecurrentOptions(**options)
        widths = {"state_features": state_features, "token_features": token_features}
        widths |= {"context_features": context_features, "features": features}
        check_module(rngs, **widths, **given.dtypes)
        self.widths = tuple(widths.values())
        self.state = given.linear(state_features, 2, features, use_bias=False, rngs=rngs)
        self.token = given.linear(token_features, 2, features, rngs=rngs)
        self.context = given.linear(context_features, 2, features, use_bias=False, rngs=rngs)

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
    """A GRU that reads the token before and, by additive attention, a memory (appendix A.2.2).

    At each position the state before attends to the memory, which gives a context. Token, context
    and that state make the next state and, through `Maxout`, the output. As in the appendix, the
    output does not depend on the next state.

    Args:
        in_features: E, the width of the tokens.
        features: H, the width of the state.
        memory_features: C, the width of the memory, whose last H entries at position 0 make the
            first state (of `RecurrentEncoder` the backward unit's last).
        alignment_features: A, the inner width of the attention.
        out_features: width of the output.
        options: those of `RecurrentOptions`.
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
        given = RecurrentOptions(**options)
        widths = {"in_features": in_features, "features": features, "out_features": out_features}
        widths |= {"memory_features": memory_features, "alignment_features": alignment_features}
        check_module(rngs, **widths, **given.dtypes)
        self.memory_features = memory_features
        self.unit = GRU(in_features, features, rngs=rngs, **options)
        self.context = given.linear(memory_features, 3, features, use_bias=False, rngs=rngs)
        self.attention = AdditiveAttention(
            features,
            memory_features,
            alignment_features,
            kernel_init=given.kernel_init,
            rngs=rngs,
            **given.dtypes,
        )
        self.first = given.linear(features, features, rngs=rngs)
        self.output = Maxout(
            features, in_features, memory_features, out_features, rngs=rngs, **options
        )

    def start(
        self, memory: Float[Array, "..."], *, memory_lengths: RowLengths = None
    ) -> RecurrentState:
        """The state before the first token, from `memory [*B, S, C]`, projected once for `step`."""
        check_features("memory", memory, "S, C", "memory_features", self.memory_features)
        _check_lengths("memory_lengths", memory_lengths, memory.shape[:-2])
        # A sum over at most one position: without any, 0.
        _, own = jnp.split(memory, [self.memory_features - self.unit.features], axis=-1)
        last = jnp.sum(own[..., :1, :], axis=-2)
        hidden = jnp.tanh(self.first(last))
        return RecurrentState(hidden, self.attention.project_keys(memory), memory, memory_lengths)

    def step(
        self, x: Float[Array, "*B T E"], state: RecurrentState
    ) -> tuple[Float[Array, "*B T D"], RecurrentState]:
        """The output after each of T further tokens, and the state after them."""
        check_features("x", x, "T, E", "in_features", self.unit.in_features)
        mask = None if state.lengths is None else Lengths(kv=state.lengths)
        arrays = (*state[:3], self.attention.query[...], self.attention.score[...])
        hidden, keys, memory, query, score = promote(arrays, dtype=self.attention.dtype)

        def step(hidden: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
            state = hidden[..., None, :]
            contexts = additive_attention(state, keys, memory, query, None, score, mask=mask)
            context = contexts[..., 0, :]
            after = self.unit.step(x + self.context(context), hidden)
            return after, (hidden, context)

        inputs = self.unit.inputs(jnp.moveaxis(x, -2, 0))
        last, (before, contexts) = jax.lax.scan(step, hidden, inputs)
        before, contexts = (jnp.moveaxis(y, 0, -2) for y in (before, contexts))
        if self.attention.weights_tap.is_open:  # nothing inside the loop can be captured
            self.attention.attend(before, state.keys, state.memory, mask=mask)
        return self.output(before, x, contexts), state._replace(hidden=last)

    def __call__(
        self,
        x: Float[Array, "*B T E"],
        memory: Float[Array, "..."],
        *,
        memory_lengths: RowLengths = None,
    ) -> Float[Array, "*B T D"]:
        return self.step(x, self.start(memory, memory_lengths=memory_lengths))[0]


class RNNsearch(Module):
    """The recurrent encoder-decoder with attention, from source and target tokens to logits.

        model = RNNsearch(8000, 6000, rngs=nnx.Rngs(params=0))
        logits = model(source, target, source_lengths=lengths, rngs=nnx.Rngs(dropout=1))

    Bahdanau, Cho and Bengio 2014, appendix A, with the paper's sizes. Position t of the logits has
    seen target tokens 0..t and the first `source_lengths` tokens of the source.

    Args:
        source_vocabulary, target_vocabulary: numbers of tokens.
        features: width of the embedded tokens.
        hidden: H, of the recurrent states.
        alignment_features: A, the inner width of the attention; default H.
        maxout_features: width of what the output projection reads; default H/2.
        dropout_rate: on the embedded tokens and on what the output projection reads.
        embedding_init: of token embeddings, `[rows, D]`.
        options: those of `RecurrentOptions`.
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
        given = RecurrentOptions(**options)
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
        check_module(rngs, functions=functions, **widths, **given.dtypes)
        check_rate("dropout_rate", dropout_rate)
        tables = {"embedding_init": embedding_init, "rngs": rngs, **given.dtypes}
        self.source_tokens = TokenEmbedding(source_vocabulary, features, **tables)
        self.target_tokens = TokenEmbedding(target_vocabulary, features, **tables)
        self.dropout = Dropout(dropout_rate, rngs=rngs)
        self.encoder = RecurrentEncoder(features, hidden, rngs=rngs, **options)
        self.decoder = RecurrentDecoder(
            features, hidden, 2 * hidden, alignment, maxout, rngs=rngs, **options
        )
        self.output = OutputProjection(maxout, target_vocabulary, rngs=rngs, **given.dtypes)

    def __call__(
        self,
        source_ids: Ids,
        target_ids: Ids,
        *,
        source_lengths: RowLengths = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T vocabulary"]:
        """Logits `[*B, T, target_vocabulary]` of source ids `[*B, S]` and target ids `[*B, T]`.

        The other arguments are those of `features`.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        features = self.features(source_ids, target_ids, source_lengths=source_lengths, **run)
        return self.logits(features)

    def features(
        self,
        source_ids: Ids,
        target_ids: Ids,
        *,
        source_lengths: RowLengths = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """What `logits` reads: `[*B, T, maxout_features]`.

        Args:
            source_lengths: `[*B]`, how many source tokens of each row are not padding.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: where dropout draws its keys, the stream `dropout`.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        memory = self.encode(source_ids, source_lengths=source_lengths, **run)
        state = self.decoder.start(memory, memory_lengths=source_lengths)
        return self._read(target_ids, state, **run)[0]

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """The output projection."""
        return self.output(features)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """Kernel and bias of `logits`."""
        return self.output.arrays

    def encode(
        self,
        source_ids: Ids,
        *,
        source_lengths: RowLengths = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B S C"]:
        """Source ids `[*B, S]` to the memory `[*B, S, 2H]` that `decode` reads."""
        x = self.source_tokens(source_ids)
        _check_lengths("source_lengths", source_lengths, source_ids.shape[:-1])
        x = self.dropout(x, deterministic=deterministic, rngs=rngs)
        return self.encoder(x, lengths=source_lengths)

    def decode(
        self,
        target_ids: Ids,
        memory: Float[Array, "..."],
        *,
        memory_lengths: RowLengths = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T vocabulary"]:
        """Target ids `[*B, T]` and the memory `[*B, S, 2H]` to logits."""
        state = self.decoder.start(memory, memory_lengths=memory_lengths)
        return self.step(target_ids, state, deterministic=deterministic, rngs=rngs)[0]

    def step(
        self,
        target_ids: Ids,
        state: RecurrentState,
        *,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "*B T vocabulary"], RecurrentState]:
        """Further target ids `[*B, T]`, any number, to logits and the state after them.

        state = model.decoder.start(model.encode(source_ids))
        logits, state = model.step(prompt_ids, state)
        logits, state = model.step(next_ids, state)
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        features, state = self._read(target_ids, state, **run)
        return self.logits(features), state

    def _read(
        self, target_ids: Ids, state: RecurrentState, **run: Any
    ) -> tuple[Float[Array, "*B T D"], RecurrentState]:
        tokens = self.dropout(self.target_tokens(target_ids), **run)
        features, state = self.decoder.step(tokens, state)
        return self.dropout(features, **run), state
