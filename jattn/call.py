"""`Call`: the checked arguments of a call of attention, for the registry and the kernels.

`make` checks the arguments and raises errors before anything is compiled. An error message contains
the argument's name, the expected shape, in axis names and in numbers, and the shape passed. Masks
and score functions check their own arguments when they are made; `registry` checks the names of
implementations. `compiled` compiles a function of a call. `Call.prepared` converts a call for
kernels, and `Call.finish` converts their results for users.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn._pytree import (
    array_field,
    axis_names,
    flatten_batch,
    is_static,
    node_classes,
    pytree_dataclass,
    split_letters,
    static_field,
)
from jattn._types import Output, Shape, Size, Tree, accumulation
from jattn.cache import Cache
from jattn.checks import (
    canonical,
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
from jattn.masks import Blocks, Predicate, as_mask
from jattn.masks import Tree as TreeMask
from jattn.normalizers import (
    Identity,
    PointwiseNormalizer,
    SoftmaxPlusOne,
    as_normalizer,
)
from jattn.options import WeightOptions
from jattn.scores import Score, Then, as_score
from jattn.softmax import Normalizer, join_sink, sink_by_head
from jattn.spec import (
    AsScore,
    Shaped,
    Shapes,
    Spec,
    copy_numpy_arrays,
    parameters,
    with_parameters,
)


@pytree_dataclass
class Call:
    """A checked call of attention.

    spec: the mask, score function and other options that define what is computed.
    shapes: the sizes of query, key and value.
    sink: `[N]`, a logit for each head that joins the softmax, or None.
    overflowed: a traced boolean, true if a position does not fit int32, which makes results NaN;
        None if all are known to fit.
    implementation: the name of the implementation that has to run, or None.
    lse: whether the log of the denominator is returned too.
    transient: whether a function of the spec may be needed by this call only, because it reads
        something that may change, see `compiled`.
    parameter_dtypes: in a prepared call, the dtypes in which the user passed the spec's parameters.
    """

    spec: Spec
    shapes: Shapes = static_field()
    sink: Any = array_field("N", default=None)
    overflowed: Any = None
    implementation: str | None = static_field(default=None)
    lse: bool = static_field(default=False)
    transient: bool = static_field(default=False)
    parameter_dtypes: tuple[Any, ...] = static_field(default=())

    @property
    def needs_lse(self) -> bool:
        """Whether the call uses the log of the denominator."""
        return self.lse or self.sink is not None

    def prepared(self) -> "Call":
        """Returns the call for kernels: its arrays have one batch axis. Parameters are cast to the
        accumulation dtype, in which scores are computed and their gradients summed."""
        params, dtype = parameters(self.spec), accumulation(self.shapes.dtype)
        spec = with_parameters(self.spec, [x.astype(dtype) for x in params])
        spec = flatten_batch(spec, self.shapes.batch)
        dtypes = tuple(x.dtype for x in params)
        return dataclasses.replace(self, spec=spec, parameter_dtypes=dtypes)

    def flattened(self, *arrays: Array) -> list[Array]:
        """Reshapes queries `[*B, T, N, H]`, keys or values to one batch axis."""
        return [x.reshape(self.shapes.B, *x.shape[-3:]) for x in arrays]

    def unflattened(self, results: Tree) -> Tree:
        """Reshapes results from `[B, ...]` to `[*B, ...]`; all NaN if a position overflowed."""

        def reshaped(result: Array) -> Array:
            result = result.reshape(*self.shapes.batch, *result.shape[1:])
            if self.overflowed is None or not jnp.issubdtype(result.dtype, jnp.floating):
                return result
            return jnp.where(self.overflowed, jnp.nan, result)

        return jax.tree.map(reshaped, results)

    def sink_as_normalizer(self) -> "Call":
        """Turns the sink of 0 that `make` sets for `SoftmaxPlusOne` back into this normalizer.

        Functions without the option `sink`, which compute the weights of whole rows, need that.
        """
        if self.sink is None:
            return self
        spec = dataclasses.replace(self.spec, normalizer=SoftmaxPlusOne())
        return dataclasses.replace(self, spec=spec, sink=None)

    def finish(self, out: Output, normalizer: Normalizer) -> Any:
        """Returns the call's results, `out` or `(out, lse)`, from `out [B, T, N, V]` and the
        normalizer `[B, N, T]`, both without the sink."""
        return self.with_sink(*self.unflattened((out, normalizer)))

    def with_sink(self, out: Output, normalizer: Normalizer) -> Any:
        """Returns the call's results from `out [*B, T, N, V]` and the normalizer `[*B, N, T]`, both
        without the sink."""
        if self.sink is not None:
            out, normalizer = join_sink(out, normalizer, self.sink)
        return (out, normalizer.lse) if self.lse else out


def make(
    query: Any,
    key: Any,
    *values: Any,
    lse: bool = False,
    implementation: str | None = None,
    shards: int = 1,
    **options: Unpack[WeightOptions],
) -> Call:
    """Checks the arguments of a call and makes a `Call` of them.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`, or a cache.
        values: one array, `[*B, S, K, V]`. It is left out in a call without values, and left out or
            None if `key` is a cache.
        lse: the argument `return_lse`.
        implementation: the name of the implementation that has to run, or None.
        shards: if this call is one device's part of a larger call, the number of devices over which
            T and S of the larger call are sharded; else 1.
        options: the options of `attention`.

    Raises TypeError and ValueError, naming the argument.
    """
    if isinstance(key, Cache):
        shapes, options = _cache_arguments(query, key, *values, **options)
    elif values and values[0] is None:
        raise TypeError("value: expected an array [*B, S, K, V] to go with key, got None")
    else:
        shapes = check_shapes(query, key, *values)
    check_flag("return_lse", lse)
    return of_shapes(shapes, shards, bool(lse), implementation, **options)


def of_shapes(
    shapes: Shapes,
    shards: int = 1,
    lse: bool = False,
    implementation: str | None = None,
    **options: Unpack[WeightOptions],
) -> Call:
    """Checks the options of a call of the given sizes and makes its `Call`, see `make`."""
    q_positions, q_outside = _positions("q_positions", "[*B, T]", options.get("q_positions"))
    kv_positions, kv_outside = _positions("kv_positions", "[*B, S]", options.get("kv_positions"))
    dropout_key = options.get("dropout_key")
    rate = _check_dropout(options.get("dropout_rate", 0.0), dropout_key)
    precision, sink = options.get("precision"), options.get("sink")
    normalizer = as_normalizer(options.get("normalizer"))
    if isinstance(normalizer, SoftmaxPlusOne):
        if sink is not None:
            raise ValueError("sink: expected None with SoftmaxPlusOne, which is a sink of 0")
        normalizer, sink = None, 0.0
    if normalizer is not None:
        normalizer = normalizer.for_keys(shapes.S * shards)
        _check_softmax(normalizer, return_lse=lse, sink=sink)
    check_precision("precision", precision)
    mask, score = as_mask(options.get("mask")), as_score(options.get("score"))
    spec = Spec(
        mask=mask,
        score=score,
        scale=checked_scale(options.get("scale"), shapes.H),
        q_positions=q_positions,
        kv_positions=kv_positions,
        dropout_key=dropout_key if rate else None,
        dropout_rate=rate,
        precision=precision,
        normalizer=normalizer,
        classes=node_classes((mask, score, normalizer)),
    )
    _check_leaves(spec, shapes, shards)
    if isinstance(normalizer, PointwiseNormalizer):
        weigh = AsScore(normalizer)
        score = weigh if spec.score is None else Then(spec.score, weigh)
        spec = dataclasses.replace(spec, score=score, normalizer=Identity())
    spec, transient = _with_traced_functions(spec, shapes)
    spec, sink = copy_numpy_arrays((spec, sink))
    sink = None if sink is None else sink_by_head("sink", sink, shapes.N)
    overflowed = _either(q_outside, kv_outside)
    return Call(spec, shapes, sink, overflowed, implementation, lse, transient)


def _cache_arguments(
    query: Any, cache: Cache, value: Any = None, **options: Unpack[WeightOptions]
) -> tuple[Shapes, WeightOptions]:
    """Returns the sizes of a call on a cache, and its options with the cache's mask and positions
    added."""
    for name, argument in (("value", value), ("kv_positions", options.get("kv_positions"))):
        if argument is not None:
            raise ValueError(
                f"{name}: expected None in a call on a cache, which has its own, got an array"
            )
    check_array("query", query, "[*B, T, N, H]")
    B, K, S = cache.lengths.shape[0], cache.num_kv_heads, cache.capacity
    sizes = (cache.keys.shape[-1], cache.value_size)
    keys, values = (jax.ShapeDtypeStruct((B, S, K, size), query.dtype) for size in sizes)
    shapes = check_shapes(query, keys, values)
    mask = options.get("mask")
    if mask is None:
        options["mask"] = cache.mask()
    else:
        mask = as_mask(mask)
        # The mask is checked before it is combined with the cache's, so that an error names the
        # path in the mask that the user passed.
        _check_leaves(Spec(mask, None, 1.0, None, None), shapes, 1, cached=True)
        parts = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, TreeMask))
        if any(isinstance(x, TreeMask) for x in parts):
            _check_order("mask: masks.Tree", cache)
        options["mask"] = cache.mask() & mask
    normalizer = as_normalizer(options.get("normalizer"))
    if normalizer is not None:
        if normalizer.needs_order:
            _check_order(f"normalizer: {type(normalizer).__name__}", cache)
        options["normalizer"] = normalizer.for_keys(None)
    options["kv_positions"] = cache.kv_positions
    if options.get("q_positions") is None:
        options["q_positions"] = cache.last_positions(shapes.T)
    return shapes, options


def _check_order(name: str, cache: Cache) -> None:
    """Raises NotImplementedError if the cache does not store tokens in order."""
    if not cache.slots_in_order:
        raise NotImplementedError(
            f"{name} needs slots in the order of tokens, unlike those of a {type(cache).__name__} "
            "that overwrites old tokens; use a DenseCache or a PagedCache"
        )


# --- checks -------------------------------------------------------------------------------------


def check_shapes(query: Shaped, key: Shaped, value: Shaped | None = None) -> Shapes:
    """Returns the sizes of `query [*B, T, N, H]`, `key [*B, S, K, H]`, `value [*B, S, K, V]`.

    Raises TypeError for wrong or different dtypes and ValueError for shapes that do not match.
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
            f"key: expected [*B, S, K, H] whose number of heads K divides the number of heads N of "
            f"query [*B, T, N, H], got K = {K} in {list(key.shape)}, N = {N} in {list(query.shape)}"
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
    return Shapes(tuple(batch), T, S, N, K, H, V, canonical(query.dtype))


def _check_softmax(normalizer: Any, **softmax_options: Any) -> None:
    """Raises ValueError for options that only a softmax has."""
    for name, value in softmax_options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name}: expected no {name} with the normalizer {type(normalizer).__name__}, as "
                "only a softmax has a log-sum-exp and sinks"
            )


def _check_dropout(rate: Any, key: Any) -> float:
    check_rate("dropout_rate", rate)
    if rate > 0 or key is not None:
        if key is None:
            raise ValueError(f"dropout_key: needed for dropout_rate = {float(rate)}, got None")
        check_key("dropout_key", key)
    return float(rate)


def checked_scale(scale: Any, H: int) -> Any:
    if scale is None:
        return 1 / math.sqrt(H)
    if hasattr(scale, "dtype") or is_static(scale):
        check_number("scale", scale, per_head=True)
    else:
        raise TypeError(f"scale: expected a number or a float array, got {shown(scale)}")
    return float(scale) if isinstance(scale, int | float | np.number) else scale


def _fits(axis_name: str, size: Size, wanted: Size | None) -> bool:
    """Returns whether an axis has the wanted size, or size 1 if its name has the mark `#`."""
    return wanted is None or size == wanted or (axis_name.startswith("#") and size == 1)


def _check_axes(
    path: str, letters: str, shape: Shape, shapes: Shapes, shards: int, cached: bool
) -> None:
    """Raises ValueError unless an array whose axes are declared as `letters` fits the call.

    Axes other than B, T, S and N (of table rows or layout cells) may have any size. If the call is
    one of several shards, an array with both axes T and S holds the keys of all shards.
    """
    declared = letters.split()
    has_queries = "T" in split_letters(letters)
    sizes = {"T": shapes.T, "S": shapes.S * shards if has_queries else shapes.S, "N": shapes.N}
    trailing = [x for x in declared if "*" not in x]
    batch = shapes.batch if len(trailing) < len(declared) else ()
    broadcast_mark = "#" if "*#B" in declared else ""
    axes = [(f"{broadcast_mark}B", size) for size in batch]
    axes += [(x, sizes.get(x.lstrip("#"))) for x in trailing]
    if not broadcast_mark and len(shape) == len(trailing):  # shared by the whole batch
        axes = axes[len(batch) :]
    fits = len(axes) == len(shape) and all(
        _fits(name, got, want) for (name, want), got in zip(axes, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(declared).replace("#", "")
        wanted = ", ".join("any" if want is None else str(want) for _, want in axes)
        note = " (axes of size 1 broadcast)" if "#" in letters else ""
        advice = _axes_to_add(path, axes, shape) if broadcast_mark else ""
        if cached and declared[-1].endswith("S") and shape[-1:] not in ((1,), (shapes.S,)):
            advice = (
                "; S is the cache's capacity: to leave padding out of the cache, write "
                "valid=attention_mask.astype(bool) where tokens are appended"
            )
        raise ValueError(
            f"{path}: expected [{expected}] = [{wanted}]{note}, got {list(shape)}{advice}"
        )


def _axes_to_add(path: str, axes: list[tuple[str, Any]], shape: Shape) -> str:
    """Returns advice how to index an array that lacks some of `axes`, each a name and a size, so
    that it fits; "" if there is none. Ways that add only leading axes come first."""
    suggestions = []
    for subset in itertools.combinations(reversed(range(len(axes))), len(shape)):
        present = sorted(subset)
        if all(_fits(axes[i][0], n, axes[i][1]) for i, n in zip(present, shape, strict=True)):
            index = [":" if i in present else "None" for i in range(len(axes))]
            while index and index[-1] == ":":
                index.pop()
            suggestions.append(f"{path.rpartition('.')[2]}[{', '.join(index)}]")
    if len(shape) >= len(axes) or not suggestions:
        return ""
    return f"; write {' or '.join(suggestions[:2])}"


def _check_leaves(spec: Spec, shapes: Shapes, shards: int, *, cached: bool = False) -> None:
    """Raises ValueError if an array of mask, score or positions does not fit the call.

    In `cached` calls the error about a wrong S says how padding is left out of a cache.
    """
    if not jax.tree.leaves(spec):
        return
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    for (path, leaf), letters in zip(leaves, jax.tree.leaves(axis_names(spec)), strict=True):
        if letters:
            name = jax.tree_util.keystr(path).lstrip(".")
            _check_axes(name, letters, np.shape(leaf), shapes, shards, cached)
    for mask in jax.tree.leaves(spec.mask, is_leaf=lambda x: isinstance(x, Blocks)):
        if isinstance(mask, Blocks):
            mask.check_block_counts(shapes.T * shards, shapes.S * shards)


def _positions(name: str, letters: str, value: Any) -> tuple[Any, Any]:
    """Returns positions as int32, and a traced boolean that is true if a position does not fit
    int32; None in its place if all are known to fit."""
    if value is None:
        return None, None
    check_array(name, value, letters, "integer")
    return integers.positions(name, value)


def _either(a: Any, b: Any) -> Any:
    """Returns `a | b` for traced booleans; either may be None, which stands for False."""
    return b if a is None else a if b is None else a | b


# --- compilation --------------------------------------------------------------------------------


def _is_function(x: Any) -> bool:
    return isinstance(x, Predicate | Score)


def _with_traced_functions(spec: Spec, shapes: Shapes) -> tuple[Spec, bool]:
    """Returns the spec with users' functions traced, and whether any of them is transient.

    The spec is part of the key by which JAX looks up compiled programs. So users' functions are
    replaced by programs, which no longer change, and functions with equal programs by one object.
    """
    dtype, functions = accumulation(shapes.dtype), []

    def traced(x: Any) -> Any:
        if not _is_function(x):
            return x
        x = x.traced() if isinstance(x, Predicate) else x.traced(dtype)
        functions.extend((x.fn, getattr(x, "bounds_fn", None)))
        return x

    spec = jax.tree.map(traced, spec, is_leaf=_is_function)
    return spec, any(map(is_transient, functions))


# The largest number of jitted functions for transient calls that `compiled` keeps for a function.
_MOST_TRANSIENT = 64


def compiled(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator like `jax.jit` for a function whose first argument is a `Call`.

    `static` are the names of static arguments. The function is compiled even under
    `jax_disable_jit`: NaN and infinities of masked pairs then remain inside the program, where
    JAX's debugging flags do not find them.

    A jitted function keeps its programs, one for each structure of its arguments. Transient calls
    may have a new structure each time. So each structure gets a jitted function of its own. The
    `_MOST_TRANSIENT` that were used last are kept, and JAX frees the programs of the others.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        shared_jit = jax.jit(function, static_argnames=static)

        @functools.lru_cache(maxsize=_MOST_TRANSIENT)
        def jit_of_structure(structure: Any) -> Any:
            @functools.wraps(function)
            def run_leaves(leaves: Any, *arguments: Any, **options: Any) -> Any:
                return function(jax.tree.unflatten(structure, leaves), *arguments, **options)

            return jax.jit(run_leaves, static_argnames=static)

        def jitted_function(call: Call) -> tuple[Any, Any]:
            """Returns a jitted function and its first argument: the call, or the call's leaves."""
            if not call.transient:
                return shared_jit, call
            leaves, structure = jax.tree.flatten(call)
            return jit_of_structure(structure), leaves

        @functools.wraps(function)
        def run_compiled(call: Call, *arguments: Any, **options: Any) -> Any:
            jitted, first_argument = jitted_function(call)
            if not getattr(jax.config, "jax_disable_jit", False):
                return jitted(first_argument, *arguments, **options)
            with jax.disable_jit(False):
                return jitted(first_argument, *arguments, **options)

        def lower(call: Call, *arguments: Any, **options: Any) -> Any:
            jitted, first_argument = jitted_function(call)
            return jitted.lower(first_argument, *arguments, **options)

        setattr(run_compiled, "lower", lower)  # noqa: B010
        return run_compiled

    return decorate
