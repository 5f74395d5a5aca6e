"""How a kernel's function is cut over devices under `jit`, when its arrays are.

The function sees no other batch rows and heads, so each device can compute those that it has. XLA's
partitioner does not look into a kernel, and would gather what it reads. It is told along which
letters each array runs, and what one device computes: the same function of its share, at the batch
row and the head where that begins. Gradients of what all rows or heads share are summed.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.sharding_impls import ShardingContext
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from jattn._pytree import axis_names
from jattn.kernels.common.place import Place, at_place
from jattn.spec import Spec, parameter_letters, parameters


Dims = tuple[str, ...]  # a letter for each axis: B, N, K, one for an axis that is mapped, or ""
BY_QUERY: Dims = ("B", "", "N", "")
BY_HEAD: Dims = ("B", "N", "", "")


class Letters(NamedTuple):
    """Along which letters the flat operands and results of a function run."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]

    def mapped(self, axes: tuple[int | None, ...]) -> "Letters":
        """Those of the function mapped over these axes of its operands."""
        letter = f"M{sum(x[:1] == 'M' for x in self.results[0])}" if self.results else "M"
        operands = tuple(
            dims if axis is None else (*dims[:axis], letter, *dims[axis:])
            for dims, axis in zip(self.operands, axes, strict=True)
        )
        return Letters(operands, tuple((letter, *dims) for dims in self.results))


class Partitioned(NamedTuple):
    """A function of `(platform, *operands)` and the letters of its arrays."""

    function: Callable[..., Any]
    letters: Letters

    def __call__(self, platform: str, *operands: Any) -> Any:
        return self.function(platform, *_at_share(operands))


def by_key(key: Any) -> Dims:
    """A key head that is the only one serves all query heads, wherever these are."""
    return ("B", "", "K" if key.shape[2] > 1 else "", "")


def partitioned(
    which: str, function: Callable[..., Any], like: Any, operands: Any
) -> Callable[..., Any]:
    """A function of an `AttentionVJP`, by its name, as one that is cut where its operands are."""
    spec, per_query, key, _, *rest = operands  # whether all is finite, weights that were kept
    keys = by_key(key)
    rows = [BY_QUERY[: x.ndim] for x in jax.tree.leaves(per_query)]
    given = (*_of_tree(spec), *rows, keys, keys, *(BY_HEAD[: x.ndim] for x in rest))
    if which == "backward":
        found = (*of_parameters(spec), BY_QUERY, keys, keys)
    elif which in ("forward", "forward_alone", "forward_with_weights", "forward_rounded"):
        last = BY_QUERY if which == "forward_rounded" else BY_HEAD
        found = (BY_QUERY, BY_QUERY[:3], BY_QUERY[:3], (), last)[: len(jax.tree.leaves(like))]
    else:
        return function
    return Partitioned(function, Letters(given, found))


def partitioned_on_cache(
    function: Callable[..., Any], spec: Spec, query: Any, cache: Any
) -> Callable[..., Any]:
    """A function of these as one that is cut where they are; its results are `out [B, T, N, V]` and
    a normalizer."""
    given = (*_of_tree(spec), BY_QUERY, *_of_tree(cache))
    return Partitioned(function, Letters(given, (BY_QUERY, BY_QUERY[:3], BY_QUERY[:3])))


def partitioned_statistics(
    function: Callable[..., Any], results: tuple[Dims, ...], operands: tuple[Any, ...]
) -> Callable[..., Any]:
    """A function of a tree of specs, queries, keys and arrays by batch row and head."""
    specs, _, key, *rest = operands
    by_head = (BY_HEAD[: x.ndim] for x in jax.tree.leaves(rest))
    return Partitioned(
        function, Letters((*_of_tree(specs), BY_QUERY, by_key(key), *by_head), results)
    )


def of_parameters(spec: Spec) -> tuple[Dims, ...]:
    """The letters of the gradients of a prepared spec's parameters."""
    return tuple(map(_dims, parameter_letters(spec), parameters(spec)))


def _of_tree(tree: Any) -> list[Dims]:
    pairs = zip(jax.tree.leaves(axis_names(tree)), jax.tree.leaves(tree), strict=True)
    return [_dims(letters, leaf) for letters, leaf in pairs]


def _dims(letters: str, leaf: Any) -> Dims:
    """Of an array of a cache, or of a prepared spec, whose batch axis is one."""
    named = [x.lstrip("*") for x in letters.replace("#", "").split()]
    named = named[len(named) - leaf.ndim :] if named else [""] * leaf.ndim
    pairs = zip(named, leaf.shape, strict=True)
    # A symbolic size is not 1.
    return tuple(
        x if x in ("B", "N", "K") and not (isinstance(size, int) and size == 1) else ""
        for x, size in pairs
    )


# ---------------------------------------------------------------------------------------------
# What one device computes
# ---------------------------------------------------------------------------------------------


class _Cuts(NamedTuple):
    """The axes of a mesh along which letters are cut."""

    axes: dict[str, tuple[str, ...]]

    def of(self, letter: str) -> tuple[str, ...]:
        return self.axes.get("N" if letter == "K" else letter, ())

    def spec(self, dims: Dims) -> PartitionSpec:
        return PartitionSpec(*(self.of(x) or None for x in dims))

    def joined(self, x: jax.Array, dims: Dims) -> jax.Array:
        """A result of this device as one of all: summed over those whose rows or heads it is not
        cut along; of truths, whether all are."""
        own = {name for letter in dims for name in self.of(letter)}
        others = tuple(x for names in self.axes.values() for x in names if x not in own)
        if not others:
            return x
        if x.dtype == jnp.bool_:
            return lax.pmin(x.astype(jnp.int32), others) > 0
        return lax.psum(x, others)


_share: ContextVar[_Cuts | None] = ContextVar("share", default=None)


@contextlib.contextmanager
def _sharing(cuts: _Cuts) -> Iterator[None]:
    token = _share.set(cuts)
    try:
        yield
    finally:
        _share.reset(token)


def _at_share(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands with specs that know where this device's batch rows and heads begin."""
    cuts = _share.get()
    if cuts is None:
        return operands
    spec, per_query, *rest = operands
    rows, _, heads, _ = jax.tree.leaves(per_query)[0].shape
    b, h = (
        lax.axis_index(cuts.of(letter)) * size if cuts.of(letter) else 0
        for letter, size in (("B", rows), ("N", heads))
    )
    moved = jax.tree.map(
        lambda x: at_place(x, Place(b, h)), spec, is_leaf=lambda x: isinstance(x, Spec)
    )
    return moved, per_query, *rest


# ---------------------------------------------------------------------------------------------
# What the partitioner is told
# ---------------------------------------------------------------------------------------------


def may_be_cut(context: Any) -> bool:
    """Whether a program that is being lowered is for several devices, and cut by XLA."""
    axes = context.module_context.axis_context
    by_rule = getattr(jax.config, "jax_use_shardy_partitioner", True)
    several = isinstance(axes, ShardingContext) and axes.num_devices > 1
    return several and by_rule and axes.abstract_mesh is not None


def cut(
    function: Callable[..., Any],
    on_one_device: Callable[..., Any],
    letters: Letters,
    operands: Any,
    like: Any,
) -> Callable[..., Any]:
    """`function(platform, *flat)` as a call `(*flat)` that is partitioned.

    `on_one_device(*flat, function=, like=)` stages a function of this kind out as one operation,
    whose types know of no mesh. `operands` and `like` have the types of the operands and results.
    """
    sizes = _sizes(letters, operands)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in operands]

    def on_words(platform: str, *flat: Any) -> Any:
        pairs = zip(flat, operands, keys, strict=True)
        own = [
            jax.random.wrap_key_data(x, impl=str(y.dtype._impl.name)) if is_key else x
            for x, y, is_key in pairs
        ]
        return function(platform, *own)

    def partition(mesh: Any, given: Any, results: Any) -> Any:
        cuts = _chosen(letters, [*given, *results], sizes)

        def share(platform: str, *flat: Any) -> tuple[Any, ...]:
            with _sharing(cuts):
                found = on_words(platform, *flat)
            return tuple(map(cuts.joined, found, letters.results))

        shardings = [tuple(NamedSharding(mesh, cuts.spec(dims)) for dims in every) for every in own]
        shares = tuple(
            jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
            for sharding, x in zip(shardings[1], like, strict=True)
        )
        local = functools.partial(on_one_device, function=share, like=shares)
        return mesh, lambda *flat: tuple(local(*flat)), shardings[1], shardings[0]

    words = tuple(
        (*dims, "") if is_key else dims for dims, is_key in zip(letters.operands, keys, strict=True)
    )
    own = (words, letters.results)
    # Where a program is for several devices, nothing but the share of one is ever lowered.
    call = custom_partitioning(lambda *flat: tuple(jnp.zeros(x.shape, x.dtype) for x in like))
    call.def_partition(partition=partition, sharding_rule=_rule(Letters(*own), sizes))

    def on_all_devices(*flat: Any) -> tuple[Any, ...]:
        pairs = zip(flat, keys, strict=True)
        return call(*(jax.random.key_data(x) if is_key else x for x, is_key in pairs))

    return on_all_devices


def _sizes(letters: Letters, operands: Any) -> dict[str, int]:
    """The size of each letter."""
    return {
        letter: size
        for dims, x in zip(letters.operands, operands, strict=True)
        for letter, size in zip(dims, x.shape, strict=True)
        if letter
    }


def _chosen(letters: Letters, arrays: Any, sizes: dict[str, int]) -> _Cuts:
    """Along which axes each letter is cut: as the first array that is cut along it, if all arrays
    can be."""
    chosen: dict[str, tuple[str, ...]] = {}
    for dims, array in zip((*letters.operands, *letters.results), arrays, strict=True):
        spec = (*array.sharding.spec, *[None] * len(dims))
        for one, entry in zip(dims, spec, strict=False):
            letter = "N" if one == "K" else one
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            used = {x for others in chosen.values() for x in others}
            devices = math.prod(array.sharding.mesh.shape[x] for x in names)
            alike = ("N", "K") if letter == "N" else (letter,)
            fits = all(sizes[x] % devices == 0 for x in alike if x in sizes)
            if letter and names and letter not in chosen and fits and used.isdisjoint(names):
                chosen[letter] = names
    return _Cuts(chosen)


def _rule(letters: Letters, sizes: dict[str, int]) -> SdyShardingRule:
    """The letters as Shardy takes them; along all others nothing is cut."""
    group, alone = (sizes["N"] // sizes["K"] if "K" in sizes else 1), list[str]()

    def factor(letter: str) -> Any:
        if letter == "N" and group > 1:
            return CompoundFactor("k", "g")
        if letter:
            return {"N": "k", "K": "k"}.get(letter, letter.lower())
        alone.append(f"x{len(alone)}")
        return alone[-1]

    def mappings(every: tuple[Dims, ...]) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(factor, dims)) for dims in every)

    operands, results = mappings(letters.operands), mappings(letters.results)
    compound: dict[str, Any] = {"g": group} if group > 1 else {}
    return SdyShardingRule(operands, results, need_replication_factors=tuple(alone), **compound)
