"""The mechanisms that led to scaled dot-product attention, each written as its formula.

They range from mixing tokens with a fixed matrix (`interaction`) and similarity without learned
weights (`simple_self_attention`) to query, key and value (`self_attention`). Two are the first
score functions of attention: additive (Bahdanau et al. 2015) and multiplicative (Luong et al.
2015).

Sizes: E of inputs, H1 of values, H2 of queries and keys, A of the hidden layer of the additive
score. All functions accept any number of leading batch axes `*B`.
"""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from jattn import softmax, tile
from jattn._advised import advised
from jattn._explicit import partitioned_by_xla, sharding_of
from jattn._types import Shape
from jattn.attention import attention
from jattn.call import of_shapes
from jattn.checks import check_array, check_dtype, check_flag, check_like
from jattn.kernels.common.one_operation import as_one_operation
from jattn.kernels.xla import additive
from jattn.masks import Causal, Full, MaskLike, as_mask
from jattn.options import DropoutOptions, Options
from jattn.scores import ScoreLike
from jattn.spec import Shapes


__all__ = [
    "additive_attention",
    "additive_keys",
    "causal_interaction",
    "interaction",
    "multiplicative",
    "multiplicative_attention",
    "normalised_interaction",
    "renormalised_causal",
    "self_attention",
    "simple_self_attention",
]
__dir__ = __all__.copy


def _single_head(
    query: Float[Array, "*B T H"],
    key: Float[Array, "*B S H"],
    value: Float[Array, "*B S V"],
    **arguments: Any,
) -> Float[Array, "*B T V"]:
    """Computes attention with one head, without a head axis."""
    out = attention(query[..., None, :], key[..., None, :], value[..., None, :], **arguments)
    return out[..., 0, :]


def _check_tokens(**arrays: Any) -> None:
    """Raises TypeError or ValueError unless these are float arrays `[*B, tokens, features]`."""
    for name, array in arrays.items():
        check_array(name, array, "[*B, tokens, features]", ndim=2)


def _check_matrix(name: str, array: Any, letters: str, *sizes: int) -> None:
    """Raises TypeError or ValueError unless the array is a float matrix with these first sizes."""
    check_array(name, array, letters, rank=2)
    wanted = [*sizes, *array.shape[len(sizes) :]]
    _check_shape(name, f"{letters} = {wanted}", array.shape, list(array.shape) == wanted)


def _check_shape(name: str, wanted: str, got: Shape, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {wanted}, got {list(got)}")


def simple_self_attention(
    x: Float[Array, "*B T E"], *, mask: MaskLike = None
) -> Float[Array, "*B T E"]:
    """Self-attention without learned weights: softmax(x xᵀ) x.

    The output of each token is the mean of all tokens `x [*B, T, E]`, weighted by similarity. The
    queries, keys and values are x itself, and scores are not scaled.

    >>> print(jattn.simple_self_attention(jnp.eye(3)).round(2))
    [[0.58 0.21 0.21]
     [0.21 0.58 0.21]
     [0.21 0.21 0.58]]
    """
    _check_tokens(x=x)
    return _single_head(x, x, x, mask=mask, scale=1.0)


@advised(Options)
def self_attention(
    x: Float[Array, "*B T E"],
    w_query: Float[Array, "E H2"],
    w_key: Float[Array, "E H2"],
    w_value: Float[Array, "E H1"],
    **options: Unpack[Options],
) -> Float[Array, "*B T H1"]:
    """Self-attention with three weight matrices: softmax(Q Kᵀ / √H2) V.

    Q = x w_query, K = x w_key, V = x w_value with `x [*B, T, E]`; E, H1 and H2 may all differ.
    Options are those of `attention`: `mask=masks.Causal()` makes it causal, and `scale=1` omits the
    division by √H2. Vaswani et al. 2017, section 3.2.1, with one head.

    Raises ValueError for matrices of the wrong shape, and the errors of `attention`.

    >>> jattn.self_attention(q[:, :, 0], *jnp.ones((3, 8, 6)), mask=masks.Causal()).shape
    (2, 5, 6)
    """
    _check_tokens(x=x)
    _check_matrix("w_query", w_query, "[E, H2]", x.shape[-1])
    _check_matrix("w_value", w_value, "[E, H1]", x.shape[-1])
    _check_matrix("w_key", w_key, "[E, H2]", *w_query.shape)
    return _single_head(x @ w_query, x @ w_key, x @ w_value, **options)


def renormalised_causal(weights: Float[Array, "*B T S"]) -> Float[Array, "*B T S"]:
    """Makes weights causal: sets the weights of later keys to 0 and divides by the remaining sum.

    This is one way to derive causal attention. For query i the weights after a softmax over all
    keys are w_j = exp(s_j) / Σ_k exp(s_k). The denominator cancels in w_j / Σ_{k ≤ i} w_k =
    exp(s_j) / Σ_{k ≤ i} exp(s_k), which is the softmax of scores with −inf for later keys. Setting
    scores to −inf is preferred: here, if all weights of a query round to 0 except on later keys,
    the division is 0 / 0 (and the result set to 0).

    `weights` are `[*B, T, S]`, after the softmax, for queries and keys at positions arange(T) and
    arange(S).

    >>> print(jattn.renormalised_causal(jnp.full((2, 2), 0.5)))
    [[1.  0. ]
     [0.5 0.5]]
    """
    check_array("weights", weights, "[*B, T, S]", ndim=2)
    T, S = weights.shape[-2:]
    allowed = Causal().dense(T, S).astype(weights.dtype)
    causal = weights * allowed.reshape((1,) * (weights.ndim - 2) + (T, S))
    return softmax.quotient(causal, jnp.sum(causal, axis=-1, keepdims=True))


def interaction(
    x: Float[Array, "*B S E"],
    left: Float[Array, "T S"] | Float[Array, "*B T S"] | None = None,
    right: Float[Array, "E H1"] | None = None,
) -> Float[Array, "*B T _"]:
    """Y = L X R: L mixes tokens, R mixes the features of each token.

    `left[i, j]` is the weight of token j in output i; `right` maps the features of every token in
    the same way. In attention, L = softmax(Q Kᵀ) depends on the tokens, and R is the matrix of the
    values. Other choices of L: the identity does not mix tokens, ones sum all tokens,
    `causal_interaction` sums the tokens up to each one, and `normalised_interaction` computes
    weighted means.

    `x` is `[*B, S, E]`, `left` `[T, S]` or `[*B, T, S]`, `right` `[E, H1]`; None stands for the
    identity.

    Raises ValueError for wrong shapes.

    >>> print(jattn.interaction(jnp.eye(3), jattn.causal_interaction(3)))
    [[1. 0. 0.]
     [1. 1. 0.]
     [1. 1. 1.]]
    """
    _check_tokens(x=x)
    y = x
    if right is not None:
        _check_matrix("right", right, "[E, H1]", x.shape[-1])
        y = y @ right
    if left is not None:
        check_array("left", left, "[T, S] or [*B, T, S]", ndim=2)
        batched = left.ndim == 2 or left.shape[:-2] == x.shape[:-2]
        fits = batched and left.shape[-1] == x.shape[-2]
        _check_shape("left", f"[T, S = {x.shape[-2]}], or [*B, T, S]", left.shape, fits)
        y = jnp.einsum("ts,...sh->...th" if left.ndim == 2 else "...ts,...sh->...th", left, y)
    return y


def causal_interaction(T: int, dtype: Any = jnp.float32) -> Float[Array, "T T"]:
    """Returns the lower-triangular L of ones: output i is the sum of tokens 0 to i.

    >>> print(jattn.causal_interaction(3))
    [[1. 0. 0.]
     [1. 1. 0.]
     [1. 1. 1.]]
    """
    check_dtype("dtype", dtype)
    return Causal().dense(T, T).astype(dtype)


def normalised_interaction(
    left: Float[Array, "*B T S"], mask: MaskLike = None
) -> Float[Array, "*B T S"]:
    """Replaces each row of L by its softmax: positive weights that sum to 1.

    Entries that `mask` forbids get weight 0. The mask may depend on positions alone, as `Causal()`
    does.

    >>> print(jattn.normalised_interaction(jnp.zeros((2, 2)), masks.Causal()))
    [[1.  0. ]
     [0.5 0.5]]
    """
    check_array("left", left, "[*B, T, S]", ndim=2)
    T, S = left.shape[-2:]
    allowed = (Full() if mask is None else as_mask(mask)).dense(T, S)
    allowed = allowed.reshape((1,) * (left.ndim - 2) + (T, S))
    return _masked_softmax(allowed, left)


@jax.jit
def _masked_softmax(allowed: Bool[Array, "*B T S"], left: Float[Array, "*B T S"]) -> Array:
    """Computes the softmax of each row. Unlike `jax.nn.softmax` it gives 0, not NaN, to rows in
    which all entries are masked."""

    def normalise(scores: Array) -> Array:
        return softmax.finish(softmax.contribution(scores, lambda weights: weights))[0]

    def formula(allowed: Array, left: Array) -> Array:
        scores = jnp.where(allowed, left, -jnp.inf)
        return jnp.vectorize(normalise, signature="(t,s)->(t,s)")(scores)

    # One operation, so that JAX's debugging flags do not find the −inf of masked entries.
    return as_one_operation(formula)(allowed, left)


def multiplicative(
    query: Float[Array, "*B T Dq"], weight: Float[Array, "Dq Dk"]
) -> Float[Array, "*B T Dk"]:
    """Computes query W: its products with keys are Luong's "general" scores qᵀ W k.

    >>> jattn.multiplicative(q[:, :, 0], jnp.ones((8, 6))).shape
    (2, 5, 6)
    """
    _check_tokens(query=query)
    _check_matrix("weight", weight, "[Dq, Dk]", query.shape[-1])
    return query @ weight


@advised(Options)
def multiplicative_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    weight: Float[Array, "Dq Dk"],
    **options: Unpack[Options],
) -> Float[Array, "*B T V"]:
    """Luong et al. 2015, section 3.1, "general": softmax(query W keyᵀ) value.

    `query [*B, T, Dq]`, `key [*B, S, Dk]`, `value [*B, S, V]`, `weight [Dq, Dk]`. Options are those
    of `attention`, but `scale` is 1 by default, as in the paper; `scale=None` is 1/√Dk.

    Raises ValueError if `weight` has the wrong shape, and the errors of `attention`.

    >>> jattn.multiplicative_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], jnp.eye(8)).shape
    (2, 5, 8)
    """
    _check_tokens(query=query, key=key, value=value)
    _check_matrix("weight", weight, "[Dq, Dk]", query.shape[-1], key.shape[-1])
    return _single_head(query @ weight, key, value, **{"scale": 1.0, **options})


def additive_keys(
    key: Float[Array, "*B S Dk"], w_key: Float[Array, "Dk A"]
) -> Float[Array, "*B S A"]:
    """Computes key w_key for `additive_attention`: once, for all steps of decoding.

    >>> jattn.additive_keys(k[:, :, 0], jnp.ones((8, 6))).shape
    (2, 7, 6)
    """
    _check_tokens(key=key)
    _check_matrix("w_key", w_key, "[Dk, A]", key.shape[-1])
    check_like("w_key", w_key, key)
    return _project(key, w_key)


@jax.jit
@partitioned_by_xla(lambda x, _: PartitionSpec(*sharding_of(x)[:-1], None))
def _project(x: Float[Array, "*B T D"], w: Float[Array, "D A"]) -> Float[Array, "*B T A"]:
    """Computes x w. Tokens of x that are not finite, which may be masked, do not contribute to the
    gradient of w: their cotangents are 0, and 0 × NaN would be NaN."""
    product = tile.dot_products(x.reshape(-1, x.shape[-1]), w.T)
    return product.reshape(*x.shape[:-1], w.shape[-1]).astype(x.dtype)


class _AdditiveOptions(DropoutOptions, total=False):
    """The options of `additive_attention`."""

    mask: MaskLike
    score: ScoreLike


@overload
def additive_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    w_query: Float[Array, "Dq A"],
    w_key: Float[Array, "Dk A"] | None,
    w_score: Float[Array, " A"],
    *,
    return_weights: Literal[False] = False,
    **options: Unpack[_AdditiveOptions],
) -> Float[Array, "*B T V"]: ...
@overload
def additive_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    w_query: Float[Array, "Dq A"],
    w_key: Float[Array, "Dk A"] | None,
    w_score: Float[Array, " A"],
    *,
    return_weights: Literal[True],
    **options: Unpack[_AdditiveOptions],
) -> tuple[Float[Array, "*B T V"], Float[Array, "*B T S"]]: ...
@advised(_AdditiveOptions)
def additive_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    w_query: Float[Array, "Dq A"],
    w_key: Float[Array, "Dk A"] | None,
    w_score: Float[Array, " A"],
    *,
    return_weights: bool = False,
    **options: Unpack[_AdditiveOptions],
) -> Any:
    """softmax(w_score · tanh(query w_query + key w_key)) value.

    Bahdanau, Cho and Bengio 2015, section 3.1 and appendix A.1.2. The score is a small network, so
    that queries and keys may differ in size. `query [*B, T, Dq]`, `key [*B, S, Dk]`,
    `value [*B, S, V]`, `w_query [Dq, A]`, `w_key [Dk, A]`, `w_score [A]`; a mask array has one
    head, `[*B, 1, T, S]`. With `w_key=None`, `key` is the result of `additive_keys`, `[*B, S, A]`.
    The hidden layer is computed by tiles: neither the forward nor the backward pass stores all its
    T × S × A numbers.

    `return_weights=True` returns `(out, weights [*B, T, S])`, the weights after softmax and
    dropout, in float32 (float64), for inspection. Only then does memory grow with T × S.

    Raises ValueError for wrong shapes, and the errors of `attention`.

    >>> state, memory, w = q[:, :, 0], k[:, :, 0], jnp.ones((8, 6))
    >>> jattn.additive_attention(state, memory, memory, w, w, jnp.ones(6)).shape
    (2, 5, 8)
    """
    check_flag("return_weights", return_weights)
    _check_additive(query, key, value, w_query, w_key, w_score)
    key = key if w_key is None else additive_keys(key, w_key)
    A = w_score.shape[0]
    tokens = list(key.shape[:-1])
    fits = list(value.shape[:-1]) == tokens
    _check_shape("value", f"[*B, S, V] with [*B, S] = {tokens} as in key", value.shape, fits)
    batch = list(query.shape[:-2])
    fits = list(key.shape[:-2]) == batch
    _check_shape("key", f"[*B, S, ...] with *B = {batch} as in query", key.shape, fits)
    _check_shape("key", f"[*B, S, A = {A}]", key.shape, key.shape[-1] == A)
    batch, T, S = query.shape[:-2], query.shape[-2], key.shape[-2]
    query = _project(query, w_query)
    shapes = Shapes(batch, T, S, 1, 1, A, value.shape[-1], query.dtype)
    call = of_shapes(shapes, scale=1.0, **options)
    out = additive.attend(call, query, key, value, w_score, tiling=additive.choose_tiling(T, S))
    if not return_weights:
        return out
    return out, additive.weights(call, query, key, w_score)


def _check_additive(
    query: Any, key: Any, value: Any, w_query: Any, w_key: Any | None, w_score: Any
) -> None:
    """Raises TypeError or ValueError unless dtypes and shapes of the arrays match."""
    _check_tokens(query=query, key=key, value=value)
    arrays = (
        ("key", key, "[*B, S, Dk]"),
        ("value", value, "[*B, S, V]"),
        ("w_query", w_query, "[Dq, A]"),
        ("w_key", w_key, "[Dk, A]"),
        ("w_score", w_score, "[A]"),
    )
    for name, array, letters in arrays:
        if array is not None or name != "w_key":
            check_array(name, array, letters)
            check_like(name, array, query)
    _check_shape("w_score", "[A]", w_score.shape, len(w_score.shape) == 1)
    A = w_score.shape[0]
    _check_matrix("w_query", w_query, "[Dq, A]", query.shape[-1], A)
    if w_key is not None:
        _check_matrix("w_key", w_key, "[Dk, A]", key.shape[-1], A)
