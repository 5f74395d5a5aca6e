"""Attention as Flax NNX modules: parameters and wiring, the mathematics is called.

Every parameter carries the logical names of its axes in its `out_sharding` metadata (the words
of `LOGICAL_AXES`); `nnx.get_partition_spec` turns them into a mesh's axes under
`nnx.logical_axis_rules`. Nothing is placed on a mesh at creation, so none is needed.

Dropout draws from the stream `dropout` of the `rngs` given to the call. A stream of that very
name among the `rngs` given to the constructor is forked, kept, and serves the calls that bring
none; a default stream is not kept, so that a model owns random state only on request. A loss
that is differentiated makes its streams itself, from a key: `rngs=nnx.Rngs(dropout=key)`.
"""

import dataclasses
import math
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Bool, Float, Int

from jattn import tile
from jattn._types import Keys, Output, Queries, Values, Weights
from jattn.attention import IMPLEMENTATIONS, attention, attention_weights, cached_attention
from jattn.cache import Cache, DenseCache
from jattn.checks import (
    check_array,
    check_choice,
    check_flag,
    check_precision,
    check_rate,
    check_size,
    shown,
)
from jattn.integers import is_integer
from jattn.masks import Mask, as_mask
from jattn.mechanisms import additive_attention, additive_keys
from jattn.nn.checks import check_features, check_module
from jattn.positions import rotary as rotate
from jattn.scores import check_score


LOGICAL_AXES = (
    "embed",
    "heads",
    "kv_heads",
    "head_size",
    "mlp",
    "vocabulary",
    "positions",
    "alignment",
    "state",
)

LECUN = nnx.initializers.lecun_normal()
ZEROS = nnx.initializers.zeros_init()

MaskLike = Mask | Bool[Array, "..."] | None
Positions = Int[Array, "..."] | None  # [*B, T] or, for the whole batch, [T]
Valid = Bool[Array | np.ndarray, "B T"] | None
_Arrays = TypeVar("_Arrays", bound=tuple)
RandomSource = nnx.Rngs | nnx.RngStream | None


def sharded(*names: str | None) -> dict[str, Any]:
    """Metadata of a parameter whose axes have these logical names (None: never split)."""
    return {"out_sharding": names, "eager_sharding": False}


def promote(args: _Arrays, /, *, dtype: Dtype | None = None, inexact: bool = True) -> _Arrays:
    """The arrays in `dtype`, or in the dtype that NumPy's rules give them; None stays None.

    Flax's own function obeys `jax_numpy_dtype_promotion="strict"`, under which bfloat16 inputs
    could not meet float32 parameters.
    """
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*(array for array in args if array is not None))
    cast: Any = tuple(None if array is None else jnp.asarray(array, dtype) for array in args)
    return cast


class LayerNorm(nnx.LayerNorm):
    """Flax's layer normalisation over the last axis, also under strict dtype promotion."""

    def __init__(self, num_features: int, *, axis: str = "embed", **options: Any):
        check_module(options.get("rngs"), num_features=num_features)
        metadata = {"scale_metadata": sharded(axis), "bias_metadata": sharded(axis)}
        super().__init__(num_features, promote_dtype=promote, **metadata, **options)

    def __call__(
        self, x: Float[Array, "... D"], *, mask: Array | None = None
    ) -> Float[Array, "... D"]:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


class RMSNorm(nnx.RMSNorm):
    """Flax's root mean square normalisation over the last axis, also under strict promotion."""

    def __init__(self, num_features: int, *, axis: str = "embed", **options: Any):
        check_module(options.get("rngs"), num_features=num_features)
        metadata = {"scale_metadata": sharded(axis)}
        super().__init__(num_features, promote_dtype=promote, **metadata, **options)

    def __call__(
        self, x: Float[Array, "... D"], mask: Array | None = None
    ) -> Float[Array, "... D"]:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


class Dropout(nnx.Dropout):
    """Flax's dropout, decided by the hash of `tile.keep`; and the source of the key for dropout
    inside attention. Random bits that nobody could predict would take as long as the layers.

    Raises ValueError for a rate outside [0, 1), and at the call when there is something to drop
    but no random stream to draw from.
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        check_rate("dropout_rate", rate)
        check_module(rngs)
        super().__init__(rate, rngs=rngs["dropout"] if rate > 0 and "dropout" in rngs else None)

    def key(self, deterministic: bool | None, rngs: RandomSource) -> Any:
        """A fresh key, or None where nothing is dropped."""
        if deterministic is not None:
            check_flag("deterministic", deterministic)
        if rngs is not None and not isinstance(rngs, nnx.Rngs | nnx.RngStream):
            raise TypeError(f"rngs: expected an nnx.Rngs or None, got {type(rngs).__name__}")
        if self.rate == 0.0 or (self.deterministic if deterministic is None else deterministic):
            return None
        source = self.rngs if rngs is None else rngs
        given = "none"
        if isinstance(source, nnx.Rngs):
            given = f"streams {list(source)}"
            source = source["dropout"] if {"dropout", "default"} & set(source) else None
        if source is None:
            raise ValueError(
                f"rngs: dropout at rate {self.rate} needs random numbers; expected "
                "rngs=nnx.Rngs(dropout=...) in the call or at construction, or "
                f"deterministic=True, got {given}"
            )
        return source()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*shape"]:
        check_array("inputs", inputs, "[...]", ndim=1)
        key = self.key(deterministic, rngs)
        if key is None:
            return inputs
        rows, columns = math.prod(inputs.shape[:-1]), inputs.shape[-1]
        places = jnp.arange(rows, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
        kept = tile.keep(key, self.rate, 0, 0, *places).reshape(inputs.shape)
        return jnp.where(kept, inputs / (1 - self.rate), 0).astype(inputs.dtype)


class Constant(nnx.Variable):
    """An array that a module owns and no optimiser trains."""


class Held(nnx.Module):
    """A mask or a score function as a module's own: its arrays become variables.

    Calling it gives the mask or score function back, around the variables' present values.
    """

    def __init__(self, tree: Any, trained: bool = False):
        arrays, self.structure = jax.tree.flatten(tree)
        self.arrays = nnx.List(
            (nnx.Param if trained and jnp.issubdtype(array.dtype, jnp.inexact) else Constant)(
                jnp.asarray(array), **sharded(*(None,) * array.ndim)
            )
            for array in arrays
        )

    def __call__(self) -> Any:
        return jax.tree.unflatten(self.structure, [array[...] for array in self.arrays])


class LearnedScore(Held):
    """A score function whose float arrays are trained, as in T5's relative position bias.

        MultiHeadAttention(8, 512, score=LearnedScore(scores.RelativeBias(table)), rngs=rngs)

    A score function given without this wrapper keeps its arrays constant, as ALiBi wants it.
    """

    def __init__(self, score: Any):
        if score is None:
            raise TypeError("score: expected a jattn score function, got None")
        check_score(score)
        super().__init__(score, trained=True)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of queries and keys (Su et al. 2021), the first `size` channels.

    `style` pairs channel i with i + size/2 ("half") or 2i with 2i + 1 ("interleaved").
    """

    style: Literal["half", "interleaved"] = "half"
    base: float = 10000.0
    size: int | None = None

    def __call__(
        self, x: Float[Array, "*B T N H"], places: Int[Array, "..."]
    ) -> Float[Array, "*B T N H"]:
        return rotate(x, places, style=self.style, base=self.base, rotary_dim=self.size)


class AttentionWeights(nnx.Intermediate):
    """The variable type under which attention weights are captured."""


class Tap(nnx.Module):
    """Identity, through which attention weights pass while somebody captures them.

    Open inside `nnx.capture(..., AttentionWeights)`, and so inside `capture_weights`.
    """

    @property
    def is_open(self) -> bool:
        captures = getattr(self, "__captures__", ())
        return any(type(capture) is AttentionWeights for capture in captures)

    def __call__(self, weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        self.sow(AttentionWeights, "weights", weights)
        return weights


def capture_weights(model: Any, *args: Any, **kwargs: Any) -> dict[str, Weights]:
    """Every attention's weights in one call of a module or of a module's method.

        weights = capture_weights(model, source, target, cross_mask=padding)
        weights["decoder/layers/0/cross_attention"]  # [*B, N, T, S]

    Weights are those after the softmax and before dropout, by the path of the module that made
    them; a second call of the same module adds `[1]` to its path, and so on. They are computed
    for this purpose (T×S each), the output that the model goes on with is the usual one. Under
    a transformation call it inside, with the model an argument of the transformed function.
    """
    module = model if isinstance(model, nnx.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module or a method of one, got {model!r}")
    try:
        _, captured = nnx.capture(model, AttentionWeights)(*args, **kwargs)
    finally:
        # nnx.capture leaves its mark on the modules when the call raises
        for _, part in nnx.iter_modules(module):
            if hasattr(part, "__captures__"):
                delattr(part, "__captures__")
    weights = {}
    for path, variable in nnx.to_flat_state(captured):
        name = "/".join(map(str, path[:-2]))
        for call, value in enumerate(variable.get_value()):
            weights[f"{name}[{call}]" if call else name] = value
    return weights


def _check_divides(name: str, value: int, of: str, total: int) -> None:
    if not is_integer(value):
        check_size(name, value)
    if value < 1 or total % value:
        raise ValueError(f"{name}: expected a positive divisor of {of}={total}, got {shown(value)}")


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017): self, causal, cross or grouped.

    With the names and the parameter layout of `flax.nnx.MultiHeadAttention`: kernels `query`
    `[D, N, H]`, `key` and `value` `[E, K, H]`, `out` `[N, H, out_features]`, and one bias each;
    H = qkv_features / N. The same weights give the same output.

    Args:
        num_heads: N; must divide qkv_features.
        in_features: D, the width of `inputs_q`.
        qkv_features: N·H, the width of all heads together; default D.
        out_features: width of the output; default D.
        num_kv_heads: K, must divide N; query head n reads key head n // (N / K). Default N.
        in_kv_features: E, the width of `inputs_k` and `inputs_v`; default D.
        dropout_rate: dropout on the attention weights.
        use_bias: whether the four projections have biases.
        dtype: of the computation; default: of inputs and parameters together.
        param_dtype: of the parameters.
        normalize_qk: normalise each head's queries and keys (Dehghani et al. 2023), by "layer"
            (which is what True means) or "rms" normalisation with a learned scale.
        rotary: rotate queries and keys by their positions (True: the usual `Rotary()`).
        mask, score: applied in every call, combined with the call's own by `&` and `>>`. Their
            arrays are constants; see `LearnedScore` for parameters.
        implementation: as in `jattn.attention`.

    Raises ValueError when a number of heads does not divide.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        normalize_qk: bool | Literal["layer", "rms"] = False,
        rotary: Rotary | bool = False,
        mask: MaskLike = None,
        score: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        check_flag("use_bias", use_bias)
        check_precision("precision", precision)
        check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
        check_choice("normalize_qk", normalize_qk, (False, True, "layer", "rms"))
        if not isinstance(rotary, bool | Rotary):
            raise TypeError(f"rotary: expected True, False or a Rotary, got {rotary!r}")
        if not isinstance(score, nnx.Module):
            check_score(score)
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        check_module(
            rngs,
            dtype=dtype,
            param_dtype=param_dtype,
            functions={"kernel_init": kernel_init, "bias_init": bias_init},
            in_features=in_features,
            qkv_features=self.qkv_features,
            out_features=self.out_features,
            in_kv_features=self.in_kv_features,
        )
        _check_divides("num_heads", num_heads, "qkv_features", self.qkv_features)
        _check_divides("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        self.head_dim = self.qkv_features // num_heads
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.bias_init = bias_init
        self.normalize_qk = "layer" if normalize_qk is True else normalize_qk
        self.rotary = Rotary() if rotary is True else rotary or None
        self.implementation = implementation
        self.query = self._projection(in_features, num_heads, "heads", rngs)
        self.key = self._projection(self.in_kv_features, self.num_kv_heads, "kv_heads", rngs)
        self.value = self._projection(self.in_kv_features, self.num_kv_heads, "kv_heads", rngs)
        self.query_ln = self._norm(rngs)
        self.key_ln = self._norm(rngs)
        self.out = self._output(rngs)
        self.mask = None if mask is None else Held(as_mask(mask))
        self.score = score if score is None or isinstance(score, nnx.Module) else Held(score)
        self.dropout = Dropout(dropout_rate, rngs=rngs)
        self.weights_tap = Tap()

    def _linear(self, *sizes: Any, rngs: nnx.Rngs, **options: Any) -> nnx.LinearGeneral:
        return nnx.LinearGeneral(
            *sizes,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            promote_dtype=promote,
            rngs=rngs,
            **options,
        )

    def _projection(
        self, features: int, heads: int, name: str, rngs: nnx.Rngs
    ) -> nnx.LinearGeneral:
        return self._linear(
            features,
            (heads, self.head_dim),
            kernel_metadata=sharded("embed", name, "head_size"),
            bias_metadata=sharded(name, "head_size"),
            rngs=rngs,
        )

    def _output(self, rngs: nnx.Rngs) -> nnx.LinearGeneral:
        return self._linear(
            (self.num_heads, self.head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_metadata=sharded("heads", "head_size", "embed"),
            bias_metadata=sharded("embed"),
            rngs=rngs,
        )

    def _norm(self, rngs: nnx.Rngs) -> LayerNorm | RMSNorm | None:
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        match self.normalize_qk:
            case False:
                return None
            case "layer":
                return LayerNorm(self.head_dim, axis="head_size", use_bias=False, **options)
            case "rms":
                return RMSNorm(self.head_dim, axis="head_size", **options)
        raise AssertionError(self.normalize_qk)

    def project_queries(
        self, inputs_q: Float[Array, "..."], positions: Positions = None
    ) -> Queries:
        """Queries `[*B, T, N, H]` as they enter the scores: projected, normalised, rotated."""
        check_features("inputs_q", inputs_q, "T, D", "in_features", self.in_features)
        return self._place(self.query(inputs_q), self.query_ln, positions)

    def project_keys_values(
        self,
        inputs_k: Float[Array, "..."],
        inputs_v: Float[Array, "..."] | None = None,
        positions: Positions = None,
    ) -> tuple[Keys, Values]:
        """Keys `[*B, S, K, H]` as they enter the scores, and values `[*B, S, K, H]`."""
        inputs_v = inputs_k if inputs_v is None else inputs_v
        check_features("inputs_k", inputs_k, "S, E", "in_kv_features", self.in_kv_features)
        check_features("inputs_v", inputs_v, "S, E", "in_kv_features", self.in_kv_features)
        return self._place(self.key(inputs_k), self.key_ln, positions), self.value(inputs_v)

    def _place(
        self,
        x: Float[Array, "*B T N H"],
        norm: LayerNorm | RMSNorm | None,
        positions: Positions,
    ) -> Float[Array, "*B T N H"]:
        x = x if norm is None else norm(x)
        if self.rotary is None:
            return x
        places = jnp.arange(x.shape[-3], dtype=jnp.int32) if positions is None else positions
        return self.rotary(x, places)

    def attend(
        self,
        query: Queries,
        key: Keys,
        value: Values,
        *,
        mask: MaskLike = None,
        score: Any = None,
        positions: Positions = None,
        kv_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Output:
        """What the heads read, `[*B, T, N, H]`, from projected queries, keys and values."""
        places: dict[str, Any] = {"q_positions": positions, "kv_positions": kv_positions}
        if self.weights_tap.is_open:
            rules = {"mask": self._mask(mask), "score": self._score(score)}
            weights = attention_weights(query, key, precision=self.precision, **rules, **places)
            self.weights_tap(weights)
        options = self._options(mask, score, deterministic, rngs)
        return attention(query, key, value, **options, **places)

    def _options(
        self, mask: MaskLike, score: Any, deterministic: bool | None, rngs: RandomSource
    ) -> dict[str, Any]:
        """What the module and a call of it together ask of `attention`."""
        dropout_key = self.dropout.key(deterministic, rngs)
        return {
            "mask": self._mask(mask),
            "score": self._score(score),
            "precision": self.precision,
            "dropout_rate": 0.0 if dropout_key is None else float(self.dropout.rate),
            "dropout_key": dropout_key,
            "implementation": self.implementation,
        }

    def _mask(self, given: MaskLike) -> Mask | None:
        if self.mask is None:
            return None if given is None else as_mask(given)
        return self.mask() if given is None else self.mask() & given

    def _score(self, given: Any) -> Any:
        if self.score is None:
            return given
        return self.score() if given is None else self.score() >> given

    def __call__(
        self,
        inputs_q: Float[Array, "..."],
        inputs_k: Float[Array, "..."] | None = None,
        inputs_v: Float[Array, "..."] | None = None,
        *,
        mask: MaskLike = None,
        score: Any = None,
        positions: Positions = None,
        kv_positions: Positions = None,
        cache: Cache | None = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Any:
        """Attends from `inputs_q` to `inputs_k`, or to itself where that is None.

        Args:
            inputs_q: `[*B, T, D]`.
            inputs_k: `[*B, S, E]`; None is self-attention.
            inputs_v: `[*B, S, E]`; None takes `inputs_k`.
            mask: True where a query may attend; boolean arrays have the full rank `[*B, N, T, S]`.
            score: a score function.
            positions: `[*B, T]` or `[T]`, default `arange(T)`; in self-attention also the keys'.
            kv_positions: `[*B, S]` or `[S]`, default `arange(S)`.
            cache: what came before `inputs_q [B, T, D]` in self-attention; it also knows the
                positions.
            valid: bool `[B, T]`, False for padding, which the cache leaves out.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: where dropout draws its key, the stream `dropout`.

        Returns:
            `[*B, T, out_features]`; with a cache `(that, the cache with T more tokens)`.

        Raises ValueError for inputs of the wrong width, for dropout without random numbers, and for
        what does not go with a cache.
        """
        if cache is not None:
            _check_is_cache("cache", cache)
            others = {"inputs_k": inputs_k, "inputs_v": inputs_v}
            _check_with_cache(others | {"positions": positions, "kv_positions": kv_positions})
            run = {"deterministic": deterministic, "rngs": rngs}
            return self._extend(inputs_q, cache, mask=mask, score=score, valid=valid, **run)
        if valid is not None:
            raise ValueError("valid: expected a cache to go with it, got None")
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError("inputs_k: expected [*B, S, E] to go with inputs_v, got None")
            inputs_k = inputs_q
            kv_positions = positions if kv_positions is None else kv_positions
        query = self.project_queries(inputs_q, positions)
        key, value = self.project_keys_values(inputs_k, inputs_v, kv_positions)
        heads = self.attend(
            query,
            key,
            value,
            mask=mask,
            score=score,
            positions=positions,
            kv_positions=kv_positions,
            deterministic=deterministic,
            rngs=rngs,
        )
        return self.out(heads)

    def empty_cache(
        self, batch: int, length: int, kind: Any = DenseCache, dtype: Any = None, **options: Any
    ) -> Any:
        """A cache for self-attention over up to `length` tokens in each of `batch` rows.

        `kind` is a class of `jattn.cache`, and `options` go to its `create`; for a `RollingCache`
        the length is that of its window.
        """
        dtype = (self.param_dtype if self.dtype is None else self.dtype) if dtype is None else dtype
        if not (isinstance(kind, type) and issubclass(kind, Cache)):
            raise TypeError(f"kind: expected a class of jattn.cache, got {kind!r}")
        chosen: Any = kind
        return chosen.create(
            batch, length, self.num_kv_heads, self.head_dim, dtype=dtype, **options
        )

    def _extend(
        self,
        inputs_q: Float[Array, "B T D"],
        cache: Cache,
        *,
        mask: MaskLike,
        score: Any,
        valid: Valid,
        deterministic: bool | None,
        rngs: RandomSource,
    ) -> tuple[Float[Array, "B T out"], Cache]:
        """Self-attention of further tokens, and the cache that holds them too."""
        self._check_tap()
        check_features("inputs_q", inputs_q, "T, D", "in_features", self.in_features)
        positions = cache.next_positions(inputs_q.shape[1], valid)
        query = self.project_queries(inputs_q, positions)
        key, value = self.project_keys_values(inputs_q, None, positions)
        options = self._options(mask, score, deterministic, rngs)
        heads, cache = cached_attention(query, key, value, cache, valid=valid, **options)
        return self.out(heads), cache

    def remember(
        self,
        inputs_k: Float[Array, "B S E"],
        lengths: Int[Array | np.ndarray, " B"] | None = None,
        positions: Positions = None,
    ) -> DenseCache:
        """Keys and values projected once, for `recall`; `lengths [B]` says how many are real."""
        return DenseCache.of(*self.project_keys_values(inputs_k, None, positions), lengths)

    def recall(
        self,
        inputs_q: Float[Array, "B T D"],
        memory: Cache,
        *,
        mask: MaskLike = None,
        score: Any = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "B T out"]:
        """Attends to what `remember` has projected, as the call does to `inputs_k`."""
        self._check_tap()
        _check_is_cache("memory", memory)
        query = self.project_queries(inputs_q, positions)
        places = jnp.arange(query.shape[1], dtype=jnp.int32) if positions is None else positions
        options = self._options(mask, score, deterministic, rngs)
        return self.out(attention(query, memory, q_positions=places, **options))

    def _check_tap(self) -> None:
        if self.weights_tap.is_open:
            raise NotImplementedError("attention weights cannot be captured through a cache")


def _check_is_cache(name: str, value: Any) -> None:
    if not isinstance(value, Cache):
        raise TypeError(f"{name}: expected a cache of jattn.cache, got {type(value).__name__}")


def _check_with_cache(arguments: dict[str, Any]) -> None:
    for name, given in arguments.items():
        if given is not None:
            raise ValueError(f"{name}: expected None with a cache, which knows, got an array")


class SingleHeads(nnx.Module):
    """Multi-head attention as textbooks draw it: a list of heads, put side by side and projected.

    Made from a `MultiHeadAttention`, of whose weights it holds copies, and called like it:
    `[*B, T, D]` to `[*B, T, out_features]`. Equal to it but for rounding and dropout, which each
    head draws for itself, and slower, with a product per head where the packed form has one.
    Masks and score functions cannot differ between heads.
    """

    def __init__(self, packed: MultiHeadAttention):
        if not isinstance(packed, MultiHeadAttention):
            kind = type(packed).__name__
            raise TypeError(f"packed: expected a MultiHeadAttention, got {kind}")
        streams = nnx.clone(packed.dropout.rngs)
        self.heads = nnx.List(_single_head(packed, n) for n in range(packed.num_heads))
        if streams is not None:
            for head in self.heads:
                head.dropout.rngs = streams.fork()
        self.out = nnx.clone(packed.out)

    def __call__(self, *inputs: Any, **options: Any) -> Float[Array, "..."]:
        return self.out(jnp.concatenate([head(*inputs, **options) for head in self.heads], axis=-2))


def _single_head(packed: MultiHeadAttention, n: int) -> MultiHeadAttention:
    head = nnx.clone(packed)
    head.query = _only_head(packed.query, n)
    group = packed.num_heads // packed.num_kv_heads
    head.key = _only_head(packed.key, n // group)
    head.value = _only_head(packed.value, n // group)
    head.num_heads = head.num_kv_heads = 1
    head.qkv_features = head.head_dim
    head.out = nnx.static(_as_is)  # pyright: ignore[reportAttributeAccessIssue]
    return head


def _only_head(projection: nnx.LinearGeneral, n: int) -> nnx.LinearGeneral:
    part = nnx.clone(projection)
    part.out_features = (1, projection.out_features[-1])
    part.kernel = _like(projection.kernel, projection.kernel[..., n : n + 1, :])
    if projection.bias is not None:
        part.bias = _like(projection.bias, projection.bias[n : n + 1])
    return part


def _like(parameter: nnx.Param[Array], value: Array) -> nnx.Param[Array]:
    return nnx.Param(value, **parameter.get_metadata())


def _as_is(x: Array) -> Array:
    return x


class AdditiveAttention(nnx.Module):
    """Attention by a small network (Bahdanau, Cho and Bengio 2014), as in RNNsearch.

    Scores are `score · tanh(query W + key U)`. Keys that stay the same while a decoder runs are
    projected once: `attention.attend(state, attention.project_keys(memory), memory)`.

    Args:
        query_features, key_features: widths of the queries and of the keys.
        alignment_features: A, the width of the network's hidden layer.
    """

    def __init__(
        self,
        query_features: int,
        key_features: int,
        alignment_features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = LECUN,
        rngs: nnx.Rngs,
    ):
        check_module(
            rngs,
            dtype=dtype,
            param_dtype=param_dtype,
            functions={"kernel_init": kernel_init},
            query_features=query_features,
            key_features=key_features,
            alignment_features=alignment_features,
        )

        def parameter(*shape: int, names: tuple[str | None, ...]) -> nnx.Param[Array]:
            return nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **sharded(*names))

        self.query_features = query_features
        self.key_features = key_features
        self.dtype = dtype
        self.query = parameter(query_features, alignment_features, names=("embed", "alignment"))
        self.key = parameter(key_features, alignment_features, names=("embed", "alignment"))
        score = kernel_init(rngs.params(), (alignment_features, 1), param_dtype)[:, 0]
        self.score = nnx.Param(score, **sharded("alignment"))
        self.weights_tap = Tap()

    def project_keys(self, key: Float[Array, "..."]) -> Float[Array, "*B S A"]:
        """`[*B, S, key_features]` to `[*B, S, A]`."""
        check_features("key", key, "S, E", "key_features", self.key_features)
        key, kernel = promote((key, self.key[...]), dtype=self.dtype)
        return additive_keys(key, kernel)

    def attend(
        self,
        query: Float[Array, "..."],
        projected_key: Float[Array, "*B S A"],
        value: Float[Array, "*B S V"],
        *,
        mask: MaskLike = None,
    ) -> Float[Array, "*B T V"]:
        """As the call, with keys from `project_keys`."""
        check_features("query", query, "T, D", "query_features", self.query_features)
        check_array("value", value, "[*B, S, V]", ndim=2)
        arrays = (query, projected_key, value, self.query[...], self.score[...])
        query, key, value, w_query, w_score = promote(arrays, dtype=self.dtype)
        if self.weights_tap.is_open:
            one_hot = jnp.broadcast_to(
                jnp.eye(key.shape[-2], dtype=value.dtype), (*key.shape[:-1], key.shape[-2])
            )
            weights = additive_attention(query, key, one_hot, w_query, None, w_score, mask=mask)
            self.weights_tap(weights[..., None, :, :])
        return additive_attention(query, key, value, w_query, None, w_score, mask=mask)

    def __call__(
        self,
        query: Float[Array, "..."],
        key: Float[Array, "..."],
        value: Float[Array, "..."] | None = None,
        *,
        mask: MaskLike = None,
    ) -> Float[Array, "*B T V"]:
        """`[*B, T, D]`, `[*B, S, E]` and `[*B, S, V]` (default: the keys) to `[*B, T, V]`."""
        return self.attend(
            query, self.project_keys(key), key if value is None else value, mask=mask
        )
