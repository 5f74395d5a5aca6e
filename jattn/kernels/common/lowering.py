"""An operation whose program is chosen when it is lowered, for the platform it is lowered for.

While a program is traced it is not known where it will run: its arrays may lie on a CPU in a
process with a GPU, and `jax.export` lowers for other machines. So attention is staged out as one
operation, `platform_dependent`. Its function is traced when the program is lowered, and only for
the platforms that it is lowered for.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax._src.config import _check_vma as check_varying
from jax._src.core import Primitive
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jaxtyping import Array

from jattn._explicit import in_context_mesh
from jattn._types import Tree
from jattn.kernels.common import cached_programs, partition, reverse_mode
from jattn.kernels.common.custom_derivative import (
    none_for_zero,
    register_eager_run,
    wide_types_for,
)
from jattn.kernels.common.partition import setting


PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "other")
"""The names of platforms for `platform_dependent`; "other" stands for all that have no name."""


class _Settings(NamedTuple):
    """The parts of JAX's configuration that affect how a function is traced."""

    enable_x64: bool
    default_matmul_precision: str | None
    numpy_dtype_promotion: str
    numpy_rank_promotion: str

    @classmethod
    def current(cls) -> "_Settings":
        return cls(*(getattr(jax.config, f"jax_{name}") for name in cls._fields))

    def restored(self) -> ExitStack:
        """Returns a context in which these settings hold again."""
        stack = ExitStack()
        for name, value in self._asdict().items():
            stack.enter_context(getattr(jax, name)(value))
        return stack


def default_settings() -> ExitStack:
    """Returns a context for JAX's own code, which does not trace under all settings."""
    precision = _Settings.current().default_matmul_precision
    return _Settings(False, precision, "standard", "allow").restored()


_exported = ContextVar("exported", default=False)


def exported() -> bool:
    """Returns whether the program that is being lowered will be exported, and may run elsewhere."""
    return _exported.get()


class LinearRules(NamedTuple):
    """The rules of an operation that is linear in its last operand, a tree.

    transpose(rest, cotangents) -> cotangents of the last operand, from those of all results; None
        stands for 0. `rest` are the other operands. Cotangents of operands that are None are
        ignored.
    derivative(rest, last, d_rest, d_last) -> tangents of the results, if some of the `rest` have
        tangents; None stands for 0.
    """

    transpose: Callable[..., Any]
    derivative: Callable[..., Any]


class _FlatRules(NamedTuple):
    """`LinearRules` for flat operands, in whose `last` ones the operation is linear."""

    last: int
    transpose: Callable[..., list[Any]]
    derivative: Callable[..., list[Any]]


_operation = Primitive("jattn_platform_dependent")
# The same operation for arrays whose types have a mesh.
_on_mesh = Primitive("jattn_platform_dependent_on_mesh")
for _primitive in (_operation, _on_mesh):
    _primitive.multiple_results = True
# `partition` needs the mesh, so `_operation` requires devices. JAX then requires one mesh for all
# arrays of a program. In a backward pass that is not compiled, arrays whose types have a mesh may
# have several meshes: for these arrays `_on_mesh` does not require devices.
prim_requires_devices_during_lowering.add(_operation)


def _stage(*flat: Array, **how: Any) -> list[Array]:
    """Binds the operation to these operands."""
    meshes = (jax.typeof(x).sharding.mesh for x in flat)
    is_typed = any(not x.empty and not x.manual_axes for x in meshes)
    return (_on_mesh if is_typed else _operation).bind(*flat, **how)


def platform_dependent(function: Callable[..., Any], like: Tree, *operands: Tree) -> Tree:
    """Computes `function(platform, *operands)`, for the platform that the program is lowered for.

    Args:
        function: closes over nothing traced.
        like: a tree of values with the shapes and dtypes of the results.
        operands: trees of arrays.

    Derivatives raise NotImplementedError: the caller has to define them.
    """
    return linear(function, like, None, *operands)


def linear(
    function: Callable[..., Any], like: Tree, rules: LinearRules | None, *operands: Tree
) -> Tree:
    """Computes `platform_dependent` of a function that is linear in its last operand.

    The `rules` give it derivatives in every mode.
    """
    flat, structure = jax.tree.flatten(operands)
    shapes, results = jax.tree.flatten(like)
    with wide_types_for(flat):
        leaves = _stage(
            *flat,
            function=functools.partial(_on_leaves, function, structure),
            like=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes),
            settings=_Settings.current(),
            linear=rules and _flat_rules(rules, results, operands[:-1], operands[-1]),
        )
    return jax.tree.unflatten(results, leaves)


def _flat_rules(rules: LinearRules, results: Any, rest: Tree, last: Tree) -> _FlatRules:
    """Returns rules for flat operands and results, from rules for trees like these.

    `results` is the structure of the results.
    """
    rest_structure, last_structure = jax.tree.structure(rest), jax.tree.structure(last)
    is_given = [x is not None for x in jax.tree.leaves(last, is_leaf=lambda x: x is None)]

    def transpose(rest: list[Any], cotangents: list[Any]) -> list[Any]:
        of_results = jax.tree.unflatten(results, cotangents)
        cotangent = rules.transpose(jax.tree.unflatten(rest_structure, rest), of_results)
        leaves = jax.tree.leaves(cotangent, is_leaf=lambda x: x is None)
        return [x for x, is_wanted in zip(leaves, is_given, strict=True) if is_wanted]

    def derivative(rest: Any, last: Any, d_rest: Any, d_last: Any) -> list[Any]:
        structures = (rest_structure, last_structure) * 2
        trees = zip(structures, (rest, last, d_rest, d_last), strict=True)
        return jax.tree.leaves(rules.derivative(*(jax.tree.unflatten(*x) for x in trees)))

    return _FlatRules(last_structure.num_leaves, transpose, derivative)


def _on_leaves(function: Callable[..., Any], structure: Any, platform: str, *flat: Any) -> Tree:
    return jax.tree.leaves(function(platform, *jax.tree.unflatten(structure, flat)))


def _lower(
    platform: str,
    context: Any,
    *values: Any,
    function: Callable[..., Any],
    like: Tree,
    settings: _Settings,
    linear: Any,
) -> Tree:
    """Traces the function and writes its operations into the program."""

    exported = context.module_context.lowering_parameters.for_export

    def run(*flat: Array) -> Tree:
        # Each device of a `shard_map` runs this, so that the axes over which arrays vary no longer
        # matter; with the check Pallas would require each kernel to declare them.
        with settings.restored(), setting(_exported, exported), check_varying(False):
            results = function(platform, *flat)
        assert [(x.ndim, x.dtype) for x in results] == [(x.ndim, x.dtype) for x in like]
        return results

    local = [ShapedArray(x.shape, x.dtype) for x in context.avals_in]
    untyped = AbstractMesh((), ())  # types within one device's program have no mesh
    digest = None
    if not exported and partition.may_be_cut(context) and (letters := _letters(function)):
        one_device = functools.partial(_operation.bind, settings=settings, linear=None)
        context = partition.with_prime_axes(context)
        axes = context.module_context.axis_context.abstract_mesh
        with use_abstract_mesh(untyped):
            digest = cached_programs.digest(run, platform, local, letters, axes)
        with settings.restored():
            run = partition.cut(function, one_device, platform, letters, local, like)
    with use_abstract_mesh(untyped):
        results = mlir.lower_fun(run)(context.replace(avals_in=local), *values)
    if digest:
        cached_programs.rename(context, results, digest)
    return results


def _letters(function: Any) -> partition.Letters | None:
    """Returns the letters of an operation's flat operands and results, if it can be partitioned."""
    if function.func is _on_leaves:
        return getattr(function.args[0], "letters", None)
    inner, axes, _ = function.args
    letters = _letters(inner)
    return letters and letters.mapped(axes)


def _types(*operands: Any, like: Tree, **_: Any) -> list[Any]:
    """Returns the results' types, which vary over the operands' axes within `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return [ShapedArray(x.shape, x.dtype) for x in like]
    axes = frozenset[str]().union(*(x.manual_axis_type.varying for x in operands))
    over = type(operands[0].manual_axis_type)(varying=axes)

    def type_of(x: Any) -> Any:
        everywhere = NamedSharding(mesh, PartitionSpec(*[None] * len(x.shape)))
        return ShapedArray(x.shape, x.dtype, sharding=everywhere, manual_axis_type=over)

    return [type_of(x) for x in like]


def _batch(
    operands: Any,
    axes: Any,
    *,
    function: Callable[..., Any],
    like: Tree,
    settings: _Settings,
    linear: _FlatRules | None,
) -> Tree:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    if linear:
        # Each example gets its own last operands, so that each has its own cotangent.
        n = len(operands) - linear.last
        last = [
            batching.bdim_at_front(x, a, size) for x, a in zip(operands[n:], axes[n:], strict=True)
        ]
        operands, axes = [*operands[:n], *last], [*axes[:n], *[0] * linear.last]
        linear = _mapped_rules(linear, axes[:n], size)
    results = _stage(
        *operands,
        function=functools.partial(_mapped, function, tuple(axes), size),
        like=tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in like),
        settings=settings,
        linear=linear,
    )
    return results, [0] * len(results)


def _mapped_rules(linear: _FlatRules, axes: list[Any], size: int) -> _FlatRules:
    """Returns the rules of a mapped operation.

    The other operands are mapped along `axes`, everything else along the first axis. None stays
    None.
    """
    transpose = jax.vmap(linear.transpose, (axes, 0), axis_size=size)
    derivative = jax.vmap(linear.derivative, (axes, 0, axes, 0), axis_size=size)
    return _FlatRules(linear.last, transpose, derivative)


def _mapped(
    function: Callable[..., Any], axes: Tree, size: int, platform: str, *flat: Array
) -> Tree:
    # If the operation is partitioned, `flat` has a share of the examples only.
    size = next((x.shape[a] for x, a in zip(flat, axes, strict=True) if a is not None), size)
    return jax.vmap(functools.partial(function, platform), axes, axis_size=size)(*flat)


def _jvp(operands: Tree, tangents: Tree, *, linear: _FlatRules | None, **how: Any) -> Any:
    if linear is None:
        reverse_mode.refuse()
    results = _stage(*operands, linear=linear, **how)
    n = len(operands) - linear.last
    nonzero = none_for_zero(tangents)
    if any(x is not None for x in nonzero[:n]):
        rest, last = list(operands[:n]), list(operands[n:])
        return results, linear.derivative(rest, last, nonzero[:n], nonzero[n:])
    last = [ad.instantiate_zeros(x) for x in tangents[n:]]
    return results, _stage(*operands[:n], *last, linear=linear, **how)


def _transpose(cotangents: Tree, *operands: Any, linear: _FlatRules, **_: Any) -> list[Any]:
    n = len(operands) - linear.last
    arguments = list(operands[:n]), [ad.instantiate_zeros(x) for x in cotangents]
    results = linear.transpose(*in_context_mesh(arguments))
    wanted = map(ad.is_undefined_primal, operands[n:])
    return [None] * n + [x if want else None for x, want in zip(results, wanted, strict=True)]


for _primitive in (_operation, _on_mesh):
    _primitive.def_abstract_eval(_types)
    register_eager_run(_primitive)
    batching.primitive_batchers[_primitive] = _batch
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    for _platform in PLATFORMS:
        _only = None if _platform == "other" else _platform
        _rule = functools.partial(_lower, _platform)
        mlir.register_lowering(_primitive, _rule, platform=_only)
