"""What each scheme sends, by formula: which arrays, how large and how often.

With n devices along the axis, of which each has a shard of s bytes of an array, a device sends

- in a ring, forward, s at each hop, of keys, values and the mask's arrays that go with them;
  backward that again, and as often the gradients of keys and values in the dtype of sums, which
  make one hop more to come home, in their own dtype. There are n − 1 hops, or as many as the mask
  says lie between a shard and the last device that needs it. Where the mask leaves the other
  devices a part of each shard alone, as a window does, s is that of the part;
- for all_to_all, s (n − 1) / n of query, keys, values and output; backward that again, of their
  gradients. Key heads that are fewer than the devices are repeated before;
- for gather, s (n − 1) of keys and values; backward that again, of their gradients.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._advised import advised
from jattn._pytree import axis_names, axis_of
from jattn._types import AnyArray, Keys, Queries, Values, accumulation
from jattn.checks import check_choice, check_size
from jattn.options import WeightOptions
from jattn.parallel import placement, rounds
from jattn.parallel.ring import Route, travels
from jattn.parallel.rounds import Round
from jattn.spec import Shapes, Spec, check_shapes, make_spec, parameters, prepare


class Exchange(NamedTuple):
    """One array that a call exchanges.

    `kind` is the operation's name in XLA's programs: "collective-permute", "all-to-all",
    "all-gather" or "reduce-scatter". `bytes` are what a device sends each time, by the last two
    kinds to its neighbour in a circle; `times` is how often, `devices` how many send; `backward`
    tells whether the backward pass does. A ring's heads may take turns, in `rounds`, and in each a
    shard's keys, in `chunks`; `times` counts all.
    """

    kind: str
    array: str
    bytes: int
    times: int
    devices: int
    backward: bool
    rounds: int = 1
    chunks: int = 1


@advised(WeightOptions)
def exchanges(
    query: Queries | jax.ShapeDtypeStruct,
    key: Keys | jax.ShapeDtypeStruct,
    value: Values | jax.ShapeDtypeStruct,
    *,
    devices: int,
    scheme: Literal["ring", "all_to_all", "gather"] = "ring",
    order: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: bool = False,
    **options: Unpack[WeightOptions],
) -> tuple[Exchange, ...]:
    """What `parallel.attention` with these arguments exchanges, with gradients of all floats.

    It computes nothing. Not counted are sums over devices of the gradients of parameters, which XLA
    joins with those of the rest of a program. Of what both passes send once, XLA may make one.

    Args:
        query: `[*B, T, N, H]`, or a `jax.ShapeDtypeStruct` of it, as may be the next two. Where
            batch or heads are cut too, what the devices along the axis have together.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        devices: how many share T and S.
        scheme, order, return_lse, and other options: as in `parallel.attention`.

    Returns:
        The exchanges, those of the forward pass first.

    Raises:
        TypeError, ValueError: as `parallel.attention`.
    """
    check_choice("scheme", scheme, tuple(_SCHEMES))
    placement.check_order(order)
    check_size("devices", devices)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not isinstance(array, AnyArray | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name}: expected an array or a jax.ShapeDtypeStruct, got {type(array).__name__}"
            )
    found: list[Exchange] = []

    def look(query: Array, key: Array, value: Array) -> None:
        shapes = check_shapes(query, key, value)
        for name, size in (("query", shapes.T), ("key", shapes.S)):
            placement.check_divisible(name, size, devices, order)
        spec = make_spec(shapes, lse=return_lse, **options)
        call = _Call(prepare(spec, shapes), shapes, query.dtype, devices, order)
        found.extend(x for x in _SCHEMES[scheme](call) if x.bytes and x.times)

    jax.eval_shape(look, query, key, value)
    return tuple(sorted(found, key=lambda x: x.backward))


class _Call(NamedTuple):
    """A call on whole arrays and how it is cut."""

    spec: Spec
    shapes: Shapes
    dtype: DTypeLike
    devices: int
    order: str

    def share(self, *sizes: int, dtype: Any = None) -> int:
        """The bytes of a device's share of an array of so many batch rows and these sizes."""
        size = self.shapes.B * math.prod(sizes) // self.devices
        return size * jnp.dtype(self.dtype if dtype is None else dtype).itemsize

    def leaves(self) -> Iterator[tuple[str, Any, bool]]:
        """The letters of each array of the spec, itself, and whether it has a gradient."""
        learned = {id(x) for x in parameters(self.spec)}
        letters = jax.tree.leaves(axis_names(self.spec))
        for x, leaf in zip(letters, jax.tree.leaves(self.spec), strict=True):
            yield x, leaf, id(leaf) in learned


def _ring(call: _Call) -> Iterator[Exchange]:
    shapes, n = call.shapes, call.devices
    S = shapes.S
    route = Route.of(call.spec, shapes.T, S, n, call.order)
    keys = route.part.stop - route.part.start
    chunks = rounds.chunks(keys)
    sent = n * (keys // chunks)  # tokens at a time, of all devices together
    count = rounds.count(shapes._replace(T=shapes.T // n)) if route.hops else 1
    K = shapes.K // count
    going = [("key", call.share(sent, K, shapes.H)), ("value", call.share(sent, K, shapes.V))]
    for letters, leaf, _ in call.leaves():
        if travels(letters):
            axis: Any = axis_of("S", letters, leaf.ndim)
            numbers = leaf.size // S * sent // n if leaf.shape[axis] > 1 else leaf.size
            numbers //= 1 if Round.axis(letters, leaf) is None else count
            going.append(("mask", numbers * leaf.dtype.itemsize))
    kind, wide = "collective-permute", accumulation(call.dtype)
    for backward in (False, True):
        for name, size in going:
            for hops in route.hops:
                times, sources = hops.times * count * chunks, len(hops.sources)
                yield Exchange(kind, name, size, times, sources, backward, count, chunks)
    if route.hops:
        hops = sum(x.times for x in route.hops)
        for name, last in (("d_key", shapes.H), ("d_value", shapes.V)):
            for dtype, hops_each in ((wide, hops), (call.dtype, 1)):
                size, times = call.share(sent, K, last, dtype=dtype), hops_each * count * chunks
                yield Exchange(kind, name, size, times, n, True, count, chunks)


def _all_to_all(call: _Call) -> Iterator[Exchange]:
    shapes, n = call.shapes, call.devices
    held = math.lcm(shapes.K, n)
    arrays = [
        ("query", call.share(shapes.T, shapes.N, shapes.H)),
        ("key", call.share(shapes.S, held, shapes.H)),
        ("value", call.share(shapes.S, held, shapes.V)),
        ("out", call.share(shapes.T, shapes.N, shapes.V)),
    ]
    if call.spec.lse:
        wide = accumulation(call.dtype)
        arrays.append(("lse", call.share(shapes.T, shapes.N, dtype=wide)))
    for backward in (False, True):
        for name, size in arrays:
            yield Exchange("all-to-all", name, size * (n - 1) // n, 1, n, backward)
    for letters, leaf, learned in call.leaves():
        rows, heads = (axis_of(x, letters, leaf.ndim) for x in "TN")
        cut = travels(letters) or (rows is not None and leaf.shape[rows] == shapes.T)
        size = leaf.size * leaf.dtype.itemsize // n
        if cut and heads is not None and leaf.shape[heads] > 1:
            for backward in (False, True)[: 1 + learned]:
                yield Exchange("all-to-all", "mask", size * (n - 1) // n, 1, n, backward)
        elif cut:
            yield from _gathered("mask", size, n, learned)


def _gathered(name: str, size: int, n: int, learned: bool) -> Iterator[Exchange]:
    yield Exchange("all-gather", name, size * (n - 1), 1, n, False)
    if learned:
        yield Exchange("reduce-scatter", f"d_{name}", size * (n - 1), 1, n, True)


def _gather(call: _Call) -> Iterator[Exchange]:
    shapes, n = call.shapes, call.devices
    for name, last in (("key", shapes.H), ("value", shapes.V)):
        yield from _gathered(name, call.share(shapes.S, shapes.K, last), n, True)
    for letters, leaf, learned in call.leaves():
        if travels(letters):
            yield from _gathered("mask", leaf.size * leaf.dtype.itemsize // n, n, learned)


_SCHEMES = {"ring": _ring, "all_to_all": _all_to_all, "gather": _gather}
