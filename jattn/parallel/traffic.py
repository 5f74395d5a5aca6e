"""The traffic of each scheme, by formula: the arrays that a device sends, and their bytes.

Let n be the number of devices along the axis and s the bytes of a device's shard of an array.

- "ring": in the forward pass a device sends s bytes at each hop, for keys, values and the mask's
  arrays along S. In the backward pass it sends the same again, and at each hop the gradients of
  keys and values in the accumulation dtype; one more hop, in the dtype of keys and values, returns
  the gradients to the device of their shard. There are n − 1 hops; fewer if no device that is
  further away needs a shard under the mask. If the other devices need only some keys of each shard,
  as under a window, s counts only these.
- "all_to_all": a device sends s (n − 1) / n bytes of query, keys, values and output; in the
  backward pass the same for their gradients. If there are fewer key heads than devices, key heads
  are repeated first.
- "gather": a device sends s (n − 1) bytes of keys and values; in the backward pass the same for
  their gradients.
"""

import functools
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
from jattn.spec import Spec, parameters


class Exchange(NamedTuple):
    """One array that a call exchanges.

    kind: the operation's name in XLA's programs: "collective-permute", "all-to-all", "all-gather"
        or "reduce-scatter".
    array: the name of the array.
    bytes: the number of bytes that a device sends in each exchange. An all-gather and a
        reduce-scatter are counted as if every device sent to its neighbour in a ring.
    times: the number of exchanges, over all rounds and chunks.
    devices: the number of devices that send.
    backward: whether the exchange belongs to the backward pass.
    rounds, chunks: the numbers of rounds and chunks in which a ring processes heads and keys.
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

    It computes no attention. It does not count the sums over devices of gradients of parameters:
    XLA merges these with others of the program. XLA may also merge equal exchanges of both passes.

    Args:
        query: `[*B, T, N, H]`; an array or a `jax.ShapeDtypeStruct`, like key and value. If batch
            or heads are sharded too, the part that the devices along the axis have together.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        devices: the number of devices over which T and S are sharded.
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
        sent = _SCHEMES[scheme](call, devices, order)
        exchanged.extend(x for x in sent if x.bytes and x.times)

    jax.eval_shape(collect, query, key, value)
    return tuple(sorted(exchanged, key=lambda x: x.backward))


def _shard_bytes(call: Call, devices: int, *sizes: int, dtype: Any = None) -> int:
    """Returns the bytes of a shard of `[B, *sizes]`, by default in the dtype of queries."""
    size = call.shapes.B * math.prod(sizes) // devices
    return size * jnp.dtype(call.shapes.dtype if dtype is None else dtype).itemsize


def _leaves(spec: Spec) -> Iterator[tuple[str, Any, bool]]:
    """Yields `(axis letters, array, whether it has a gradient)` for each array of the spec."""
    parameter_ids = set(map(id, parameters(spec)))
    pairs = zip(jax.tree.leaves(axis_names(spec)), jax.tree.leaves(spec), strict=True)
    for letters, leaf in pairs:
        yield letters, leaf, id(leaf) in parameter_ids


def _ring(call: Call, n: int, order: str) -> Iterator[Exchange]:
    shapes, S, shard_bytes = call.shapes, call.shapes.S, functools.partial(_shard_bytes, call, n)
    route = Route.of(call.spec, shapes.T, S, n, order)
    keys = route.sent_keys.stop - route.sent_keys.start
    chunks = rounds.chunks(keys)
    sent = n * (keys // chunks)  # keys in one chunk of every device together
    count = rounds.count(shapes._replace(T=shapes.T // n)) if route.hops else 1
    K = shapes.K // count
    sent_arrays = [
        ("key", shard_bytes(sent, K, shapes.H)),
        ("value", shard_bytes(sent, K, shapes.V)),
    ]
    for letters, leaf, _ in _leaves(call.spec):
        if travels(letters):
            axis: Any = axis_of("S", letters, leaf.ndim)
            entries = leaf.size // S * sent // n if leaf.shape[axis] > 1 else leaf.size
            entries //= 1 if Round.axis(letters, leaf) is None else count
            sent_arrays.append(("mask", entries * leaf.dtype.itemsize))
    kind = "collective-permute"
    for backward in (False, True):
        for name, size in sent_arrays:
            for hops in route.hops:
                times, sources = hops.times * count * chunks, len(hops.sources)
                yield Exchange(kind, name, size, times, sources, backward, count, chunks)
    if route.hops:
        hops = sum(x.times for x in route.hops)
        for name, last in (("d_key", shapes.H), ("d_value", shapes.V)):
            for dtype, sends in ((accumulation(shapes.dtype), hops), (shapes.dtype, 1)):
                size = shard_bytes(sent, K, last, dtype=dtype)
                yield Exchange(kind, name, size, sends * count * chunks, n, True, count, chunks)


def _all_to_all(call: Call, n: int, _: str) -> Iterator[Exchange]:
    shapes, shard_bytes = call.shapes, functools.partial(_shard_bytes, call, n)
    key_heads = math.lcm(shapes.K, n)
    arrays = [
        ("query", shard_bytes(shapes.T, shapes.N, shapes.H)),
        ("key", shard_bytes(shapes.S, key_heads, shapes.H)),
        ("value", shard_bytes(shapes.S, key_heads, shapes.V)),
        ("out", shard_bytes(shapes.T, shapes.N, shapes.V)),
    ]
    if call.needs_lse:
        dtype = accumulation(shapes.dtype)
        arrays.append(("lse", shard_bytes(shapes.T, shapes.N, dtype=dtype)))
    for backward in (False, True):
        for name, size in arrays:
            yield Exchange("all-to-all", name, size * (n - 1) // n, 1, n, backward)
    for letters, leaf, has_gradient in _leaves(call.spec):
        queries, heads = (axis_of(x, letters, leaf.ndim) for x in "TN")
        is_sharded = travels(letters) or (queries is not None and leaf.shape[queries] == shapes.T)
        size = leaf.size * leaf.dtype.itemsize // n
        if is_sharded and heads is not None and leaf.shape[heads] > 1:
            for backward in (False, True)[: 1 + has_gradient]:
                yield Exchange("all-to-all", "mask", size * (n - 1) // n, 1, n, backward)
        elif is_sharded:
            yield from _gathered("mask", size, n, has_gradient)


def _gathered(name: str, size: int, n: int, has_gradient: bool) -> Iterator[Exchange]:
    """Yields the exchanges that gather an array with shards of `size` bytes."""
    yield Exchange("all-gather", name, size * (n - 1), 1, n, False)
    if has_gradient:
        yield Exchange("reduce-scatter", f"d_{name}", size * (n - 1), 1, n, True)


def _gather(call: Call, n: int, _: str) -> Iterator[Exchange]:
    shapes, shard_bytes = call.shapes, functools.partial(_shard_bytes, call, n)
    for name, last in (("key", shapes.H), ("value", shapes.V)):
        yield from _gathered(name, shard_bytes(shapes.S, shapes.K, last), n, True)
    for letters, leaf, has_gradient in _leaves(call.spec):
        if travels(letters):
            yield from _gathered("mask", leaf.size * leaf.dtype.itemsize // n, n, has_gradient)


_SCHEMES = {"ring": _ring, "all_to_all": _all_to_all, "gather": _gather}
