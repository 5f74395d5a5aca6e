"""Forward and backward of attention on TPUs by JAX's own kernel, "splash attention".

The kernel asks for a mask tile by tile when it is made: `_Tiles` answers from the mask's bounds and
evaluates only what those leave open. It takes sizes that are whole multiples of 128, which inputs
are padded to. Operands and results have the dtype of the inputs.

The kernel knows no scale: queries times the scale would be rounded, and so would gradients. It
multiplies what is masked with 0, but 0 × NaN is NaN. And it rounds out to the dtype of the inputs,
where the backward pass needs the digits. So the traced kernel is edited: around its matrix products
stand factors, in float32, and what keeps numbers finite; and beside out rounded it stores what that
lacks, in place of copies of lse, without more memory. For values of more than 256 there is no room;
queries are float32 instead. A key whose value is not finite becomes NaN there, and with it what
attends to it; rows that are NaN take no part in the backward pass.

Two things differ from other implementations. Of the softmax it keeps one number, maximum + log of
the sum, as float32: at logits of size x the weights of the backward pass have a relative error of
x · 2⁻²⁴, all of a row the same. And values that overflow when summed give infinite means.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as lazy
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int

from jattn import integers, masks, tile, tuning
from jattn._pytree import number
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.lowering import default_settings
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent
from jattn.kernels.tpu.splash_masks import KernelMask, as_splash
from jattn.masks import Mask
from jattn.scores import SoftCap
from jattn.softmax import Normalizer
from jattn.spec import Spec


_LANES = 128  # sizes are whole multiples of it
_SMALL = 2.0**-32  # times d_out: so its products with masked values do not overflow
_DEAD = 0.5 * kernel.DEFAULT_MASK_VALUE  # the lse of a query without keys is below


class _Tiles(lazy.Mask):
    """A static mask `[T, S]` as the kernel asks for it, a tile at a time."""

    def __init__(self, mask: Mask, T: int, S: int):
        self._mask, self._shape = mask, (T, S)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, place: tuple[slice, slice]) -> np.ndarray:
        runs = [
            np.arange(*x.indices(size), dtype=np.int32)
            for x, size in zip(place, self._shape, strict=True)
        ]
        shape = (len(runs[0]), len(runs[1]))
        tile = masks.Tile.grid(*(masks.Extent(x[:1], x[-1:], x[:1], len(x)) for x in runs))
        kind = int(masks.kinds(self._mask, tile)[0, 0])
        if kind != masks.MIXED:
            return np.full(shape, kind == masks.FULL)
        with jax.ensure_compile_time_eval():
            rows, columns = (masks.as_span(x) for x in runs)
            allowed = self._mask.evaluate(np.int32(0), np.int32(0), rows, columns)
            return np.array(np.broadcast_to(np.asarray(allowed), shape))


def _ids(mask: KernelMask, T: int, S: int) -> tuple[Array, Array] | None:
    """Ids `[B or 1, T]`, `[B or 1, S]` that are equal where segments and lengths allow."""
    if mask.segments is None and not mask.lengths:
        return None
    q_ids, kv_ids = jnp.zeros((1, T), jnp.int32), jnp.zeros((1, S), jnp.int32)
    if mask.segments is not None:
        q_ids, kv_ids = (
            jnp.atleast_2d(x).astype(jnp.int32) for x in (mask.segments.q_ids, mask.segments.kv_ids)
        )
        if mask.lengths:  # so that there are two that no token has
            q_ids, kv_ids = integers.numbered(q_ids, kv_ids)
    unused = T + S
    for one in mask.lengths:
        q_ids = _outside(q_ids, one.q, unused)
        kv_ids = _outside(kv_ids, one.kv, unused + 1)
    return q_ids, kv_ids


def _outside(ids: Int[Array, "_ t"], length: Any, other: int) -> Int[Array, "_ t"]:
    """The ids, with another one from `length` on (a number or one for each row)."""
    if length is None:
        return ids
    length = jnp.reshape(jnp.asarray(integers.clamped(number(length))), (-1, 1))
    return jnp.where(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < length, ids, other)


def _round_up(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _width(size: int, dtype: Any) -> int:
    """What a head size becomes: whole registers, in 16 bits also half ones, which XLA then need
    not copy."""
    half = size == _LANES // 2 and dtype != jnp.float32
    return size if half else _round_up(size)


def _slices(size: int) -> list[slice]:
    block = tuning.current().splash_block
    return [slice(i, min(i + block, size)) for i in range(0, size, block)]


def _block(size: int) -> int:
    """The largest block that divides a padded length."""
    return math.gcd(size, tuning.current().splash_block)


class _Call(NamedTuple):
    """A call in the kernel's terms: sizes padded, heads before tokens."""

    spec: Spec
    mask: KernelMask
    T: int
    S: int
    N: int
    interpret: bool

    @classmethod
    def of(cls, interpret: bool, spec: Spec, query: Array, key: Array) -> "_Call":
        (_, T, N, _), S = query.shape, key.shape[1]
        return cls(spec, as_splash(spec.mask), T, S, N, interpret)

    @property
    def scale(self) -> float:
        return float(number(self.spec.scale))

    @property
    def ids(self) -> Any:
        """Padded ids `[B or 1, ·]` of queries and keys, or None."""
        found = _ids(self.mask, self.T, self.S)
        if found is None:
            return None
        sizes = (_round_up(x.shape[1]) - x.shape[1] for x in found)
        padded = (jnp.pad(x, ((0, 0), (0, n))) for x, n in zip(found, sizes, strict=True))
        return kernel.SegmentIds(*padded)

    @property
    def every_query_has_keys(self) -> bool:
        """Whether that is known while tracing."""
        if self.mask.segments is not None or self.mask.lengths:
            return False
        tiles = _Tiles(self.mask.static, self.T, self.S)
        columns = _slices(self.S)
        for rows in _slices(self.T):
            found = itertools.accumulate((tiles[rows, x].any(1) for x in columns), np.logical_or)
            if not any(x.all() for x in found):
                return False
        return True

    def made(self, backward: bool = False, lse: bool = True) -> kernel.SplashAttentionKernel:
        """JAX's kernel for this mask; with `backward` it knows the tiles of both passes."""
        T, S = _round_up(self.T), _round_up(self.S)
        static = self.mask.static
        if self.S < S:
            static = static & masks.Lengths(kv=self.S)
        q, kv, score = _block(T), _block(S), self.spec.score
        blocks = kernel.BlockSizes(q, kv)
        if backward:
            blocks = kernel.BlockSizes(q, kv, kv, q, kv, kv, q, kv)
        return kernel.make_splash_mha(
            lazy.MultiHeadMask([_Tiles(static, T, S)] * self.N),
            block_sizes=blocks,
            save_residuals=lse,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=float(score.cap) if isinstance(score, SoftCap) else None,
            interpret=self.interpret,
        )

    def over_rows(self, function: Any, *arrays: Array) -> Any:
        """Maps `function(ids, *arrays)` over batch rows; ids of one row are for all."""
        axes = jax.tree.map(lambda x: 0 if x.shape[0] > 1 else None, self.ids)
        ids = jax.tree.map(lambda x: x if x.shape[0] > 1 else x[0], self.ids)
        return jax.vmap(function, (axes, *[0] * len(arrays)))(ids, *arrays)


def _padded(x: Array) -> Array:
    """`[B, T, N, ...]` as `[B, N, T, ...]`, filled up with zeros behind the heads."""
    x = jnp.moveaxis(x, 2, 1)
    padded = [_round_up(x.shape[2]), *(_width(size, x.dtype) for size in x.shape[3:])]
    behind = [(0, n - size) for n, size in zip(padded, x.shape[2:], strict=True)]
    return jnp.pad(x, [(0, 0), (0, 0), *behind])


def _cut(x: Array, *sizes: int) -> Array:
    """The inverse."""
    return jnp.moveaxis(x[(slice(None), slice(None), *map(slice, sizes))], 1, 2)


def _forward(
    interpret: bool, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    return _forward_rounded(interpret, spec, query, key, value)[:3]


def _forward_rounded(
    interpret: bool, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array, Array]:
    call = _Call.of(interpret, spec, query, key)
    out, lse, rounded = _run_forward(call, True, query, key, value)
    dead = lse < _DEAD
    lse = jnp.where(dead, -jnp.inf, lse)
    # The kernel keeps no maximum apart. A log of −inf tells the backward pass that a query has no
    # keys.
    log_total = jnp.where(dead, -jnp.inf, jnp.zeros_like(lse))
    return out, Normalizer(lse, log_total), jnp.zeros((), bool), rounded


def _values(interpret: bool, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """As `_forward`; where every query has keys, without the normalizer."""
    call = _Call.of(interpret, spec, query, key)
    if not call.every_query_has_keys:
        return _forward(interpret, spec, query, key, value)
    (out,) = _run_forward(call, False, query, key, value)
    nothing = jnp.zeros(query.shape[:3], jnp.float32)
    return out.astype(jnp.float32), Normalizer(nothing, nothing), jnp.zeros((), bool)


def _run_forward(call: _Call, lse: bool, query: Array, key: Array, value: Array) -> list[Array]:
    """out `[B, T, N, V]`; if wanted out in the dtype of sums, lse `[B, T, N]`, and out as it is
    stored."""
    made, V, dtype = call.made(lse=lse), value.shape[-1], query.dtype
    split = lse and dtype != jnp.float32 and _round_up(V) <= 2 * _LANES
    if lse and not split:  # that out be float32, as the queries are
        query = query.astype(jnp.float32)

    def one(ids: Any, *qkv: Array) -> Any:
        forward: Any = kernel._splash_attention_forward
        return forward(made.fwd_mask_info, *qkv, ids, None, **made.kwargs)

    products = (_Product(_reached(call.scale), ahead=True), _Product(_finite_times(1)))
    run = _edited(one, products, split, values=not lse)
    with default_settings():
        found = jax.tree.leaves(call.over_rows(run, *map(_padded, (query, key, value))))
    if split:
        rounded, rest = found
        found = [*_joined(rounded, rest), rounded]
    elif lse:
        out, total = found
        out = jnp.where((total < _DEAD)[..., None], 0, out)
        found = [out, total, out.astype(dtype)]
    return [_cut(x, call.T, *(V,) * (x.ndim - 3)) for x in found]


def _backward(
    interpret: bool, spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array
) -> tuple[Any, Array, Array, Array]:
    query, d_out, maximum, log_total, delta = cast_cotangent(per_query)
    call = _Call.of(interpret, spec, query, key)
    lse = maximum + log_total
    alive = jnp.isfinite(lse)  # others attend to NaN, or to nothing
    lse, delta = jnp.where(alive, lse, jnp.inf), jnp.where(alive, delta * _SMALL, 0)
    d_out = jnp.where(alive[..., None], d_out * jnp.asarray(_SMALL, d_out.dtype), 0)
    operands = (query, key, value, lse, d_out, delta)
    with default_settings():
        one = functools.partial(_gradients, call.made(backward=True), call.scale)
        found = call.over_rows(one, *map(_padded, operands))
    inputs = (query, key, value)
    d_query, d_key, d_value = (
        _cut(d, x.shape[1], x.shape[3]).astype(jnp.float32)
        for d, x in zip(found, inputs, strict=True)
    )
    return [], d_query, d_key, d_value


def _gradients(
    made: kernel.SplashAttentionKernel,
    scale: float,
    ids: Any,
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    v: Float[Array, "K S V"],
    lse: Float[Array, "N T"],
    d_out: Float[Array, "N T V"],
    delta: Float[Array, "N T"],
) -> tuple[Array, Array, Array]:
    """Those of q, k and v of one batch row; d_out and delta come times `_SMALL`."""
    sizes, names = made.kwargs["block_sizes"], ("is_mqa", "mask_value", "mask_function")
    common = {name: made.kwargs[name] for name in (*names, "attn_logits_soft_cap", "interpret")}
    common |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    operands = (q, k, v, ids, None, lse, d_out, delta)
    by_key: Any = functools.partial(
        kernel._splash_attention_bwd_dkv,
        bq=sizes.block_q_dkv,
        bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute,
        mask_info=made.dkv_mask_info,
        use_fused_bwd_kernel=False,  # which holds a part of d_q for each block of keys
        **common,
    )
    by_query: Any = functools.partial(
        kernel._splash_attention_bwd_dq,
        bq=sizes.block_q_dq,
        bkv=sizes.block_kv_dq,
        mask_info=made.dq_mask_info,
        **common,
    )
    scores = _Product(_scores(scale, made.kwargs["attn_logits_soft_cap"] is not None))
    d_value, d_left = _Product(_finite_times(None, 1 / _SMALL)), _finite_times(1, scale / _SMALL)
    by_key = _edited(by_key, (scores, d_value, _Product(_finite_times(0)), _Product(d_left)))
    by_query = _edited(by_query, (scores, _Product(_finite_times(1)), _Product(d_left)))
    _, d_k, d_v = by_key(*operands)
    return by_query(*operands), d_k, d_v


# ---------------------------------------------------------------------------------------------
# What is written into the kernel
# ---------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    """What stands in place of a matrix product: run(dot, x, y), where dot(x, y) is the product.

    With `ahead` it is also given the right side of the next one, loaded before.
    """

    run: Callable[..., Any]
    ahead: bool = False


def _finite(x: Array) -> Array:
    """`tile.finite` by way of float32, the only dtype that older TPUs compare."""
    return tile.finite(x.astype(jnp.float32)).astype(x.dtype)


def _finite_times(side: int | None, factor: float = 1.0) -> Any:
    """A product with the finite entries of one side, times a factor."""

    def run(dot: Any, *sides: Array) -> Array:
        found = dot(*(_finite(x) if place == side else x for place, x in enumerate(sides)))
        return found if factor == 1 else found * jnp.float32(factor)

    return run


def _reached(scale: float) -> Any:
    """Scores, of keys that are NaN where their values are not finite."""

    def run(dot: Any, q: Array, k: Array, v: Array) -> Array:
        marks = tile.nan_where_nonfinite(v.astype(jnp.float32))[:, None]
        return dot(q, (k.astype(jnp.float32) + marks).astype(k.dtype)) * jnp.float32(scale)

    return run


def _scores(scale: float, capped: bool) -> Any:
    """Scores as the backward pass may have them where they are masked, or their row takes no part:
    so that weights are 0. Capped ones are differentiated there, too."""

    def run(dot: Any, x: Array, y: Array) -> Array:
        found = dot(x, y) * jnp.float32(scale)
        if capped:
            return jnp.where(jnp.isnan(found), 0, found)
        return jnp.where(found < jnp.inf, found, -jnp.inf)

    return run


def _edited(
    function: Callable[..., Any],
    products: tuple[_Product, ...],
    split: bool = False,
    values: bool = False,
) -> Callable[..., Any]:
    """A function that calls a kernel, with these in place of the kernel's matrix products, in the
    order in which they stand there.

    The forward kernel stores out in the dtype of the queries, and 128 copies of lse in float32.
    With `split` the second are lse together with what out lacks by that; both come as stored.
    With `values` out is 0 for rows whose scores are all −inf, which lse tells otherwise.
    """

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        flat = lambda *leaves: function(*jax.tree.unflatten(structure, leaves))  # noqa: E731
        program, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        left = list(products)
        edited = _with_products(program, left)
        for edit in (_weighed, _divided) if values else ():
            edited = _everywhere(edit, edited)
        assert not left, "this version's kernel has fewer matrix products"
        if split:
            edited = _as_stored(_everywhere(_with_digits, edited))
        return jax.tree.unflatten(jax.tree.structure(out), jaxpr_as_fun(edited)(*leaves))

    return run


def _everywhere(edit: Callable[[Any], Any], program: Any) -> Any:
    """A program, all of whose lists of operations went through `edit`, inner ones first."""
    if isinstance(program, Jaxpr):
        equations = []
        for equation in program.eqns:
            params = {
                name: tuple(_everywhere(edit, one) for one in x)
                if name == "branches"
                else _everywhere(edit, x)
                for name, x in equation.params.items()
            }
            equations.append(equation.replace(params=params))
        return program.replace(eqns=edit(equations))
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=_everywhere(edit, program.jaxpr))
    return program


def _with_products(program: Any, left: list[_Product]) -> Any:
    """A program with what is left of products in place of its own."""

    def edit(equations: list[Any]) -> list[Any]:
        dots = [x for x in equations if x.primitive is lax.dot_general_p]
        for place, equation in enumerate(dots):
            product, operands = left.pop(0), list(equation.invars)
            if product.ahead:
                operands.append(dots[place + 1].invars[1])
                equations = _hoisted(equations, equation, operands[-1])
            narrow = any(x.aval.dtype != jnp.float32 for x in equation.invars)
            # The compiler takes a precision for float32 only, and others lose nothing.
            params = equation.params | ({"precision": None} if narrow else {})
            dot = functools.partial(lax.dot_general_p.bind, **params)
            new, _ = _traced(functools.partial(product.run, dot), operands)
            new[-1] = new[-1].replace(outvars=equation.outvars)
            at = _place(equations, equation)
            equations = [*equations[:at], *new, *equations[at + 1 :]]
        return equations

    return _everywhere(edit, program)


def _place(equations: list[Any], one: Any) -> int:
    return next(place for place, equation in enumerate(equations) if equation is one)


def _hoisted(equations: list[Any], before: Any, wanted: Any) -> list[Any]:
    """With what computes a variable before another operation."""
    at = _place(equations, before)
    needed, first, rest = {wanted}, [], []
    for equation in reversed(equations[at:]):
        ahead = not needed.isdisjoint(equation.outvars)
        needed |= {x for x in equation.invars if ahead and not hasattr(x, "val")}
        (first if ahead else rest).insert(0, equation)
    return [*equations[:at], *first, *rest]


def _weighed(equations: list[Any]) -> list[Any]:
    """Where the forward kernel computes weights: 0 for what is masked, also in rows of −inf."""
    if not any(x.primitive is lax.dot_general_p for x in equations):
        return equations
    at = next(i for i, x in enumerate(equations) if x.primitive is lax.exp_p)
    (shifted,) = equations[at].invars
    scores = next(x.invars[0] for x in equations if shifted in x.outvars)
    new, _ = _traced(lambda s, x: jnp.where(s > _DEAD, jnp.exp(x), 0), [scores, shifted])
    new[-1] = new[-1].replace(outvars=equations[at].outvars)
    return [*equations[:at], *new, *equations[at + 1 :]]


def _divided(equations: list[Any]) -> list[Any]:
    """Where the kernel divides by the sum of weights: out is 0 where that is 0."""
    found = []
    for equation in equations:
        one, *total = equation.invars if equation.primitive is lax.div_p else (None,)
        if not hasattr(one, "val"):
            found.append(equation)
            continue
        new, _ = _traced(lambda x: 1 / (x + jnp.finfo(jnp.float32).tiny), total)
        found += [*new[:-1], new[-1].replace(outvars=equation.outvars)]
    return found


def _with_digits(equations: list[Any]) -> list[Any]:
    """Where the kernel stores out and lse: what `_split` makes of them, and 0 as the out of queries
    without keys."""
    if not any(x.primitive is lax.log_p for x in equations):
        return equations
    first, second = [i for i, x in enumerate(equations) if x.primitive.name == "swap"][:2]
    stores = [equations[i] for i in (first, second)]
    out, lse = (x.invars[1] for x in stores)
    (rounded,) = (x for x in equations if out in x.outvars)

    def split(out: Array, lse: Array) -> tuple[Array, Array]:
        return _split(jnp.where(lse[:, :1] < _DEAD, 0, out), lse)

    new, found = _traced(split, [rounded.invars[0], lse])
    for one, (store, x) in enumerate(zip(stores, found, strict=True)):
        stores[one] = store.replace(invars=[store.invars[0], x, *store.invars[2:]])
    between, after = equations[first + 1 : second], equations[second + 1 :]
    return [*equations[:first], *between, *new, *stores, *after]


def _as_stored(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose two results are the kernel's."""
    names = [x.primitive.name for x in program.eqns]
    to = names.index("pallas_call") + 1
    kept = program.eqns[:to]
    return program.replace(jaxpr=program.jaxpr.replace(eqns=kept, outvars=kept[-1].outvars[-2:]))


def _split(out: Array, lse: Array) -> tuple[Array, Array]:
    """Of out `[t, V]` and lse `[t, 128]`, equal in a row: out rounded, and in 128 words a row what
    it lacks by that. A word holds that of one number, or the first 16 bits of that of two. Its last
    bit is one of lse in 32 words."""
    rounded = out.astype(jnp.bfloat16)
    rest = _as_bits(out - rounded.astype(jnp.float32))
    V, lane = out.shape[1], _lanes(lse)
    if V > _LANES:
        left, right = jnp.split(rest, 2, axis=1)
        right = lax.shift_right_logical(right, jnp.full_like(right, 16))
        rest = (left & _UPPER_HALF) | right
    else:
        rest = jnp.pad(rest, ((0, 0), (0, _LANES - V)))
    bit = jnp.where(lane < 32, lax.shift_right_logical(_as_bits(lse), lane & 31) & 1, 0)
    return rounded, _as_float((rest & ~1) | bit)


def _joined(rounded: Array, words: Array) -> list[Array]:
    """The inverse, of `[B, N, T, ·]`: what XLA takes in one go. lse is a sum over a row's bits, as
    XLA would copy everything to take a column, and as it would hold two sides to put together, one
    is padded to the other."""
    lane, V, wide = _lanes(words), rounded.shape[-1], rounded.astype(jnp.float32)
    bits = jnp.where(lane < 32, (_as_bits(words) & 1) << (lane & 31), 0)
    lse = jnp.sum(bits, axis=-1, dtype=jnp.int32)
    if V > _LANES:
        sides = [(0, _LANES), (_LANES, 0)]
        left, right = (_as_bits(jnp.pad(words, [*[(0, 0)] * 3, side])) for side in sides)
        rest = (left & _UPPER_HALF) | ((right & ~1) << 16)
    else:
        rest = _as_bits(words[..., :V]) & ~1
    return [jnp.where(jnp.isfinite(wide), wide + _as_float(rest), wide), _as_float(lse)]


_UPPER_HALF = np.int32(-(2**16))


def _as_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _as_float(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _lanes(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _traced(function: Callable[..., Any], operands: list[Any]) -> tuple[list[Any], list[Any]]:
    """The operations of a function of variables of a program, and its results."""
    traced = jax.make_jaxpr(function)(*(x.aval for x in operands)).jaxpr
    names = dict(zip(traced.invars, operands, strict=True))

    def renamed(variables: Any) -> list[Any]:
        return [x if hasattr(x, "val") else names.get(x, x) for x in variables]

    equations = [x.replace(invars=renamed(x.invars)) for x in traced.eqns]
    return equations, renamed(traced.outvars)


def functions(interpret: bool) -> AttentionVJP:
    """Those of the kernel."""
    forward, backward, values, rounded = (
        functools.partial(f, interpret) for f in (_forward, _backward, _values, _forward_rounded)
    )
    return AttentionVJP(forward, backward, forward_alone=values, forward_rounded=rounded)
