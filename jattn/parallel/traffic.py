"""The traffic of each scheme, by formula: the arrays that devices send, their size and number.

With n devices along the axis, each with a shard of s bytes of an array, a device sends

- in a ring, forward, s at each hop, for keys, values and the mask's arrays along S; backward the
  same again, and at each hop the gradients of keys and values in the dtype of sums, which make one
  more hop, in their own dtype, to return to their shard. There are n − 1 hops, or as many as lie
  between a shard and the last device that needs it under the mask. If the other devices need only a
  part of each shard, as under a window, s counts this part;
- for all_to_all, s (n − 1) / n of query, keys, values and output; backward the same for their
  gradients. If there are fewer key heads than devices, key heads are repeated first;
- for gather, s (n − 1) of keys and values; backward the same for their gradients.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._advised import advised
from jattn._pytree import axis_names, axis_of
from jattn._types import AnyArray, Keys, Queries, Values, accumulation
from jattn.call import Call, make
from jattn.checks import check_choice, check_size
from jattn.options import WeightOptions
from jattn.parallel import placement, rounds
from jattn.parallel.ring import Route, travels
from jattn.parallel.rounds import Round
from jattn.spec import Shapes, parameters


class Exchange(NamedTuple):
    """One array that a call exchanges.

    `kind` is the operation's name in XLA's programs: "collective-permute", "all-to-all",
    "all-gather" or "reduce-scatter". `bytes` is the number of bytes that a device sends each time,
    by the last two kinds to its neighbour in a circle; `times` counts the exchanges, `devices` the
    devices that send; `backward` tells whether it belongs to the backward pass. A ring may process
    its heads in `rounds`, and a shard's keys in `chunks`; `times` counts all of them.
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
    """Returns the exchanges of `parallel.attention` with these arguments, forward and backward.

    It computes nothing. It does not count sums over devices of the gradients of parameters, which
    XLA merges with those of the rest of a program. XLA may merge exchanges that both passes make.

    Args:
        query: `[*B, T, N, H]`, or a `jax.ShapeDtypeStruct` of it, as may be the next two. If batch
            or heads are sharded too, the part that the devices along the axis have together.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        devices: the number of devices that share T and S.
        scheme, order, return_lse, and other options: as in `parallel.attention`.

    Returns:
        The exchanges, those of the forward pass first.

    Raises:
        TypeError, ValueError: the errors of `parallel.attention`.

    >>> exchanges = jattn.parallel.exchanges(q[:, :4], k[:, :4], v[:, :4], devices=2)
    >>> [(x.array, x.bytes) for x in exchanges if not x.backward]
    [('key', 256), ('value', 256)]
    """
    check_choice("scheme", scheme, tuple(_SCHEMES))
    check_choice("order", order, placement.ORDERS)
    check_size("devices", devices)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not isinstance(array, AnyArray | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name}: expected an array or a jax.ShapeDtypeStruct, got {type(array).__name__}"
            )
    exchanged: list[Exchange] = []

    def collect(query: Array, key: Array, value: Array) -> None:
        call = make(query, key, value, lse=return_lse, **options).prepared()
        placement.check_shards(call.shapes.T, call.shapes.S, devices, order)
        sharded = _ShardedCall(call, devices, order)
        exchanged.extend(x for x in _SCHEMES[scheme](sharded) if x.bytes and x.times)

    jax.eval_shape(collect, query, key, value)
    return tuple(sorted(exchanged, key=lambda x: x.backward))


class _ShardedCall(NamedTuple):
    """A prepared call on whole arrays and its sharding."""

    call: Call
    devices: int
    order: str

    @property
    def shapes(self) -> Shapes:
        """The sizes of the whole call."""
        return self.call.shapes

    def share(self, *sizes: int, dtype: Any = None) -> int:
        """Returns the bytes of a device's share of an array with these sizes for each batch row."""
        size = self.shapes.B * math.prod(sizes) // self.devices
        return size * jnp.dtype(self.shapes.dtype if dtype is None else dtype).itemsize

    def leaves(self) -> Iterator[tuple[str, Any, bool]]:
        """Yields the letters of each array of the spec, the array, and if it has a gradient."""
        learned = {id(x) for x in parameters(self.call.spec)}
        letters = jax.tree.leaves(axis_names(self.call.spec))
        for x, leaf in zip(letters, jax.tree.leaves(self.call.spec), strict=True):
            yield x, leaf, id(leaf) in learned


def _ring(sharded: _ShardedCall) -> Iterator[Exchange]:
    shapes, n = sharded.shapes, sharded.devices
    S = shapes.S
    route = Route.of(sharded.call.spec, shapes.T, S, n, sharded.order)
    keys = route.part.stop - route.part.start
    chunks = rounds.chunks(keys)
    sent = n * (keys // chunks)  # tokens at a time, of all devices together
    count = rounds.count(shapes._replace(T=shapes.T // n)) if route.hops else 1
    K = shapes.K // count
    sent_arrays = [
        ("key", sharded.share(sent, K, shapes.H)),
        ("value", sharded.share(sent, K, shapes.V)),
    ]
    for letters, leaf, _ in sharded.leaves():
        if travels(letters):
            axis: Any = axis_of("S", letters, leaf.ndim)
            numbers = leaf.size // S * sent // n if leaf.shape[axis] > 1 else leaf.size
            numbers //= 1 if Round.axis(letters, leaf) is None else count
            sent_arrays.append(("mask", numbers * leaf.dtype.itemsize))
    kind, wide = "collective-permute", accumulation(shapes.dtype)
    for backward in (False, True):
        for name, size in sent_arrays:
            for hops in route.hops:
                times, sources = hops.times * count * chunks, len(hops.sources)
                yield Exchange(kind, name, size, times, sources, backward, count, chunks)
    if route.hops:
        hops = sum(x.times for x in route.hops)
        for name, last in (("d_key", shapes.H), ("d_value", shapes.V)):
            for dtype, hops_each in ((wide, hops), (shapes.dtype, 1)):
                size, times = sharded.share(sent, K, last, dtype=dtype), hops_each * count * chunks
                yield Exchange(kind, name, size, times, n, True, count, chunks)


def _all_to_all(sharded: _ShardedCall) -> Iterator[Exchange]:
    shapes, n = sharded.shapes, sharded.devices
    key_heads = math.lcm(shapes.K, n)
    arrays = [
        ("query", sharded.share(shapes.T, shapes.N, shapes.H)),
        ("key", sharded.share(shapes.S, key_heads, shapes.H)),
        ("value", sharded.share(shapes.S, key_heads, shapes.V)),
        ("out", sharded.share(shapes.T, shapes.N, shapes.V)),
    ]
    if sharded.call.needs_lse:
        wide = accumulation(shapes.dtype)
        arrays.append(("lse", sharded.share(shapes.T, shapes.N, dtype=wide)))
    for backward in (False, True):
        for name, size in arrays:
            yield Exchange("all-to-all", name, size * (n - 1) // n, 1, n, backward)
    for letters, leaf, learned in sharded.leaves():
        rows, heads = (axis_of(x, letters, leaf.ndim) for x in "TN")
        is_cut = travels(letters) or (rows is not None and leaf.shape[rows] == shapes.T)
        size = leaf.size * leaf.dtype.itemsize // n
        if is_cut and heads is not None and leaf.shape[heads] > 1:
            for backward in (False, True)[: 1 + learned]:
                yield Exchange("all-to-all", "mask", size * (n - 1) // n, 1, n, backward)
        elif is_cut:
            yield from _gathered("mask", size, n, learned)


def _gathered(name: str, size: int, n: int, learned: bool) -> Iterator[Exchange]:
    yield Exchange("all-gather", name, size * (n - 1), 1, n, False)
    if learned:
        yield Exchange("reduce-scatter", f"d_{name}", size * (n - 1), 1, n, True)


def _gather(sharded: _ShardedCall) -> Iterator[Exchange]:
    shapes, n = sharded.shapes, sharded.devices
    for name, last in (("key", shapes.H), ("value", shapes.V)):
        yield from _gathered(name, sharded.share(shapes.S, shapes.K, last), n, True)
    for letters, leaf, learned in sharded.leaves():
        if travels(letters):
            yield from _gathered("mask", leaf.size * leaf.dtype.itemsize // n, n, learned)


_SCHEMES = {"ring": _ring, "all_to_all": _all_to_all, "gather": _gather}
