"""Partitioning of a kernel's function under `jit`, when its arrays are sharded over devices.

Batch rows and heads are independent, so each device can compute its own. XLA's partitioner does not
see into a kernel, and would gather its operands. This file declares the letters of each array, and
what one device computes: the same function of its share, with the indices of the share's first
batch row and head. Gradients of arrays that all rows or heads share are summed.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.sharding_impls import ShardingContext
from jax.core import Tracer
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jattn._pytree import axis_names, split_letters
from jattn._types import Tree
from jattn.kernels.common.place import Place, at_place
from jattn.spec import Spec, parameter_letters, parameters


Dims = tuple[
    str, ...
]  # a letter for each axis: B, T, S, N, K, one for an axis that is mapped, or ""
BY_QUERY: Dims = ("B", "T", "N", "")
BY_HEAD: Dims = ("B", "N", "T", "")
RECEIVED: Dims = ("B", "N", "S")


class Letters(NamedTuple):
    """The letters of a function's flat operands and results.

    With `warns`, a warning is given if devices cannot share its tokens; one function of each call
    has it. With `sums`, a result that lacks a letter is the sum over the devices among which the
    letter is divided; else all of them compute the same.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    warns: bool = True
    sums: bool = True

    def mapped(self, axes: tuple[int | None, ...]) -> "Letters":
        """Returns the letters of the function mapped over these axes of its operands."""
        letter = f"M{sum(x[:1] == 'M' for x in self.results[0])}" if self.results else "M"
        operands = tuple(
            dims if axis is None else (*dims[:axis], letter, *dims[axis:])
            for dims, axis in zip(self.operands, axes, strict=True)
        )
        return self._replace(
            operands=operands, results=tuple((letter, *dims) for dims in self.results)
        )

    def without(self, letter: str) -> "Letters":
        """Returns the letters of the function when it is not sharded along a letter."""
        operands, results = (
            tuple(tuple("" if x == letter else x for x in dims) for dims in arrays)
            for arrays in (self.operands, self.results)
        )
        return self._replace(operands=operands, results=results)


def _first_and_second(per_query: Any, key: Any, *_: Any) -> tuple[Any, Any]:
    return jax.tree.leaves(per_query)[0], key


class Partitioned(NamedTuple):
    """A function of `(platform, spec, *operands)` and the letters of its arrays.

    `function` also computes one device's share. If queries are sharded,
    `choose(platform, spec, *operands)` instead returns the function that does, or raises
    NotImplementedError if there is none. `query_and_key(*operands)` returns the two arrays.
    """

    function: Callable[..., Any]
    letters: Letters
    choose: Callable[..., Callable[..., Any]] | None = None
    query_and_key: Callable[..., tuple[Any, Any]] = _first_and_second

    def __call__(self, platform: str, spec: Tree, *operands: Tree) -> Tree:
        share = _share.get()
        if share is None:
            return self.function(platform, spec, *operands)
        operands = (share.moved(spec, *self.query_and_key(*operands)), *operands)
        function = functools.partial(self.function, platform)
        if self.choose and share.of("T"):
            function = self.choose(platform, *operands)
        return () if share.is_trial else function(*operands)


def by_key(key: Array) -> Dims:
    """Returns the letters of keys or values; a single key head is not sharded, as all query heads
    read it."""
    return ("B", "S", "K" if key.shape[2] > 1 else "", "")


def partitioned(
    function: Callable[..., Any],
    choose: Callable[..., Any],
    like: Tree,
    operands: Tree,
    backward: bool,
) -> "Partitioned":
    """Partitions a function of an `AttentionVJP`: its backward function or, without `backward`, one
    for the forward pass. `like` and `operands` have the shapes of its results and operands."""
    spec, per_query, key, _, *rest = operands  # rest: all_finite and, if kept, the weights
    keys = by_key(key)
    rows = [BY_QUERY[: x.ndim] for x in jax.tree.leaves(per_query)]
    operand_dims = (*_of_tree(spec), *rows, keys, keys, *(BY_HEAD[: x.ndim] for x in rest))
    results = (BY_QUERY, BY_QUERY[:3], BY_QUERY[:3], (), BY_HEAD)[: len(jax.tree.leaves(like))]
    if backward:
        results = (*of_parameters(spec), BY_QUERY, keys, keys)
    return Partitioned(function, Letters(operand_dims, results, not backward), choose)


def partitioned_on_cache(
    function: Callable[..., Any], spec: Spec, query: Array, cache: Tree
) -> Callable[..., Any]:
    """Partitions a function of a spec, queries and a cache like these, but not along tokens.

    Its results are `out [B, T, N, V]` and a normalizer.
    """
    letters = Letters(
        (*_of_tree(spec), BY_QUERY, *_of_tree(cache, "BKS")), (BY_QUERY, BY_QUERY[:3], BY_QUERY[:3])
    )
    return Partitioned(function, letters.without("T"))


def partitioned_statistics(
    function: Callable[..., Any], results: tuple[Dims, ...], operands: tuple[Any, ...]
) -> Callable[..., Any]:
    """Partitions a function of specs, queries, keys and arrays by head like these."""
    specs, _, key, *rest = operands
    by_head = (BY_HEAD[: x.ndim] for x in jax.tree.leaves(rest))
    return Partitioned(
        function, Letters((*_of_tree(specs), BY_QUERY, by_key(key), *by_head), results)
    )


def partitioned_linear(function: Callable[..., Any], operands: tuple[Any, ...]) -> Partitioned:
    """Partitions `xla.linear.attend` with operands like these, but not along tokens."""
    _, key, _, log_decay, _ = operands
    query, K = ("B", "", "N", ""), "K" if key.shape[2] > 1 else ""
    keys, state = ("B", "", K, ""), (("B", K, "", ""), ("B", K, ""))
    logs = () if log_decay is None else (keys,)
    results = query, query[:3], *state
    letters = Letters((query, keys, keys, *logs, *state), results, sums=False)
    return Partitioned(lambda platform, _, *operands: function(platform, *operands), letters)


def partitioned_derivative(
    function: Callable[..., Any], operands: tuple[Any, ...], dims: list[Any], results: list[Dims]
) -> Callable[..., Any]:
    """Partitions a linear function of a spec, `AttentionInputs` and other trees like these.

    `dims` are the letters of the trees' leaves; leaves that are None stand for 0. The forward
    function, in the same program, gives the warnings.
    """
    spec, *trees = operands
    leaves = jax.tree.leaves(trees, is_leaf=lambda x: x is None)
    leaf_dims = (x for leaf, x in zip(leaves, dims, strict=True) if leaf is not None)
    letters = Letters((*_of_tree(spec), *leaf_dims), tuple(results), warns=False)
    return Partitioned(function, letters, None, lambda inputs, *_: (inputs.query, inputs.key))


def of_parameters(spec: Spec) -> tuple[Dims, ...]:
    """Returns the letters of the gradients of a prepared spec's parameters."""
    return tuple(map(_dims, parameter_letters(spec), parameters(spec)))


def _of_tree(tree: Tree, cuttable: str = "BTN") -> list[Dims]:
    pairs = zip(jax.tree.leaves(axis_names(tree)), jax.tree.leaves(tree), strict=True)
    return [_dims(letters, leaf, cuttable) for letters, leaf in pairs]


def _dims(letters: str, leaf: Array, cuttable: str = "BTN") -> Dims:
    """Returns the letters of an array of a cache, or of a prepared spec with one batch axis.

    Axes S of a spec's arrays have no letter, so that they are not sharded like the keys: such an
    array may have an axis T too.
    """
    named = [x.lstrip("*") for x in split_letters(letters)]
    named = named[len(named) - leaf.ndim :] if named else [""] * leaf.ndim
    pairs = zip(named, leaf.shape, strict=True)
    # A symbolic size is not 1.
    return tuple(
        x if x in cuttable and not (isinstance(size, int) and size == 1) else ""
        for x, size in pairs
    )


# ---------------------------------------------------------------------------------------------
# The share of one device
# ---------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """The share of a call that one device computes.

    axes: the axes of a mesh over which letters are sharded.
    begin: returns this device's first batch row, query or head, given its letter and the number on
        each device.
    is_trial: whether this is a trial, which only finds out whether the function can compute a
        share.
    """

    axes: dict[str, tuple[str, ...]]
    begin: Callable[[str, int], Any]
    is_trial: bool = False

    def of(self, letter: str) -> tuple[str, ...]:
        return self.axes.get("N" if letter == "K" else letter, ())

    def moved(self, spec: Any, query: Any, key: Any) -> Any:
        """Returns the tree of specs with the origin of this device's share."""
        rows, T, heads, _ = query.shape
        b, q, h = (
            self.begin(letter, size) if self.of(letter) else 0
            for letter, size in (("B", rows), ("T", T), ("N", heads))
        )
        place = Place(b, h)
        if self.of("T"):
            places, keys = (jnp.arange(x, dtype=jnp.int32) for x in (T, key.shape[1]))
            place = Place(b, h, q + places, keys, (T, 0), keys_from=0)
        is_spec = lambda x: isinstance(x, Spec)  # noqa: E731
        return jax.tree.map(lambda x: at_place(x, place), spec, is_leaf=is_spec)


_share: ContextVar[_Share | None] = ContextVar("share", default=None)


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """A context in which a variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _refusal(
    function: Callable[..., Any], platform: str, letters: Letters, operands: Tree
) -> str | None:
    """Returns why a function cannot be sharded along queries; None if it can."""

    def trial(begin: dict[str, Any], *flat: Any) -> None:
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(begin, ("any",))
        with setting(_share, _Share(axes, lambda x, _: begin[x], is_trial=True)):
            function(platform, *flat)

    place = jax.ShapeDtypeStruct((), jnp.int32)
    begin = {x: place for x in "BTN" if any(x in dims for dims in letters.operands)}
    try:
        jax.eval_shape(trial, begin, *operands)
    except NotImplementedError as reason:
        return str(reason)
    return None


# ---------------------------------------------------------------------------------------------
# The declarations for XLA's partitioner
# ---------------------------------------------------------------------------------------------


def may_be_cut(context: Any) -> bool:
    """Returns whether a program to lower is for several devices and partitioned by XLA."""
    axes = context.module_context.axis_context
    by_rule = getattr(jax.config, "jax_use_shardy_partitioner", True)
    several = isinstance(axes, ShardingContext) and axes.num_devices > 1
    return several and by_rule and _mesh_of(context) is not None


def _mesh_of(context: Any) -> Any:
    """Returns the mesh of a program, or else of the types of its arrays."""
    of_program = context.module_context.axis_context.abstract_mesh
    of_types = (x.sharding.mesh for x in context.avals_in)
    return of_program or next((x for x in of_types if not x.empty), None)


def with_prime_axes(context: Any) -> Any:
    """Returns the context with a mesh whose axes have prime sizes.

    XLA may shard key heads along a part of an axis, which has no name in the original mesh.
    """
    module, mesh = context.module_context, _mesh_of(context)
    axes = [axis for name, size in mesh.shape.items() for axis in _prime_axes(name, size)]
    names, sizes = zip(*axes, strict=True)
    # The program depends on the number of devices only, not on their identity.
    devices = module.axis_context.device_assignment or tuple(jax.devices()[: mesh.size])
    fine = ShardingContext(mesh.size, devices, AbstractMesh(sizes, names))
    return context.replace(module_context=module.replace(axis_context=fine))


def _prime_axes(name: str, size: int) -> Iterator[tuple[str, int]]:
    """Splits an axis into axes of prime sizes, the first of them outermost."""
    i = 0
    while size > 1:
        factor = next(n for n in range(2, size + 1) if size % n == 0)
        yield f"{name}:{i}", factor
        i, size = i + 1, size // factor


def cut(
    function: Callable[..., Any],
    on_one_device: Callable[..., Any],
    platform: str,
    letters: Letters,
    operands: Tree,
    like: Tree,
) -> Callable[..., Any]:
    """Returns `function(platform, *flat)` as a partitioned call `(*flat)`.

    `on_one_device(*flat, function=, like=)` stages a function of this kind out as one operation,
    whose types have no mesh. `operands` and `like` have the types of the operands and results.
    """
    sizes = _sizes(letters, operands)
    refusal = _refusal(function, platform, letters, operands) if "T" in sizes else None
    cuttable = letters.without("T") if refusal else letters
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in operands]

    def partition(mesh: Any, arrays: Any, results: Any) -> Any:
        axes = _chosen(cuttable, [*arrays, *results], _sizes(cuttable, operands))
        if letters.warns and (text := _idle(letters, arrays, axes, refusal)):
            warnings.warn(text, stacklevel=2)
        share = _Share(axes, lambda letter, size: lax.axis_index(axes[letter]) * size)
        pairs = zip(cuttable.results, results, strict=True)
        joins = [_Join.of(axes, dims, x, cuttable.sums) for dims, x in pairs]

        def of_one_device(platform: str, *flat: Any) -> tuple[Any, ...]:
            with setting(_share, share):
                outputs = function(platform, *map(_with_key, flat, operands))
            return tuple(join(x) for join, x in zip(joins, outputs, strict=True))

        cuts = [_spec(dims, share.axes) for dims in cuttable.operands]
        arrays = tuple(NamedSharding(mesh, x) for x in cuts)
        shardings = tuple(NamedSharding(mesh, x.spec) for x in joins)
        shares = tuple(
            jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
            for sharding, x in zip(shardings, like, strict=True)
        )
        local = functools.partial(on_one_device, function=of_one_device, like=shares)
        return mesh, lambda *flat: tuple(local(*flat)), shardings, arrays

    words = tuple(
        (*dims, "") if is_key else dims for dims, is_key in zip(letters.operands, keys, strict=True)
    )
    # In a program for several devices only the share of one device is ever lowered.
    call = custom_partitioning(lambda *flat: tuple(jnp.zeros(x.shape, x.dtype) for x in like))
    rule = _rule(Letters(words, letters.results), sizes)
    call.def_partition(partition=partition, sharding_rule=rule)

    def on_all_devices(*flat: Array) -> tuple[Any, ...]:
        pairs = zip(flat, keys, strict=True)
        return call(*(jax.random.key_data(x) if is_key else x for x, is_key in pairs))

    return on_all_devices


def _with_key(words: jax.Array, like: Any) -> jax.Array:
    """Returns the random keys that consist of these words, if `like` has the dtype of random keys;
    else `words` unchanged."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return words
    return jax.random.wrap_key_data(words, impl=str(like.dtype._impl.name))


def _sizes(letters: Letters, operands: Tree) -> dict[str, int]:
    """Returns the size of each letter."""
    return {
        letter: size
        for dims, x in zip(letters.operands, operands, strict=True)
        for letter, size in zip(dims, x.shape, strict=True)
        if letter
    }


def _spec(dims: Dims, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
    """Returns the sharding of an array along these letters."""
    return PartitionSpec(*(axes.get("N" if x == "K" else x) for x in dims))


def _cuts_of(dims: Dims, array: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the letters along which an array is sharded, and their mesh axes."""
    entries = (*array.sharding.spec, *[None] * len(dims))
    for letter, entry in zip(dims, entries, strict=False):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        if letter and names:
            yield letter, names


def _chosen(letters: Letters, arrays: Any, sizes: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Chooses each letter's mesh axes: those of the first array sharded along it, without the last
    ones if the letter's size is not divisible by all.

    All devices hold all keys: if only keys are sharded, queries are sharded like them.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    alike = {"K": "N", "S": "T"}
    for dims, array in zip((*letters.operands, *letters.results), arrays, strict=True):
        for name, names in _cuts_of(dims, array):
            letter, used = alike.get(name, name), {x for taken in chosen.values() for x in taken}
            both = [sizes[x] for x in (("N", "K") if letter == "N" else (letter,)) if x in sizes]
            fits = names
            while any(size % _devices(array, fits) for size in both):
                fits = fits[:-1]
            if fits and both and letter not in chosen and used.isdisjoint(fits):
                chosen[letter] = fits
    return chosen


def _devices(array: Any, names: tuple[str, ...]) -> int:
    """Returns the number of devices along these axes."""
    return math.prod(array.sharding.mesh.shape[x] for x in names)


def _cuts_of_tokens(letters: Letters, arrays: Any) -> set[str]:
    """Returns the axes over which tokens are sharded."""
    pairs = zip(letters.operands, arrays, strict=True)
    cuts = [x for dims, array in pairs for x in _cuts_of(dims, array)]
    return {x for letter, names in cuts if letter in ("T", "S") for x in names}


def _idle(
    letters: Letters, arrays: Any, axes: dict[str, tuple[str, ...]], refusal: str | None
) -> str | None:
    """Returns a warning if tokens are sharded but devices cannot share their work, else None."""
    shared = {x for used in axes.values() for x in used}
    names = _cuts_of_tokens(letters, arrays)
    unsplit = [{x.partition(":")[0] for x in axis_names} for axis_names in (names, shared)]
    idle = sorted(unsplit[0] - unsplit[1])
    if not idle:
        return None
    reason = refusal or "it cannot share these queries evenly"
    return (
        f"tokens are cut along {', '.join(map(repr, idle))} of the mesh, but each device there "
        f"computes attention of all of them: {reason}; jattn.parallel.attention, and "
        "jattn.parallel.cached_attention for a cache, share them among devices"
    )


def shared_tokens(query: Array, key: Array, value: Array) -> str | None:
    """Describes how devices share the tokens of arrays `[*B, tokens, heads, ...]` under `jit`.

    None if no sharding splits the tokens.
    """
    typed = [jax.typeof(x) if isinstance(x, Tracer) else x for x in (query, key, value)]
    shardings = [getattr(x, "sharding", None) for x in typed]
    named = [x for x in shardings if isinstance(x, NamedSharding) and not x.mesh.empty]
    if not named:
        return None
    whole = NamedSharding(named[0].mesh, PartitionSpec())
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if sharding in named else whole)
        for x, sharding in zip(typed, shardings, strict=True)
    ]
    batch = ("",) * (query.ndim - 3)
    keys = (*batch, "S", "K" if key.shape[-2] > 1 else "", "")
    letters = Letters(((*batch, *BY_QUERY[1:]), keys, keys), ())
    names = _cuts_of_tokens(letters, arrays)
    idle = _idle(letters, arrays, _chosen(letters, arrays, _sizes(letters, arrays)), None)
    if idle or not names:
        return idle
    return (
        f"cut along {', '.join(map(repr, sorted(names)))} of the mesh: each device computes its "
        "own queries, with a copy of all keys and values; jattn.parallel.attention cuts these too"
    )


class _Join(NamedTuple):
    """The combination of each device's result into the whole result, sharded by `spec`.

    Partial results are summed `over` these axes. Along the axes `scattered` each device then keeps
    its own keys only, which are at axis `keys`.
    """

    spec: PartitionSpec
    over: tuple[str, ...]
    scattered: tuple[str, ...]
    keys: int

    @classmethod
    def of(cls, axes: dict[str, tuple[str, ...]], dims: Dims, result: Any, sums: bool) -> "_Join":
        spec = _spec(dims, axes)
        result_axes = {x for letter in dims for x in axes.get("N" if letter == "K" else letter, ())}
        other_axes = (x for names in axes.values() for x in names if x not in result_axes)
        over = tuple(other_axes) if sums else ()
        wanted = dict(_cuts_of(dims, result)).get("S", ())
        keys = dims.index("S") if "S" in dims else 0
        if (
            not wanted
            or not set(wanted) <= set(over)
            or result.shape[keys] % _devices(result, wanted)
        ):
            return cls(spec, over, (), keys)
        spec = PartitionSpec(*spec[:keys], wanted, *spec[keys + 1 :])
        return cls(spec, tuple(x for x in over if x not in wanted), wanted, keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return lax.pmin(x.astype(jnp.int32), self.over) > 0 if self.over else x
        if self.scattered:
            x = lax.psum_scatter(x, self.scattered, scatter_dimension=self.keys, tiled=True)
        return lax.psum(x, self.over) if self.over else x


def _rule(letters: Letters, sizes: dict[str, int]) -> SdyShardingRule:
    """Returns the letters as a rule of the Shardy partitioner; no other axis is sharded."""
    group, unsharded = (sizes["N"] // sizes["K"] if "K" in sizes else 1), list[str]()

    def factor(letter: str) -> Any:
        if letter == "N" and group > 1:
            return CompoundFactor("k", "g")
        if letter:
            return {"N": "k", "K": "k"}.get(letter, letter.lower())
        unsharded.append(f"x{len(unsharded)}")
        return unsharded[-1]

    def mappings(arrays: tuple[Dims, ...]) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(factor, dims)) for dims in arrays)

    operands, results = mappings(letters.operands), mappings(letters.results)
    compound: dict[str, Any] = {"g": group} if group > 1 else {}
    return SdyShardingRule(operands, results, need_replication_factors=tuple(unsharded), **compound)
