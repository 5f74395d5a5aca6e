"""A conditional that stays a branch of the program when a call is mapped over a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from jattn._pytree import closure_converted
from jattn._types import Size, Tree


def unbatched_cond(
    ok: Array, yes: Callable[..., Any], no: Callable[..., Any], *arguments: Tree
) -> Tree:
    """`lax.cond` that stays a branch under `vmap`: one decision, `yes` only if all examples are ok.

    The branches may close over traced arrays; these become operands, because `vmap` may be applied
    after the trace in which this is called.
    """
    (run_yes, of_yes), (run_no, of_no) = (closure_converted(f, *arguments) for f in (yes, no))
    arrays = (of_yes, of_no)
    yes, no = lambda arrays, *x: run_yes(arrays[0], *x), lambda arrays, *x: run_no(arrays[1], *x)
    return _decided(ok, yes, no, arrays, *arguments)


def _decided(ok: Array, yes: Callable[..., Any], no: Callable[..., Any], *arguments: Tree) -> Tree:
    """`unbatched_cond` for branches that close over nothing traced."""

    @custom_vmap
    def decide(ok: Array, arguments: Tree) -> Tree:
        return lax.cond(ok, yes, no, *arguments)

    @decide.def_vmap
    def decide_for_all(size: Size, mapped: Tree, ok: Array, arguments: Tree) -> Tree:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped[1])
        all_yes, all_no = (jax.vmap(f, axes, axis_size=size) for f in (yes, no))
        results = _decided(jnp.all(ok), all_yes, all_no, *arguments)
        return results, jax.tree.map(lambda _: True, results)

    return decide(ok, arguments)
