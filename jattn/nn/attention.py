"""`MultiHeadAttention`, the module that projects the inputs and outputs of `jattn.attention`."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, overload

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Float, Int

from jattn._advice import CONSTRUCTOR_ADVICE, LAYER_ADVICE
from jattn._advised import advised_by
from jattn._types import Keys, Output, Queries, Values
from jattn.attention import IMPLEMENTATIONS, attention, attention_weights
from jattn.cache import Cache, DenseCache
from jattn.cache.base import CacheOptions, check_cache, check_kind
from jattn.checks import check_choice, check_flag, check_number, check_precision, check_size, shown
from jattn.decoding import cached_attention
from jattn.functions.integers import is_integer
from jattn.kernels.common.place import only_head
from jattn.masks import Mask, MaskLike, as_mask
from jattn.nn._types import CallOptions, MemoryOptions, Positions, Valid
from jattn.nn.capture import WeightsTap
from jattn.nn.embedding import AxialRotary, Rotary
from jattn.nn.layers import LECUN, ZEROS, Dropout, LayerNorm, RMSNorm, linear, sharded
from jattn.nn.module import Module, check_features, check_module
from jattn.nn.variables import LearnedScore, PytreeVariables
from jattn.normalizers import NormalizerLike, as_normalizer
from jattn.options import CachedOptions, DropoutOptions, Options, WeightOptions
from jattn.scores import ScoreFunction, ScoreLike, as_score


_Cache = TypeVar("_Cache", bound=Cache)

# The options of `attention_weights`, which computes the weights before dropout.
_WEIGHT_OPTIONS = WeightOptions.__annotations__.keys() - DropoutOptions.__annotations__.keys()


class MultiHeadAttention(Module):
    """Multi-head self-attention and cross-attention (Vaswani et al. 2017), also grouped-query.

    The parameters have the names and shapes of `flax.nnx.MultiHeadAttention`, and give the same
    output: kernels `query` `[D, N, H]`, `key` and `value` `[E, K, H]`, `out` `[N, H, out_features]`
    with H = qkv_features / N, and a bias for each. Flax has neither `sinks` nor `value_dim`, with
    which the kernels `value` and `out` are `[E, K, V]` and `[N, V, out_features]`.

    Args:
        num_heads: N; must divide qkv_features.
        in_features: D, the width of `inputs_q`.
        qkv_features: N·H, the width of all heads together; default D, or N·head_dim.
        out_features: the width of the output; default D.
        num_kv_heads: K, must divide N; query head n uses key head n // (N / K). Default N.
        in_kv_features: E, the width of `inputs_k` and `inputs_v`; default D.
        head_dim: H, of any size; default qkv_features / N.
        value_dim: V, the width of each head's values; default H.
        scale: the factor of query·key; default 1/√H.
        sinks: whether each head has a learned logit that takes part in the softmax without a value
            (`sink` of `jattn.attention`): a parameter `[N]`, initially 0.
        dropout_rate: the rate of dropout on the attention weights.
        use_bias: whether the four projections have biases; "qkv" for all but the output's.
        dtype: the dtype of the computation, by default that of inputs and parameters, promoted.
        param_dtype: the dtype of the parameters.
        precision: the precision of the matrix products, as in `jax.lax.Precision`.
        kernel_init: the initializer of the four kernels; default `nnx.initializers.lecun_normal()`.
        bias_init: the initializer of the four biases; default zeros.
        normalize_qk: whether each head's queries and keys are normalised (Dehghani et al. 2023)
            with a learned scale: "layer" (also True) or "rms" normalisation, or a function that
            makes the module, such as `functools.partial(RMSNorm, epsilon=1e-5)`.
        rotary: the `Rotary` or, for images, `AxialRotary` that rotates queries and keys by their
            positions; True means `Rotary()`.
        mask, score: a mask and a score function for every call. A call's own mask is combined with
            the mask by `&`, its own score function is applied after `score`. Their arrays are not
            trained; for arrays that are, see `LearnedScore`. Assigning to the layer's attributes
            `mask`, `score` and `normalizer` replaces them.
        normalizer: a normalizer for every call, in place of the softmax. Its arrays are not
            trained; for arrays that are, see `LearnedNormalizer`.
        implementation: as in `jattn.attention`.
        rngs: its stream `params` initializes the parameters. If it has a stream `dropout`, the
            module keeps a fork of that stream for calls without `rngs`.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for a size that is not positive, for heads that do not divide a width or a
            number of heads, for a `head_dim` that does not fit `qkv_features`, for a
            `dropout_rate` outside [0, 1), for an unknown name, and for `sinks` with a normalizer.

    >>> layer = nn.MultiHeadAttention(2, 8, mask=masks.Causal(), rotary=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    # In `SingleHeads`: the number of this head, and the number of heads.
    _head_of_list: tuple[int, int] | None = None

    @advised_by(CONSTRUCTOR_ADVICE)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool | Literal["qkv"] = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        normalize_qk: bool | Literal["layer", "rms"] | Callable[..., LayerNorm | RMSNorm] = False,
        rotary: Rotary | AxialRotary | bool = False,
        mask: MaskLike = None,
        score: ScoreLike | LearnedScore = None,
        normalizer: NormalizerLike = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(use_bias, str) or use_bias != "qkv":
            check_flag("use_bias", use_bias)
        check_flag("sinks", sinks)
        _check_options(scale, precision, normalize_qk, rotary, implementation)
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = _qkv_features(num_heads, in_features, qkv_features, head_dim)
        self.out_features = in_features if out_features is None else out_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        widths = ("in_features", "qkv_features", "out_features", "in_kv_features")
        initializers = {"kernel_init": kernel_init, "bias_init": bias_init}
        sizes = {name: getattr(self, name) for name in widths}
        check_module(rngs, dtype=dtype, param_dtype=param_dtype, functions=initializers, **sizes)
        self.scale = None if scale is None else float(scale)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.normalize_qk = "layer" if normalize_qk is True else normalize_qk
        self.rotary = Rotary() if rotary is True else rotary or None
        self.implementation = implementation
        self._make_parameters(value_dim, sinks, rngs, initializers)
        self.mask: Any = None if mask is None else as_mask(mask)  # a copy of another layer's
        self.score: Any = score
        self.normalizer: Any = normalizer
        if sinks and self.normalizer is not None:
            raise ValueError("sinks: expected False with a normalizer, as only a softmax has sinks")
        self.dropout = Dropout(dropout_rate, rngs=rngs)
        self.weights_tap = WeightsTap()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; converts a mask, a score function or a normalizer to a module."""
        super().__setattr__(name, _as_module(name, value) if name in _CONVERSIONS else value)

    def _make_parameters(
        self,
        value_dim: int | None,
        sinks: bool,
        rngs: nnx.Rngs,
        initializers: dict[str, Initializer],
    ) -> None:
        """Sets the sizes of one head, and makes the projections, the norms and the sinks."""
        _check_divides("num_heads", self.num_heads, "qkv_features", self.qkv_features)
        _check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        self.head_dim = self.qkv_features // self.num_heads
        self.value_dim = self.head_dim if value_dim is None else value_dim
        check_size("value_dim", self.value_dim)
        names = ("dtype", "param_dtype", "precision")
        options = {name: getattr(self, name) for name in names} | initializers
        make = functools.partial(linear, nnx.LinearGeneral, rngs=rngs, **options)
        self._make_projections(functools.partial(make, use_bias=bool(self.use_bias)), rngs)
        heads, axes = (self.num_heads, self.value_dim), ("heads", "head_size", "embed")
        options = {"axis": (-2, -1), "use_bias": self.use_bias is True}
        self.out = make(heads, self.out_features, axes, **options)
        logits = jnp.zeros(self.num_heads, self.param_dtype)
        self.sinks = nnx.Param(logits, **sharded("heads")) if sinks else None

    def _make_projections(self, make: Callable[..., Any], rngs: nnx.Rngs) -> None:
        """Makes the projections of queries, keys and values, and their norms; `make` makes one."""
        N, K, H, V = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        kv_heads = ("embed", "kv_heads", "head_size")
        self.query = make(self.in_features, (N, H), ("embed", "heads", "head_size"))
        self.key = make(self.in_kv_features, (K, H), kv_heads)
        self.value = make(self.in_kv_features, (K, V), kv_heads)
        self.query_ln = self._norm(rngs)
        self.key_ln = self._norm(rngs)

    def _norm(self, rngs: nnx.Rngs) -> LayerNorm | RMSNorm | None:
        """Makes the normalisation of queries or keys; None without `normalize_qk`."""
        if not self.normalize_qk:
            return None
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        options: Any = {"axis": "head_size", "rngs": rngs, **dtypes}
        if callable(self.normalize_qk):
            return self.normalize_qk(self.head_dim, **options)
        if self.normalize_qk == "rms":
            return RMSNorm(self.head_dim, **options)
        return LayerNorm(self.head_dim, use_bias=False, **options)

    def project_queries(
        self, inputs_q: Float[Array, "..."], positions: Positions = None
    ) -> Queries:
        """Returns the projected, normalised and rotated queries `[*B, T, N, H]`."""
        check_features("inputs_q", inputs_q, "T, D", "in_features", self.in_features)
        return self._normalised_and_rotated(self.query(inputs_q), self.query_ln, positions)

    def project_keys_values(
        self,
        inputs_k: Float[Array, "..."],
        inputs_v: Float[Array, "..."] | None = None,
        positions: Positions = None,
    ) -> tuple[Keys, Values]:
        """Returns the projected, normalised and rotated keys `[*B, S, K, H]`, and the projected
        values `[*B, S, K, V]`."""
        inputs_v = inputs_k if inputs_v is None else inputs_v
        check_features("inputs_k", inputs_k, "S, E", "in_kv_features", self.in_kv_features)
        check_features("inputs_v", inputs_v, "S, E", "in_kv_features", self.in_kv_features)
        key = self._normalised_and_rotated(self.key(inputs_k), self.key_ln, positions)
        return key, self.value(inputs_v)

    def _normalised_and_rotated(
        self, x: Float[Array, "*B T N H"], norm: LayerNorm | RMSNorm | None, positions: Positions
    ) -> Float[Array, "*B T N H"]:
        x = x if norm is None else norm(x)
        if self.rotary is None:
            return x
        if positions is None:
            positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
        return self.rotary(x, positions)

    def attend(
        self, query: Queries, key: Keys, value: Values, **call: Unpack[CallOptions]
    ) -> Output:
        """Computes the output of each head, `[*B, T, N, V]`, from projected queries, keys and
        values. The options are those of `__call__`."""
        options: Options = {
            **self._options(call),
            "q_positions": call.get("positions"),
            "kv_positions": call.get("kv_positions"),
        }
        if self.weights_tap.is_open:
            tapped: Any = {name: x for name, x in options.items() if name in _WEIGHT_OPTIONS}
            self.weights_tap(attention_weights(query, key, **tapped))
        return self._attention(query, key, value, **options)

    def _attention(self, query: Queries, key: Keys, value: Values, **options: Any) -> Any:
        """Calls `jattn.attention`, for `attend`.

        A subclass may override it, for instance to call `jattn.parallel.attention`.
        """
        return attention(query, key, value, **options)

    def _options(self, call: MemoryOptions) -> CachedOptions:
        """Returns the module's and a call's options of `jattn.attention`, except positions."""
        dropout_key = self.dropout.key(call.get("deterministic"), call.get("rngs"))
        normalizer = None if self.normalizer is None else self.normalizer()
        rules = self._mask(call.get("mask")), self._score(call.get("score")), normalizer
        if self._head_of_list is not None:
            rules = only_head(rules, *self._head_of_list)
        mask, score, normalizer = rules
        return {
            "mask": mask,
            "score": score,
            "scale": self.scale,
            "sink": None if self.sinks is None else self.sinks[...],
            "normalizer": normalizer,
            "precision": self.precision,
            "dropout_rate": 0.0 if dropout_key is None else float(self.dropout.rate),
            "dropout_key": dropout_key,
            "implementation": self.implementation,
        }

    def _mask(self, call_mask: MaskLike) -> Mask | None:
        if self.mask is None:
            return None if call_mask is None else as_mask(call_mask)
        return self.mask() if call_mask is None else self.mask() & call_mask

    def _score(self, call_score: ScoreLike) -> ScoreFunction | None:
        module_score: Any = self.score
        score = as_score(call_score)
        if module_score is None:
            return score
        return module_score() if score is None else module_score() >> score

    @overload
    def __call__(
        self,
        inputs_q: Float[Array, "..."],
        inputs_k: Float[Array, "..."] | None = None,
        inputs_v: Float[Array, "..."] | None = None,
        *,
        cache: None = None,
        valid: None = None,
        **options: Unpack[CallOptions],
    ) -> Float[Array, "*B T out"]: ...
    @overload
    def __call__(
        self,
        inputs_q: Float[Array, "..."],
        inputs_k: None = None,
        inputs_v: None = None,
        *,
        cache: _Cache,
        valid: Valid = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Float[Array, "B T out"], _Cache]: ...
    @advised_by(LAYER_ADVICE, CallOptions)
    def __call__(
        self,
        inputs_q: Float[Array, "..."],
        inputs_k: Float[Array, "..."] | None = None,
        inputs_v: Float[Array, "..."] | None = None,
        *,
        cache: _Cache | None = None,
        valid: Valid = None,
        **options: Unpack[CallOptions],
    ) -> Float[Array, "*B T out"] | tuple[Float[Array, "B T out"], _Cache]:
        """Attends from `inputs_q` to `inputs_k`; to `inputs_q` itself if `inputs_k` is None.

        Args:
            inputs_q: `[*B, T, D]`.
            inputs_k: `[*B, S, E]`; None means self-attention.
            inputs_v: `[*B, S, E]`; None means `inputs_k`.
            mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` with all these axes,
                which is True where a query may attend to a key.
            score: a score function.
            positions: the positions of queries, `[*B, T]` or `[T]`, default `arange(T)`; in
                self-attention also those of keys.
            kv_positions: the positions of keys, `[*B, S]` or `[S]`, default `arange(S)`.
            cache: for self-attention, the cache of the tokens before `inputs_q [B, T, D]`. The
                positions of `inputs_q` are by default the numbers of tokens in the cache; a cache
                created with `positions=True` takes others.
            valid: bool `[B, T]`, False for padding, which is not written to the cache.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: the source of the dropout key, from its stream `dropout`.

        Returns:
            `[*B, T, out_features]`; with a cache, a pair of this output and the extended cache.

        Raises ValueError for inputs of the wrong width, for dropout without random numbers, and for
        arguments that exclude a cache.
        """
        positions, kv_positions = options.get("positions"), options.get("kv_positions")
        if cache is not None:
            check_cache("cache", cache)
            excluded = {"inputs_k": inputs_k, "inputs_v": inputs_v}
            _check_with_cache(excluded | {"kv_positions": kv_positions})
            return self._extend(inputs_q, cache, valid, options)
        if valid is not None:
            raise ValueError(
                "valid: expected None in a call without a cache, got an array; "
                "mask padding with mask="
            )
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError("inputs_k: expected [*B, S, E], as inputs_v is given, got None")
            inputs_k = inputs_q
            kv_positions = positions if kv_positions is None else kv_positions
        query = self.project_queries(inputs_q, positions)
        key, value = self.project_keys_values(inputs_k, inputs_v, kv_positions)
        options["kv_positions"] = kv_positions
        return self.out(self.attend(query, key, value, **options))

    @overload
    def empty_cache(self, batch: int, length: int, *, dtype: Dtype | None = None) -> DenseCache: ...
    @overload
    def empty_cache(
        self,
        batch: int,
        length: int,
        kind: type[_Cache],
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> _Cache: ...
    def empty_cache(
        self,
        batch: int,
        length: int,
        kind: type[Cache] = DenseCache,
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> Cache:
        """Makes a cache for self-attention over up to `length` tokens in each of `batch` rows.

        `kind` is a class of `jattn.cache`, and `options` are those of its `create`; for a
        `RollingCache` the length is that of its window. `dtype` is by default that of the module.
        """
        cache_class: Any = check_kind(kind)
        sizes = (self.num_kv_heads, self.head_dim, self.value_dim)
        return cache_class.create(batch, length, *sizes, self._cache_dtype(dtype), **options)

    def _cache_dtype(self, dtype: Dtype | None) -> Dtype:
        """Returns the dtype of a cache: by default that of the module, or of its parameters."""
        dtypes = dtype, self.dtype, self.out.kernel[...].dtype
        return next(x for x in dtypes if x is not None)

    def _extend(
        self, inputs_q: Float[Array, "B T D"], cache: _Cache, valid: Valid, call: CallOptions
    ) -> tuple[Float[Array, "B T out"], _Cache]:
        """Returns the output of self-attention for T further tokens, and the extended cache."""
        self._check_not_captured()
        check_features("inputs_q", inputs_q, "T, D", "in_features", self.in_features)
        if inputs_q.ndim != 3 or len(inputs_q) != len(cache.lengths):
            raise ValueError(
                f"inputs_q: expected [B, T, D] with B = {len(cache.lengths)} as in the cache, got "
                f"{list(inputs_q.shape)}"
            )
        positions = call.get("positions")
        new_positions = cache.next_positions(inputs_q.shape[1], valid, positions)
        query, key, value = self._project_step(inputs_q, new_positions)
        step: Any = {"valid": valid, "positions": positions, **self._options(call)}
        heads, cache = cached_attention(query, key, value, cache, **step)
        return self.out(self._step_heads(heads)), cache

    def _project_step(
        self, inputs: Float[Array, "B T D"], positions: Positions
    ) -> tuple[Queries, Keys, Values | None]:
        """Returns the queries, and the keys and values to append to a cache."""
        query = self.project_queries(inputs, positions)
        return query, *self.project_keys_values(inputs, None, positions)

    def _step_heads(self, heads: Float[Array, "B T N _"]) -> Float[Array, "B T N _"]:
        """Returns the output of each head from the results of attention to a cache."""
        return heads

    def project_memory(
        self,
        inputs_k: Float[Array, "B S E"],
        lengths: Int[Array | np.ndarray, " B"] | None = None,
        positions: Positions = None,
        dtype: Dtype | None = None,
    ) -> DenseCache:
        """Projects `inputs_k [B, S, E]` to keys and values, for several calls of `attend_memory`.

        `lengths [B]`, by default S, is the number of positions of each row before its padding.
        `positions` are `[B, S]` or `[S]`, by default `arange(S)`; masks and score functions see
        them too. `dtype` is that of the stored keys and values, by default that of the projections.
        """
        keys_values = self.project_keys_values(inputs_k, None, positions)
        return DenseCache.of(*keys_values, lengths, dtype, positions)

    @advised_by(LAYER_ADVICE, MemoryOptions)
    def attend_memory(
        self, inputs_q: Float[Array, "B T D"], memory: Cache, **call: Unpack[MemoryOptions]
    ) -> Float[Array, "B T out"]:
        """Attends to the result of `project_memory`; computes what `__call__` does for `inputs_k`.

        Maps `inputs_q [B, T, D]` to `[B, T, out_features]`. `positions [B, T]` or `[T]` are those
        of the queries, by default `arange(T)`.
        """
        self._check_not_captured()
        check_cache("memory", memory)
        positions = call.get("positions")
        query = self.project_queries(inputs_q, positions)
        if positions is None:
            positions = jnp.arange(query.shape[1], dtype=jnp.int32)
        options = self._options(call)
        return self.out(attention(query, memory, q_positions=positions, **options))

    def _check_not_captured(self) -> None:
        if self.weights_tap.is_open:
            raise NotImplementedError(
                "capture_weights: attention weights cannot be captured in a call with a cache; "
                "call the model with whole sequences instead"
            )


def _qkv_features(num_heads: Any, in_features: Any, qkv_features: Any, head_dim: int | None) -> Any:
    """Returns the width of all heads together."""
    if head_dim is None:
        return in_features if qkv_features is None else qkv_features
    check_size("head_dim", head_dim)
    check_size("num_heads", num_heads)
    if qkv_features not in (None, num_heads * head_dim):
        raise ValueError(
            f"head_dim: expected qkv_features to be None or num_heads · head_dim = "
            f"{num_heads * head_dim}, got {shown(qkv_features)}"
        )
    return num_heads * head_dim


def _check_options(
    scale: Any, precision: Any, normalize_qk: Any, rotary: Any, implementation: Any
) -> None:
    """Raises TypeError or ValueError for invalid options of a module."""
    if hasattr(scale, "dtype"):
        raise TypeError("scale: expected a Python number, got an array")
    if scale is not None:
        check_number("scale", scale)
    check_precision("precision", precision)
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if not callable(normalize_qk):
        check_choice("normalize_qk", normalize_qk, (False, True, "layer", "rms"))
    if not isinstance(rotary, bool | Rotary | AxialRotary):
        raise TypeError(f"rotary: expected True, False or a Rotary, got {rotary!r}")


_CONVERSIONS = {"mask": as_mask, "score": as_score, "normalizer": as_normalizer}


def _as_module(name: str, value: Any) -> Any:
    """Returns a module that holds a mask, a score function or a normalizer; None for the default.

    A `PytreeVariables` stays the same object, and so does a module that returns a score function.
    """
    is_module = isinstance(value, nnx.Module if name == "score" else PytreeVariables)
    if value is not None and not is_module:
        value = _CONVERSIONS[name](value)
        value = None if value is None else PytreeVariables(value)
    return nnx.static(None) if value is None else nnx.data(value)  # it may replace the other kind


def _check_divides(name: str, value: int, total_name: str, total: int) -> None:
    """Raises TypeError or ValueError unless `value` is a positive divisor of `total`."""
    if not is_integer(value):
        check_size(name, value)
    if value < 1 or total % value:
        raise ValueError(
            f"{name}: expected a positive divisor of {total_name}={total}, got {shown(value)}"
        )


def _check_with_cache(arguments: dict[str, Any]) -> None:
    """Raises ValueError if one of the arguments, by name, that exclude a cache is not None."""
    for name, argument in arguments.items():
        if argument is not None:
            raise ValueError(
                f"{name}: expected None in a call with a cache, which is self-attention to the "
                f"cached tokens and these; got an array"
            )
