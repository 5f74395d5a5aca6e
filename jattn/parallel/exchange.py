"""The schemes "gather" and "all_to_all".

With "gather" each device computes its queries with a copy of all keys, so that its memory is linear
in the length of the whole sequence. With "all_to_all" each device exchanges its tokens, of all
heads, for all tokens of its share of the heads, computes these heads, and exchanges the results
back (Jacobs et al. 2023, "DeepSpeed Ulysses"). JAX differentiates the exchanges.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn._pytree import axis_names, axis_of
from jattn._types import Output
from jattn.attention import run
from jattn.call import Call
from jattn.kernels.common.place import Place, at_place
from jattn.parallel import placement
from jattn.parallel.axes import Axes
from jattn.parallel.ring import travels
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


def _in_sequence(x: Array, axes: Axes, axis: int, back: bool = False) -> Array:
    """Reorders tokens from the devices' order to the sequence's; with `back` the other way."""
    if axes.order == "contiguous":
        return x
    places = placement.sharded_places(x.shape[axis], axes.devices, axes.order)
    return jnp.take(x, places if back else np.argsort(places), axis=axis)


def _gathered(x: Array, axes: Axes, axis: int) -> Array:
    """Returns the tokens of all devices along an axis, in the order of the sequence."""
    return _in_sequence(lax.all_gather(x, axes.name, axis=axis, tiled=True), axes, axis)


def gathered_attend(
    call: Call, query: Array, key: Array, value: Array, axes: Axes
) -> tuple[Output, Normalizer]:
    """Computes what `ring.attend` computes, with a copy of all keys on each device."""
    (B, T, N, _), S = query.shape, key.shape[1] * axes.devices
    key, value = (_gathered(x, axes, 1) for x in (key, value))

    def gather_leaf(letters: str, leaf: Array) -> Array:
        axis = axis_of("S", letters, leaf.ndim)
        if axis is None:
            return leaf
        if travels(letters):
            return _gathered(leaf, axes, axis)
        return leaf if leaf.shape[axis] == 1 else _in_sequence(leaf, axes, axis)

    spec = jax.tree.map(gather_leaf, axis_names(call.spec), call.spec)
    b, h = axes.first_row_and_head(B, N)
    kv_places = jnp.arange(S, dtype=jnp.int32)
    place = Place(b, h, axes.places(T), kv_places, (axes.range_size(T), 0), keys_from=0)
    local = dataclasses.replace(call, spec=at_place(spec, place), shapes=Shapes.of(query, value))
    return run(local, query, key, value)


def all_to_all_attend(
    call: Call, query: Array, key: Array, value: Array, axes: Axes
) -> tuple[Output, Normalizer]:
    """Computes what `ring.attend` computes, with all tokens of some of the heads on each device.

    If there are fewer key heads than devices, each key head is sent to every device whose query
    heads read it.
    """
    n, (B, T, N, _), K = axes.devices, query.shape, key.shape[2]
    if N % n:
        raise ValueError(
            f"query: expected a number of heads that {n} devices share evenly for scheme "
            f"'all_to_all', got N = {N}"
        )
    copies = math.lcm(K, n) // K
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))

    def exchange(x: Array) -> Array:
        all_tokens = lax.all_to_all(x, axes.name, split_axis=2, concat_axis=1, tiled=True)
        return _in_sequence(all_tokens, axes, 1)

    b, h = axes.first_row_and_head(B, N)
    place = Place(b, h + axes.device_index * (N // n))
    spec = at_place(_spec_of_heads(call.spec, axes, T), place)
    query, key, value = (exchange(x) for x in (query, key, value))
    local = dataclasses.replace(call, spec=spec, shapes=Shapes.of(query, value))
    out, normalizer = run(local, query, key, value)

    def exchange_back(x: Array, tokens: int, heads: int) -> Array:
        x = _in_sequence(x, axes, tokens, back=True)
        return lax.all_to_all(x, axes.name, split_axis=tokens, concat_axis=heads, tiled=True)

    rows = (exchange_back(x, tokens=2, heads=1) for x in normalizer)
    return exchange_back(out, tokens=1, heads=2), Normalizer(*rows)


def _spec_of_heads(spec: Spec, axes: Axes, T: int) -> Spec:
    """Returns the spec for all tokens of this device's heads, from that of its own T queries."""

    def exchange_leaf(letters: str, leaf: Array) -> Array:
        heads, queries, keys = (axis_of(x, letters, leaf.ndim) for x in "NTS")
        heads = None if heads is None or leaf.shape[heads] == 1 else heads
        queries = None if queries is None or leaf.shape[queries] != T else queries
        if queries is not None and heads is not None:
            leaf = lax.all_to_all(leaf, axes.name, heads, queries, tiled=True)
            leaf = _in_sequence(leaf, axes, queries)
        elif queries is not None:
            leaf = _gathered(leaf, axes, queries)
        elif heads is not None:
            share = leaf.shape[heads] // axes.devices
            leaf = lax.dynamic_slice_in_dim(leaf, axes.device_index * share, share, heads)
        if keys is not None and travels(letters):
            return _gathered(leaf, axes, keys)
        if keys is not None and leaf.shape[keys] > 1:
            return _in_sequence(leaf, axes, keys)
        return leaf

    return jax.tree.map(exchange_leaf, axis_names(spec), spec)
