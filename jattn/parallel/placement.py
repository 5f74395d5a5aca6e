"""The placement of tokens on devices, and the shards of keys that each device needs under a mask.

A sequence is sharded over the devices along a mesh axis. In contiguous order a device holds one
range of consecutive tokens. In zig-zag order it holds two ranges, one as far from the start as the
other from the end: under a causal mask early queries attend to few keys and late queries to many,
so that all devices have the same amount of work (as in Llama 3's context parallelism, Dubey et al.
2024). A place is the index of a token in the sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn import masks
from jattn._explicit import has_explicit_sharding
from jattn._pytree import pytree_dataclass
from jattn._types import AnyArray, Tree
from jattn.checks import check_choice, check_size, shown
from jattn.functions.integers import is_integer
from jattn.masks import And, Mask, Not, Or


ORDERS = ("contiguous", "zigzag")


def token_ranges(devices: int, order: str) -> Int[np.ndarray, "devices ranges"]:
    """Returns the indices of the ranges that each device holds, if the sequence is divided into
    equal ranges of consecutive tokens: one for each device, in zig-zag order two."""
    index = np.arange(devices)
    if order == "contiguous":
        return index[:, None]
    return np.stack([index, 2 * devices - 1 - index], axis=1)


def check_divisible(name: str, size: int, devices: int, order: str) -> None:
    """Raises ValueError unless `size` tokens can be divided into equal ranges."""
    ranges = token_ranges(devices, order).size
    if size % ranges:
        raise ValueError(
            f"{name}: expected a multiple of {ranges} tokens for {devices} devices in {order} "
            f"order, got {size}"
        )


def check_shards(T: int, S: int, devices: int, order: str) -> None:
    """Raises ValueError unless T queries and S keys can be divided into equal ranges."""
    check_divisible("query", T, devices, order)
    check_divisible("key", S, devices, order)


def local_places(index: Array, size: int, devices: int, order: str) -> Int[Array, " size"]:
    """Returns the places in the sequence of the `size` tokens that device `index` holds."""
    ranges = jnp.asarray(token_ranges(devices, order), jnp.int32)[index]
    length = size // ranges.shape[0]
    return (ranges[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None, :]).reshape(-1)


def sharded_places(size: int, devices: int, order: str) -> Int[np.ndarray, " size"]:
    """Returns the places in the sequence of all tokens, in their order after `shard_tokens`."""
    length = size // token_ranges(devices, order).size
    starts = token_ranges(devices, order).reshape(-1, 1) * length
    return (starts + np.arange(length)).reshape(-1).astype(np.int32)


def shard_tokens(x: Any, devices: int, *, axis: int = -1, order: str = "contiguous") -> Any:
    """Reorders tokens into the order in which `devices` devices hold them.

    Args:
        x: an array, or a tree of arrays, each with the tokens of a sequence along `axis`: ids and
            labels `[B, T]`, positions `[T]`, segment ids.
        devices: the number of devices that share a sequence.
        axis: the axis of the tokens.
        order: "contiguous" changes nothing; "zigzag" gives device i of n the i-th and the i-th last
            of 2n equal ranges of tokens, which balances causal attention.

    Returns:
        A tree like `x`. Along the axis, each of `devices` equal shards is one device's.

    Raises ValueError if the number of tokens is not a multiple of `devices` (in zig-zag order, of
    `2 * devices`), and TypeError or ValueError for other invalid arguments.

    >>> jattn.parallel.shard_tokens(jnp.arange(8), 2, order="zigzag").tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _reordered(x, devices, axis, order, back=False)


def unshard_tokens(x: Tree, devices: int, *, axis: int = -1, order: str = "contiguous") -> Tree:
    """Restores the order of tokens before `shard_tokens`, with the same arguments and errors.

    >>> tokens = jattn.parallel.shard_tokens(jnp.arange(8), 2, order="zigzag")
    >>> jattn.parallel.unshard_tokens(tokens, 2, order="zigzag").tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _reordered(x, devices, axis, order, back=True)


def _reordered(x: Any, devices: int, axis: int, order: str, *, back: bool) -> Any:
    check_size("devices", devices)
    check_choice("order", order, ORDERS)
    if not is_integer(axis):
        raise TypeError(f"axis: expected an integer, got {shown(axis)}")
    if not jax.tree.leaves(x):
        raise TypeError(f"x: expected an array or a tree of arrays, got {shown(x)}")

    def reorder(leaf: AnyArray) -> AnyArray | None:
        if not isinstance(leaf, AnyArray):
            raise TypeError(f"x: expected an array or a tree of arrays, got {type(leaf).__name__}")
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"axis: expected an axis of {list(leaf.shape)}, got {shown(axis)}")
        check_divisible("x", leaf.shape[axis], devices, order)
        if order == "contiguous":
            return leaf
        places = sharded_places(leaf.shape[axis], devices, order)
        orders = (places, np.argsort(places))
        if isinstance(leaf, np.ndarray):
            return leaf.take(orders[back], axis)
        take = functools.partial(_take, axis=axis % leaf.ndim)
        if not has_explicit_sharding(leaf):
            return take(leaf, orders[back])
        # JAX cannot determine the sharding of a gather's cotangent.
        return jax.custom_derivatives.linear_call(
            lambda _, x: take(x, orders[back]), lambda _, x: take(x, orders[not back]), (), leaf
        )

    return jax.tree.map(reorder, x)


def _take(x: Array, places: np.ndarray, axis: int) -> Array:
    """Returns the tokens at these places, sharded like the tokens of x."""
    typed = jax.typeof(x).sharding if has_explicit_sharding(x) else None
    return x.at[*(slice(None),) * axis, places].get(out_sharding=typed, mode="clip")


def token_positions(T: int, devices: int, order: str = "contiguous") -> Int[Array, " T"]:
    """Returns the positions, int32 `[T]`, that the tokens had before `shard_tokens`.

    Raises ValueError if T is not a multiple of `devices` (in zig-zag order, of `2 * devices`), and
    TypeError or ValueError for other invalid arguments.

    >>> jattn.parallel.token_positions(8, 2, "zigzag").tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_size("T", T, 0)
    check_size("devices", devices)
    check_choice("order", order, ORDERS)
    check_divisible("T", T, devices, order)
    return jnp.asarray(sharded_places(T, devices, order))


@pytree_dataclass
class _Undecided(Mask):
    """A stand-in for a mask with arrays, whose tiles cannot be decided while tracing."""

    def bounds(self, tile):
        return np.True_, np.False_


def _static_part(mask: Mask) -> Mask:
    """Returns the mask with every part that holds arrays replaced by `_Undecided`."""
    if isinstance(mask, And | Or):
        return type(mask)(_static_part(mask.left), _static_part(mask.right))
    if isinstance(mask, Not):
        return Not(_static_part(mask.inner))
    return _Undecided() if jax.tree.leaves(mask) else mask


def needed(
    mask: Mask, T: int, S: int, devices: int, order: str
) -> Bool[np.ndarray, "devices devices"]:
    """Returns an array whose entry [d, s] is false if the queries of device d certainly need no key
    of shard s, as far as can be decided while tracing.

    The positions of tokens are their places in the sequence.
    """
    ranges = token_ranges(devices, order)
    kinds = _tile_kinds(mask, T, S, max(1, T // ranges.size), max(1, S // ranges.size))
    if kinds is None:
        return np.ones((devices, devices), bool)
    by_device = kinds[ranges][:, :, ranges]  # [devices, query ranges, devices, key ranges]
    return np.any(by_device != masks.EMPTY, axis=(1, 3))


def _tile_kinds(mask: Mask, T: int, S: int, queries: int, keys: int) -> np.ndarray | None:
    """Returns `masks.kinds` of all tiles of `queries` × `keys`; None if they are traced."""
    tile = masks.Tile.grid(masks.extents(T, queries), masks.extents(S, keys))
    kinds = masks.kinds(_static_part(mask), tile)
    return kinds if isinstance(kinds, np.ndarray) and T and S else None


_MOST_TILES = 2**20
_TILE_KEYS = 128  # keys that kernels read at a time


def sent_keys(mask: Mask, T: int, S: int, devices: int, order: str) -> slice:
    """Returns the range of keys of a shard that other devices need, as far as can be decided while
    tracing.

    It is the same range for all shards: the last keys for a window, all keys in zig-zag order.
    """
    shard_size = S // devices
    keys = _TILE_KEYS if shard_size % _TILE_KEYS == 0 else 1
    while devices * S // keys > _MOST_TILES and shard_size % (2 * keys) == 0:
        keys *= 2
    if order != "contiguous" or devices * S // keys > _MOST_TILES:
        return slice(0, shard_size)
    kinds = _tile_kinds(mask, T, S, max(1, T // devices), keys)
    if kinds is None:
        return slice(0, shard_size)
    needed = kinds.reshape(devices, devices, -1) != masks.EMPTY  # [device, shard, tile of keys]
    needed &= ~np.eye(devices, dtype=bool)[:, :, None]
    tiles = np.flatnonzero(needed.any(axis=(0, 1)))
    start, stop = (tiles[0], tiles[-1] + 1) if tiles.size else (0, 0)
    return slice(int(start) * keys, int(stop) * keys)
