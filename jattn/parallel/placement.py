"""The placement of tokens on devices, and the shards of keys that each device needs under a mask.

A sequence is cut into as many shards as there are devices along an axis of a mesh. In contiguous
order a device holds one run of tokens. In zig-zag order it holds two runs, at equal distance from
the middle: under a causal mask early queries see few keys and late ones many, and with both, all
devices have the same amount of work (as in Llama 3's context parallelism, Dubey et al. 2024).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn import masks
from jattn._pytree import pytree_dataclass
from jattn._types import AnyArray, Tree
from jattn.checks import check_choice, check_size, shown
from jattn.functions.integers import is_integer
from jattn.masks import And, Mask, Not, Or


ORDERS = ("contiguous", "zigzag")


def runs(devices: int, order: str) -> Int[np.ndarray, "devices runs"]:
    """Returns the runs of tokens that each device holds, numbered in the order of the sequence."""
    first = np.arange(devices)
    if order == "contiguous":
        return first[:, None]
    return np.stack([first, 2 * devices - 1 - first], axis=1)


def check_divisible(name: str, size: int, devices: int, order: str) -> None:
    """Raises ValueError unless `size` tokens can be cut into equal runs."""
    pieces = runs(devices, order).size
    if size % pieces:
        raise ValueError(
            f"{name}: expected a multiple of {pieces} tokens for {devices} devices in {order} "
            f"order, got {size}"
        )


def check_shards(T: int, S: int, devices: int, order: str) -> None:
    """Raises ValueError unless queries and keys can be cut into equal runs."""
    check_divisible("query", T, devices, order)
    check_divisible("key", S, devices, order)


def local_places(index: Array, size: int, devices: int, order: str) -> Int[Array, " size"]:
    """Returns the places in the sequence of the `size` tokens that device `index` holds."""
    of_device = jnp.asarray(runs(devices, order), jnp.int32)[index]
    length = size // of_device.shape[0]
    return (of_device[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None, :]).reshape(-1)


def placed(size: int, devices: int, order: str) -> Int[np.ndarray, " size"]:
    """Returns the token of the sequence at each place after `shard_tokens`."""
    length = size // runs(devices, order).size
    starts = runs(devices, order).reshape(-1, 1) * length
    return (starts + np.arange(length)).reshape(-1).astype(np.int32)


def shard_tokens(x: Any, devices: int, *, axis: int = -1, order: str = "contiguous") -> Any:
    """Reorders tokens into the order in which `devices` devices hold them.

    Args:
        x: an array, or a tree of arrays, each with the tokens of a sequence along `axis`: tokens
            and labels `[B, T]`, positions `[T]`, ids of segments.
        devices: the number of devices that share a sequence.
        axis: the axis of the tokens.
        order: "contiguous" changes nothing; "zigzag" gives device i of n the i-th and the i-th last
            of 2n equal runs, which balances causal attention.

    Returns:
        The same tree, to be cut into equal shards along the axis, one for each device.

    Raises ValueError if the number of tokens is not a multiple of `devices` (in zig-zag order of
    twice that number), and TypeError or ValueError for other arguments that do not fit.

    >>> jattn.parallel.shard_tokens(jnp.arange(8), 2, order="zigzag").tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _taken(x, devices, axis, order, back=False)


def unshard_tokens(x: Tree, devices: int, *, axis: int = -1, order: str = "contiguous") -> Tree:
    """Restores the order of tokens before `shard_tokens`, with the same arguments and errors.

    >>> tokens = jattn.parallel.shard_tokens(jnp.arange(8), 2, order="zigzag")
    >>> jattn.parallel.unshard_tokens(tokens, 2, order="zigzag").tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _taken(x, devices, axis, order, back=True)


def _typed_sharding(x: Array) -> Any:
    """Returns the sharding of an array if it is part of its type; None otherwise."""
    sharding = jax.typeof(x).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


def _taken(x: Any, devices: int, axis: int, order: str, *, back: bool) -> Any:
    check_size("devices", devices)
    check_choice("order", order, ORDERS)
    if not is_integer(axis):
        raise TypeError(f"axis: expected an integer, got {shown(axis)}")

    if not jax.tree.leaves(x):
        raise TypeError(f"x: expected an array or a tree of arrays, got {shown(x)}")

    def reordered(leaf: AnyArray) -> AnyArray | None:
        if not isinstance(leaf, AnyArray):
            raise TypeError(f"x: expected an array or a tree of arrays, got {type(leaf).__name__}")
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"axis: expected an axis of {list(leaf.shape)}, got {shown(axis)}")
        check_divisible("x", leaf.shape[axis], devices, order)
        if order == "contiguous":
            return leaf
        places = placed(leaf.shape[axis], devices, order)
        places = np.argsort(places) if back else places
        if isinstance(leaf, np.ndarray):
            return leaf.take(places, axis)
        index = (slice(None),) * (axis % leaf.ndim)
        return leaf.at[*index, places].get(out_sharding=_typed_sharding(leaf), mode="clip")

    return jax.tree.map(reordered, x)


def token_positions(T: int, devices: int, order: str = "contiguous") -> Int[Array, " T"]:
    """Returns the positions `[T]` of tokens after `shard_tokens`, their places before. int32.

    Raises ValueError if T is not a multiple of `devices` (in zig-zag order of twice that number),
    and TypeError or ValueError for other arguments that do not fit.

    >>> jattn.parallel.token_positions(8, 2, "zigzag").tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_size("T", T, 0)
    check_size("devices", devices)
    check_choice("order", order, ORDERS)
    check_divisible("T", T, devices, order)
    return jnp.asarray(placed(T, devices, order))


@pytree_dataclass
class _Unknown(Mask):
    """Stands for a mask with arrays, about which nothing is certain while tracing."""

    def bounds(self, tile):
        return np.True_, np.False_


def _known_part(mask: Mask) -> Mask:
    """Returns the mask with every part that depends on arrays replaced by `_Unknown`."""
    if isinstance(mask, And | Or):
        return type(mask)(_known_part(mask.left), _known_part(mask.right))
    if isinstance(mask, Not):
        return Not(_known_part(mask.inner))
    return _Unknown() if jax.tree.leaves(mask) else mask


def needed(
    mask: Mask, T: int, S: int, devices: int, order: str
) -> Bool[np.ndarray, "devices devices"]:
    """Returns which shards of keys each device's queries need, as far as is known while tracing.

    Tokens are at the positions of the order.
    """
    of_device = runs(devices, order)
    size = max(1, S // of_device.size)
    kinds = _kinds(mask, T, S, max(1, T // of_device.size), size)
    if kinds is None:
        return np.ones((devices, devices), bool)
    by_run = kinds[of_device][:, :, of_device]  # [devices, runs, devices, runs]
    return np.any(by_run != masks.EMPTY, axis=(1, 3))


def _kinds(mask: Mask, T: int, S: int, rows: int, columns: int) -> np.ndarray | None:
    """Returns the kinds of tiles of `rows` × `columns`; None if not known while tracing."""
    tile = masks.Tile.grid(masks.extents(T, rows), masks.extents(S, columns))
    kinds = masks.kinds(_known_part(mask), tile)
    return kinds if isinstance(kinds, np.ndarray) and T and S else None


_MOST_TILES = 2**20
_TILE = 128  # keys that kernels read at a time


def reach(mask: Mask, T: int, S: int, devices: int, order: str) -> slice:
    """Returns the keys of a shard that any other device needs, as far as is known while tracing.

    It is one run for all shards: for a window the last keys, in zig-zag order all of them.
    """
    size = S // devices
    columns = _TILE if size % _TILE == 0 else 1
    while devices * S // columns > _MOST_TILES and size % (2 * columns) == 0:
        columns *= 2
    if order != "contiguous" or devices * S // columns > _MOST_TILES:
        return slice(0, size)
    kinds = _kinds(mask, T, S, max(1, T // devices), columns)
    if kinds is None:
        return slice(0, size)
    visited = kinds.reshape(devices, devices, -1) != masks.EMPTY
    visited &= ~np.eye(devices, dtype=bool)[:, :, None]
    columns_needed = np.flatnonzero(visited.any(axis=(0, 1)))
    first, last = (columns_needed[0], columns_needed[-1] + 1) if columns_needed.size else (0, 0)
    return slice(int(first) * columns, int(last) * columns)
