"""Values that score functions look up, looked up before: kernels read them by tile.

A user's function may index its operands, in FlexAttention's way (Dong et al. 2024):
`score * gate[h] + by_key[b, kv] + table[h, q - kv + 5]`. `expressions` tell on which of the batch
row b, the head h, the query q and the key kv an index depends. Where q and kv do not meet in it, or
meet in their distance alone, there are few different entries. They are gathered in one array for
each look-up, which runs along T, S, neither or the distances. Kernels sum its gradient, and that of
the gather adds it to the operand's.

An operand of which an index is of another kind stays as it is.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import get_opaque_trace_state
from jax.interpreters import partial_eval
from jaxtyping import Array

from jattn import scores
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn.functions import dependence
from jattn.functions.dependence import BATCH_ROW, HEAD, KEY, QUERY, SCORE
from jattn.functions.nodes import Node
from jattn.functions.read import read
from jattn.kernels.gpu.mosaic.tile import by_distance
from jattn.kernels.gpu.mosaic.tile.kernel_refs import GatherRef
from jattn.spec import Shapes, Spec


def replaced(spec: Spec, shapes: Shapes) -> Spec:
    """The prepared spec of a call in whole tiles, with such values in place of look-ups."""
    if spec.score is None:
        return spec
    each = [_replaced(x, spec, shapes) for x in scores.in_order(spec.score)]
    return dataclasses.replace(spec, score=functools.reduce(operator.rshift, each))


def _replaced(score: scores.ScoreFunction, spec: Spec, shapes: Shapes) -> scores.ScoreFunction:
    if isinstance(score, scores.RelativeBias):
        places = positions_are_places(spec)
        return by_distance.of_places(score, shapes) if places else by_distance.of_positions(score)
    return _of_function(score, spec, shapes) if isinstance(score, scores.Score) else score


def positions_are_places(spec: Spec) -> bool:
    return spec.q_positions is None and spec.kv_positions is None


@pytree_dataclass
class Hoisted(scores.ScoreFunction):
    """A function some of whose operands have an array for each look-up instead.

    `sites` says of these look-ups, in the order in which the function makes them, in which field
    the values are, and which there. `operands` are the leaves of the function's, None for those
    that have gone, whose shapes are in `gone`. `function` is its structure as a pytree.
    """

    operands: tuple[Any, ...]
    by_head: Any = array_field("*B N")
    by_query: Any = array_field("*B N T")
    by_key: Any = array_field("*B N S")
    by_distance: Any = array_field("#N distances")  # `GatherRef`s in kernels
    sites: tuple[tuple[str, int], ...] = static_field()
    gone: tuple[Any, ...] = static_field()
    function: Any = static_field()
    before: int = static_field()  # the distance kv − q of the first values is −before

    def evaluate(self, score, b, h, rows, columns):
        per_key = jax.vmap(self._scalar, (0, None, None, None, 0, None, 0))
        per_query = jax.vmap(per_key, (0, None, None, 0, None, 0, None))
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        at = rows.positions, columns.positions
        return per_query(score, b, h, *at, self.by_query, self.by_key)

    def _scalar(self, score, b, h, q, kv, by_query, by_key):
        along = {"by_head": self.by_head, "by_query": by_query, "by_key": by_key}

        def run(*scalars: Any) -> Any:
            sites = iter(self.sites)
            # Compiled in this order it needs fewer registers.
            distance = (scalars[KEY] - scalars[QUERY]) + self.before

            def entry(*_: Any) -> Any:
                field, which = next(sites)
                if field == "by_distance":
                    return self.by_distance[which].inside(distance)
                return along[field][which]

            pairs = enumerate(zip(self.operands, self.gone, strict=True))
            given = [x if like is None else _seen(i, like, entry) for i, (x, like) in pairs]
            return jax.tree.unflatten(self.function, given)._scalar(*scalars)

        return _live(run, score, b, h, q, kv)


def _live(function: Callable[..., Any], *scalars: Any) -> Any:
    """The result, without operations on which it does not depend: some of those that make an index
    kernels refuse, and others ask them for slower instructions that are more exact."""
    program = jax.make_jaxpr(function)(*scalars)
    live, _ = partial_eval.dce_jaxpr(program.jaxpr, [True], instantiate=True)
    return eval_jaxpr(live, program.consts, *scalars)[0]


def depends_on_score(function: Callable[..., Any]) -> bool:
    """Of a function of score, b, h, q and kv."""
    program = jax.make_jaxpr(function)(jnp.float32(0), *[jnp.int32(0)] * 4)
    return partial_eval.dce_jaxpr(program.jaxpr, [True])[1][SCORE]


# --- which look-ups ------------------------------------------------------------------------------


_FIELDS = {
    "by_head": {BATCH_ROW, HEAD},
    "by_query": {BATCH_ROW, HEAD, QUERY},
    "by_key": {BATCH_ROW, HEAD, KEY},
    "by_distance": {HEAD, QUERY, KEY},
}


class Site(NamedTuple):
    """A look-up: of which operand, and at which place. `on` are the inputs on which the place
    depends, `field` is where `Hoisted` has the values, None where it has none."""

    operand: int
    place: tuple[Node, ...]
    on: frozenset[int]
    field: str | None


class _Unreadable(Exception):
    """A look-up of several entries, or in a function that one of JAX traces, as `lax.cond` does."""


@dataclasses.dataclass(frozen=True)
class _Elsewhere:
    """In place of an array in memory: `entry(number, place)` gives its entries."""

    number: int
    shape: tuple[int, ...]
    dtype: Any
    entry: Callable[[int, tuple[Array, ...]], Any]

    def __getitem__(self, place: tuple[Array, ...]) -> Any:
        return self.entry(self.number, place)


def _seen(number: int, like: Any, entry: Callable[..., Any]) -> GatherRef:
    return GatherRef(_Elsewhere(number, like.shape, like.dtype, entry), (None,) * len(like.shape))


def _is_table(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 0 and leaf.size > 0


def _look_ups(score: scores.Score, *scalars: Any) -> list[tuple[int, tuple[Array, ...]]]:
    """The operand and the place of each look-up, in the order in which the function makes them."""
    leaves, structure = jax.tree.flatten(score)
    outside, found = get_opaque_trace_state(), []

    def entry(number: int, place: tuple[Array, ...]) -> Array:
        if get_opaque_trace_state() != outside or any(x.shape for x in place):
            raise _Unreadable
        found.append((number, place))
        return leaves[number][place]

    given = [_seen(i, x, entry) if _is_table(x) else x for i, x in enumerate(leaves)]
    jax.tree.unflatten(structure, given)._scalar(*scalars)
    return found


def sites(score: scores.Score, positions_are_places: bool) -> list[Site] | None:
    """The look-ups of a prepared function in float operands; None where they cannot be read."""
    made: list[tuple[int, int]] = []

    def places(*scalars: Any) -> list[Array]:
        found = _look_ups(score, *scalars)
        made.extend((number, len(place)) for number, place in found)
        return [x for _, place in found for x in place]

    try:
        expression = read(places, [jnp.float32, *[jnp.int32] * 4])
    except _Unreadable:
        return None
    depends, results = dependence.of_nodes(expression.results), iter(expression.results)
    found = []
    for operand, axes in made:
        place = tuple(next(results) for _ in range(axes))
        each = [depends[id(x)] for x in place]
        inputs = frozenset().union(*(x.on for x in each))
        by_distance = positions_are_places and all(x.growth == 0 for x in each)
        found.append(Site(operand, place, inputs, _field(inputs, by_distance)))
    return found


def _field(on: frozenset[int], by_distance: bool) -> str | None:
    """That of values for all inputs on which a place depends."""
    found = next((field for field, inputs in _FIELDS.items() if on <= inputs), None)
    return None if found == "by_distance" and not by_distance else found


# --- their values --------------------------------------------------------------------------------


def _of_function(score: scores.Score, spec: Spec, shapes: Shapes) -> scores.ScoreFunction:
    """The function with arrays for its look-ups, in operands of which it makes no others."""
    leaves = jax.tree.leaves(score)
    found = sites(score, positions_are_places(spec)) if any(map(_is_table, leaves)) else None
    if found is None:
        return score
    stay = {x.operand for x in found if x.field is None}
    gone = [_is_table(x) and i not in stay for i, x in enumerate(leaves)]
    if not any(gone):
        return score
    arrays: dict[str, list[Array]] = {field: [] for field in _FIELDS}
    known: dict[Any, tuple[str, int]] = {}
    for number, (operand, place, _, field) in enumerate(found):
        if field is not None and gone[operand] and (operand, place) not in known:
            known[operand, place] = field, len(arrays[field])
            arrays[field].append(_values(score, number, found[number], spec, shapes))
    pairs = [*zip(leaves, gone, strict=True)]
    return Hoisted(
        operands=tuple(None if has_gone else x for x, has_gone in pairs),
        **{field: tuple(values) for field, values in arrays.items()},
        sites=tuple(known[x.operand, x.place] for x in found if gone[x.operand]),
        gone=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if y else None for x, y in pairs),
        function=jax.tree.structure(score),
        before=shapes.T - 1,
    )


def _values(score: scores.Score, number: int, site: Site, spec: Spec, shapes: Shapes) -> Array:
    """What a look-up finds for all batch rows, heads, queries, keys or distances, with size 1 for
    those on which it does not depend."""
    fixed = jax.tree.map(lax.stop_gradient, score)

    def place(*at: Any) -> tuple[Array, ...]:
        return _look_ups(fixed, jnp.zeros((), jnp.float32), *at)[number][1]

    at = jnp.vectorize(place)(*_all(site, spec, shapes))
    table = jax.tree.leaves(score)[site.operand]
    values = table[at]
    if site.field == "by_distance":
        return values[0]
    return values[..., 0] if site.field == "by_head" else values


def _all(site: Site, spec: Spec, shapes: Shapes) -> list[Array]:
    """b, h, q and kv of all those places, with three axes each: batch rows, heads and others."""
    zero = jnp.zeros((1, 1, 1), jnp.int32)
    b, h = (
        jnp.arange(size, dtype=jnp.int32).reshape(shape) if x in site.on else zero
        for x, size, shape in ((BATCH_ROW, shapes.B, (-1, 1, 1)), (HEAD, shapes.N, (1, -1, 1)))
    )
    if site.field == "by_distance":
        distance = jnp.arange(shapes.T + shapes.S - 1, dtype=jnp.int32) - (shapes.T - 1)
        first, second = jnp.maximum(-distance, 0), jnp.maximum(distance, 0)
        return [b, h, first[None, None], second[None, None]]
    q, kv = (
        _positions(own, size)[:, None] if x in site.on else zero
        for x, own, size in (
            (QUERY, spec.q_positions, shapes.T),
            (KEY, spec.kv_positions, shapes.S),
        )
    )
    return [b, h, q, kv]


def _positions(own: Array | None, size: int) -> Array:
    """`[B or 1, T]`, or of keys."""
    if own is None:
        return jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.broadcast_to(own.astype(jnp.int32), (own.shape[0], size))
