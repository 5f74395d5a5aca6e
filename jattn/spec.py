"""What is to be computed (`Spec`), how (`Tiling`), and the checks of the arguments of a call.

`check_shapes` and `make_spec` raise errors about arguments before anything is compiled, with the
shape expected in letters and in numbers and the shape that came. Some errors are raised
elsewhere: by masks and score functions when they are made, by `registry` for names of
implementations, and for caches and meshes by the functions that take them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn._pytree import (
    array_field,
    axis_names,
    flatten_batch,
    is_static,
    letters_by_head,
    number,
    pytree_dataclass,
    static_field,
)
from jattn._types import Shape, Size, accumulation
from jattn.checks import (
    check_array,
    check_flag,
    check_key,
    check_like,
    check_number,
    check_precision,
    check_rate,
    shown,
)
from jattn.functions import integers
from jattn.functions.snapshots import is_transient
from jattn.masks import Blocks, Full, Mask, Predicate, as_mask
from jattn.options import WeightOptions
from jattn.scores import Score, ScoreFunction, as_score


Shaped = Array | jax.ShapeDtypeStruct  # what has a shape and a dtype


class PairScore(Protocol):
    """What makes a score of a query and a key in place of their product: a pytree whose float
    arrays are differentiable."""

    def products(self, query: Array, key: Array) -> Array:
        """`[t, s]` of queries `[t, H]` and keys `[s, H]`, in the dtype of sums. What is not finite
        makes its row or column NaN, and has no part in gradients."""
        ...


@pytree_dataclass
class Origin:
    """Where in a larger call a piece of it lies: its first batch row and head, and the places of
    its queries and keys; None where these are all there are. Dropout decides by it."""

    b: Any
    h: Any
    q: Any = array_field("T", default=None)
    kv: Any = array_field("S", default=None)


@pytree_dataclass
class Spec:
    """What attention computes: everything but query, key and value. One head's formula is

    dropout(softmax(mask(score(q kᵀ × scale)))) v

    with the products of `pair` in place of q kᵀ where it is given.
    """

    mask: Mask
    score: ScoreFunction | None
    scale: Any
    q_positions: Any = array_field("*B T")
    kv_positions: Any = array_field("*B S")
    dropout_key: Any = None
    dropout_rate: float = static_field(default=0.0)
    precision: Any = static_field(default=None)
    lse: bool = static_field(default=False)  # whether the log of the denominator is asked for too
    pair: Any = None  # a PairScore
    overflowed: Any = None  # traced: whether positions do not fit 32 bits, for results to be NaN
    origin: Origin | None = None  # None: the call is no piece of another
    # Whether softmax runs over more keys than these: the backward pass goes by the normalizer.
    partial: bool = static_field(default=False)
    # Whether functions of it are snapshots of what may be written to, see `compiled`.
    transient: bool = static_field(default=False)

    def axis_names_by_value(self) -> dict[str, str]:
        """A scale is one number, or one for each head."""
        return {"scale": letters_by_head(self.scale)}


class Tiling(NamedTuple):
    """How an implementation cuts queries and keys: the sizes of a tile."""

    block_q: int
    block_kv: int


class Shapes(NamedTuple):
    """The sizes of one call, by letter; `batch` holds the leading axes."""

    batch: Shape
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int
    dtype: Any

    @classmethod
    def of(cls, query: Shaped, value: Shaped) -> "Shapes":
        """Of `[B, T, N, H]` and `[B, S, K, V]`."""
        (B, T, N, H), (_, S, K, V) = query.shape, value.shape
        return cls((B,), T, S, N, K, H, V, query.dtype)

    @property
    def B(self) -> Size:
        """The number of batch rows, all leading axes together."""
        return math.prod(self.batch)

    @property
    def cuttable(self) -> bool:
        """Whether T and S are numbers. They are symbols in a program that is exported for any."""
        return isinstance(self.T, int) and isinstance(self.S, int)

    @property
    def G(self) -> int:
        """Query heads for each key/value head."""
        return self.N // self.K


def check_shapes(query: Shaped, key: Shaped, value: Shaped | None = None) -> Shapes:
    """The sizes of `query [*B, T, N, H]`, `key [*B, S, K, H]`, `value [*B, S, K, V]`.

    Raises TypeError for dtypes and ValueError for shapes that do not fit together.
    """
    check_array("query", query, "[*B, T, N, H]", ndim=3)
    check_array("key", key, "[*B, S, K, H]", ndim=3)
    *batch, T, N, H = query.shape
    *key_batch, S, K, key_H = key.shape
    if key_batch != batch or key_H != H:
        raise ValueError(
            f"key: expected [*B, S, K, H] with *B = {batch} and H = {H} as in query "
            f"{list(query.shape)}, got {list(key.shape)}"
        )
    if K < 1 or N % K:
        raise ValueError(
            f"key: the number of key/value heads K must divide the number of query heads N, "
            f"got N = {N}, K = {K}"
        )
    if H < 1:
        raise ValueError(f"query: expected a head size H >= 1, got {list(query.shape)}")
    V = H
    if value is not None:
        check_array("value", value, "[*B, S, K, V]", ndim=3)
        V = value.shape[-1]
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"value: expected [*B, S, K, V] with [*B, S, K] = {list(key.shape[:-1])} as in "
                f"key, got {list(value.shape)}"
            )
    for name, array in (("key", key), ("value", value)):
        if array is not None:
            check_like(name, array, query)
    return Shapes(tuple(batch), T, S, N, K, H, V, query.dtype)


def _check_dropout(rate: Any, key: Any) -> float:
    check_rate("dropout_rate", rate)
    if rate > 0 or key is not None:
        if key is None:
            raise ValueError(f"dropout_key: needed for dropout_rate = {float(rate)}, got None")
        check_key("dropout_key", key)
    return float(rate)


def _check_scale(scale: Any, H: int) -> Any:
    if scale is None:
        return 1 / math.sqrt(H)
    if hasattr(scale, "dtype") or is_static(scale):
        check_number("scale", scale, per_head=True)
    else:
        raise TypeError(f"scale: expected a number or a float array, got {shown(scale)}")
    return float(scale) if isinstance(scale, int | float | np.number) else scale


def _fits(declared_letter: str, size: Size, wanted: Size | None) -> bool:
    return wanted is None or size == wanted or (declared_letter.startswith("#") and size == 1)


def _check_letters(
    path: str, letters: str, shape: Shape, shapes: Shapes, global_sizes: tuple[int, int] | None
) -> None:
    """Raises ValueError unless an array declared along `letters` fits the call.

    Letters other than B, T, S and N (table rows, layout cells) take whatever size comes. Where the
    call is a shard of one with `global_sizes` (T, S), arrays along both hold all keys.
    """
    named = letters.split()
    beside_queries = global_sizes and "T" in letters.replace("#", "").split()
    sizes = {
        "T": shapes.T,
        "S": global_sizes[1] if global_sizes and beside_queries else shapes.S,
        "N": shapes.N,
    }
    trailing = [x for x in named if "*" not in x]
    batch = shapes.batch if len(trailing) < len(named) else ()
    mark = "#" if "*#B" in named else ""
    axes = [(f"{mark}B", size) for size in batch]
    axes += [(x, sizes.get(x.lstrip("#"))) for x in trailing]
    if not mark and len(shape) == len(trailing):  # shared by the whole batch
        axes = axes[len(batch) :]
    fits = len(axes) == len(shape) and all(
        _fits(letter, got, want) for (letter, want), got in zip(axes, shape, strict=True)
    )
    if not fits:
        shown = ", ".join(named).replace("#", "")
        wanted = ", ".join("any" if want is None else str(want) for _, want in axes)
        note = " (axes of size 1 broadcast)" if "#" in letters else ""
        advice = _axes_to_add(path, axes, shape) if mark else ""
        raise ValueError(
            f"{path}: expected [{shown}] = [{wanted}]{note}, got {list(shape)}{advice}"
        )


def _axes_to_add(path: str, axes: list[tuple[str, Any]], shape: Shape) -> str:
    """How to index an array that lacks axes, in each way in which it then fits; last axes first."""
    found = []
    for kept in itertools.combinations(reversed(range(len(axes))), len(shape)):
        places = sorted(kept)
        if all(_fits(*axes[i][:1], n, axes[i][1]) for i, n in zip(places, shape, strict=True)):
            index = [":" if i in places else "None" for i in range(len(axes))]
            while index and index[-1] == ":":
                index.pop()
            found.append(f"{path.rpartition('.')[2]}[{', '.join(index)}]")
    return f"; write {' or '.join(found[:2])}" if len(shape) < len(axes) and found else ""


def check_leaves(spec: Spec, shapes: Shapes, global_sizes: tuple[int, int] | None = None) -> None:
    """Raises ValueError where an array of mask, score or positions does not fit the call.

    `global_sizes` are T and S of the unsharded call, where this one is a shard of it.
    """
    if not jax.tree.leaves(spec):
        return
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    for (path, leaf), letters in zip(leaves, jax.tree.leaves(axis_names(spec)), strict=True):
        if letters:
            name = jax.tree_util.keystr(path).lstrip(".")
            _check_letters(name, letters, np.shape(leaf), shapes, global_sizes)
    for mask in jax.tree.leaves(spec.mask, is_leaf=lambda x: isinstance(x, Blocks)):
        if isinstance(mask, Blocks):
            mask.check_covers(*(global_sizes or (shapes.T, shapes.S)))


def _positions(name: str, letters: str, value: Any) -> tuple[Any, Any]:
    """Positions in int32, and whether some are known to the program alone not to fit."""
    if value is None:
        return None, None
    check_array(name, value, letters, "integer")
    return integers.positions(name, value)


def _either(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a | b


def make_spec(
    shapes: Shapes,
    *,
    lse: bool = False,
    global_sizes: tuple[int, int] | None = None,
    **options: Unpack[WeightOptions],
) -> Spec:
    """Checks the options of a call and puts them into a `Spec`, but for the sink, which needs `lse`
    and is added to the results.

    `global_sizes` are T and S of the unsharded call, where this one is a shard of it.

    Raises TypeError and ValueError, naming the option.
    """
    mask = as_mask(options.get("mask"))
    score = as_score(options.get("score"))
    q_positions, q_outside = _positions("q_positions", "[*B, T]", options.get("q_positions"))
    kv_positions, kv_outside = _positions("kv_positions", "[*B, S]", options.get("kv_positions"))
    dropout_key = options.get("dropout_key")
    rate = _check_dropout(options.get("dropout_rate", 0.0), dropout_key)
    precision = options.get("precision")
    check_precision("precision", precision)
    check_flag("return_lse", lse)
    spec = Spec(
        mask=mask,
        score=score,
        scale=_check_scale(options.get("scale"), shapes.H),
        q_positions=q_positions,
        kv_positions=kv_positions,
        dropout_key=dropout_key if rate else None,
        dropout_rate=rate,
        precision=precision,
        lse=bool(lse) or options.get("sink") is not None,
        overflowed=_either(q_outside, kv_outside),
    )
    check_leaves(spec, shapes, global_sizes)
    return _with_lasting_functions(spec, shapes)


def _is_function(x: Any) -> bool:
    return isinstance(x, Predicate | Score)


def _with_lasting_functions(spec: Spec, shapes: Shapes) -> Spec:
    """The spec as a key of compiled programs, which outlive this call: users' functions are what
    they are now, and those that compute the same are one object."""
    dtype, functions = accumulation(shapes.dtype), []

    def lasting(x: Any) -> Any:
        if not _is_function(x):
            return x
        x = x.lasting() if isinstance(x, Predicate) else x.lasting(dtype)
        functions.extend((x.fn, getattr(x, "bounds_fn", None)))
        return x

    spec = jax.tree.map(lasting, spec, is_leaf=_is_function)
    is_any = any(map(is_transient, functions))
    return dataclasses.replace(spec, transient=True) if is_any else spec


_MOST_TRANSIENT = 64  # programs of each compiled function


def compiled(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit`, with static arguments by name, of a function whose first argument is a `Spec`, or
    a tree that has its field `transient`.

    Compiled also where users have switched that off: NaN and infinities in what is masked are then
    no results, in which JAX's flags for debugging would find them.

    JAX keeps thousands of programs. Of transient specs, which may be others in each call, a few
    are kept: each has a function of its own, and with it goes all that JAX keeps for it.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        lasting = jax.jit(function, static_argnames=static)

        @functools.lru_cache(maxsize=_MOST_TRANSIENT)
        def transient(structure: Any) -> Any:
            @functools.wraps(function)
            def run(leaves: Any, *arguments: Any, **options: Any) -> Any:
                return function(jax.tree.unflatten(structure, leaves), *arguments, **options)

            return jax.jit(run, static_argnames=static)

        def chosen(spec: Any) -> tuple[Any, Any]:
            if not spec.transient:
                return lasting, spec
            leaves, structure = jax.tree.flatten(spec)
            return transient(structure), leaves

        @functools.wraps(function)
        def call(spec: Any, *arguments: Any, **options: Any) -> Any:
            program, spec = chosen(spec)
            if not getattr(jax.config, "jax_disable_jit", False):
                return program(spec, *arguments, **options)
            with jax.disable_jit(False):
                return program(spec, *arguments, **options)

        def lower(spec: Any, *arguments: Any, **options: Any) -> Any:
            program, spec = chosen(spec)
            return program.lower(spec, *arguments, **options)

        setattr(call, "lower", lower)  # noqa: B010
        return call

    return decorate


def has_mask(spec: Spec) -> bool:
    """Whether anything is masked at all."""
    return not isinstance(spec.mask, Full)


def prepare(spec: Spec, shapes: Shapes) -> Spec:
    """The spec as implementations take it: one flat batch axis, score parameters in the dtype in
    which scores are computed (so that their gradients are summed in it).

    Raises TypeError for users' functions that do not return what they should.
    """
    dtype = accumulation(shapes.dtype)

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    for x in jax.tree.leaves(spec, is_leaf=_is_function):
        if isinstance(x, Predicate):
            x.check()
        elif isinstance(x, Score):
            x.check(dtype)
    learned = jax.tree.map(cast, _learned(spec))
    spec = dataclasses.replace(_with_learned(spec, learned), overflowed=None)
    return flatten_batch(spec, shapes.batch)


def _learned(spec: Spec) -> tuple[Any, Any, Any]:
    """The parts of a spec whose float arrays are differentiable."""
    return spec.score, spec.scale, spec.pair


def _with_learned(spec: Spec, learned: tuple[Any, Any, Any]) -> Spec:
    return dataclasses.replace(spec, **dict(zip(("score", "scale", "pair"), learned, strict=True)))


def nan_if_overflowed(spec: Spec, *results: Array) -> tuple[Array, ...]:
    """The results, or NaN where the positions did not fit."""
    if spec.overflowed is None:
        return results
    return tuple(jnp.where(spec.overflowed, jnp.nan, x) for x in results)


def _is_param(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def parameters(spec: Spec) -> list[Any]:
    """The differentiable arrays of a spec: the float ones of its score function, its scale where
    that is an array, and those of its pair score."""
    return [leaf for leaf in jax.tree.leaves(_learned(spec)) if _is_param(leaf)]


def parameter_letters(spec: Spec) -> list[str]:
    """Along which letters each of `parameters` runs."""
    letters = jax.tree.leaves(_learned(axis_names(spec)))
    leaves = jax.tree.leaves(_learned(spec))
    return [x for x, leaf in zip(letters, leaves, strict=True) if _is_param(leaf)]


def with_parameters(spec: Spec, values: list[Any]) -> Spec:
    """The spec with other values for `parameters`."""
    leaves, treedef = jax.tree.flatten(_learned(spec))
    new = iter(values)
    replaced = [next(new) if _is_param(x) else x for x in leaves]
    return _with_learned(spec, jax.tree.unflatten(treedef, replaced))


def scaled(spec: Spec, query: Array) -> tuple[Spec, Array, float]:
    """A spec without the scale, queries times the scale, and the factor to their gradient.

    A pass over the queries instead of one over the scores, where that rounds no more. A scale that
    is an array stays, as a parameter.
    """
    if query.dtype != accumulation(query.dtype) or not is_static(spec.scale):
        return spec, query, 1.0
    scale = number(spec.scale)
    return dataclasses.replace(spec, scale=1.0), query * scale, scale
