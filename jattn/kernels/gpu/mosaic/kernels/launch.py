"""Launches of Mosaic GPU kernels, and the order in which their programs start.

The work of a kernel is divided into work items (part, b, h, i): block i of head (b, h), and the
tiles that the block visits or, if these are split, one part of them. A program computes one work
item, or several one after another.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import _explicit, softmax, tuning
from jattn._types import AnyArray, Index, Ref, Tree
from jattn.kernels.common import block_mask, reverse_mode, tile_schedule
from jattn.kernels.gpu.mosaic.machine.versions import interpreter, mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import later
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.spec import Shapes


_MAX_ITEMS = 2**16  # the most work items that are assigned to programs in advance
_GRID_NAMES = ("section", "rank", "unit")


class Order(NamedTuple):
    """The work items of a launch in the order in which they start.

    The blocks of a head that visit the most tiles start first, so that all programs end at about
    the same time; otherwise the last programs of a causal mask would run alone. The heads of a
    section start together: as many as have keys and values that fit the L2 cache.

    sizes: the number of batch rows and of heads.
    grid: the number of sections, of blocks of a head, and of units in a section. A unit is one part
        of one head.
    longest_first: the blocks in their order, `[B or 1, heads or 1, blocks]`; None for 0, 1, 2 and
        so on, if all blocks visit the same number of tiles.
    visited: the number of tiles that each block visits, `[B or 1, heads or 1, blocks]`.
    """

    sizes: tuple[int, int]
    grid: tuple[int, int, int]
    longest_first: Any
    visited: Any = None

    @classmethod
    def of(
        cls, problem: GPUProblem, visits: block_mask.BlockMask, heads: int, parts: int = 1
    ) -> "Order":
        """Returns the order of the work items for each block and each of `parts` of its tiles."""
        shapes, longest_first = problem.shapes, visits.longest_first(heads)
        units = parts * shapes.B * heads
        bytes_of_head = 2 * shapes.S * shapes.H * shapes.dtype.itemsize
        cached = 1 if longest_first is None else tuning.current().gpu_cached_bytes // bytes_of_head
        together = max(x for x in range(1, units + 1) if units % x == 0 and x <= max(1, cached))
        grid = units // together, problem.blocks[problem.by_key], together
        return cls((shapes.B, heads), grid, longest_first, visits.ends[..., 1])

    def place(self, index: tuple[Any, ...], longest_first: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the work item (part, b, h, i) at an index (section, rank, unit) of the grid."""
        section, rank, unit = index
        part_and_row, h = _split(section * np.int32(self.grid[2]) + unit, self.sizes[1])
        part, b = _split(part_and_row, self.sizes[0])
        if longest_first is None:
            return part, b, h, rank
        return part, b, h, longest_first[(*block_mask.clamped(longest_first, b, h), rank)]

    def rounds(self, programs: int) -> Any:
        """Assigns the work items to a number of programs: `[programs, rounds]`.

        A row lists the work items of one program by their flat index into the grid, and then −1.
        Each work item goes to the program that ends its others first. Its time is taken to be
        proportional to its number of tiles plus one. Returns None if there are no more work items
        than programs, if all visit the same number of tiles, or if the mask is not static.
        """
        items = math.prod(self.grid)
        static = isinstance(self.longest_first, np.ndarray)
        if not static or not programs < items <= _MAX_ITEMS:
            return None
        index = np.unravel_index(np.arange(items), self.grid)
        _, b, h, i = self.place(index, self.longest_first)
        tiles = self.visited[(*block_mask.clamped(self.visited, b, h), i)]
        ends, assigned = [(0, x) for x in range(programs)], [[] for _ in range(programs)]
        for item, count in enumerate(tiles.tolist()):
            time, program = ends[0]
            heapq.heapreplace(ends, (time + count + 1, program))
            assigned[program].append(item)
        rounds = max(map(len, assigned))
        return np.array([x + [-1] * (rounds - len(x)) for x in assigned], np.int32)


def launch(
    name: str, problem: GPUProblem, order: Order, kernel: Callable[..., Any], *rest: Tree
) -> list[Array]:
    """Runs `kernel(read_item, operands, results, scratch)` in one program for each work item.

    `read_item()` reads the work item (part, b, h, i). It is a function so that each warpgroup reads
    where it needs the numbers: if all warpgroups share them, they take up registers in each. For
    `rest` see `_launch`.
    """

    def kernel_of_item(longest_first: Ref | None, *refs: Tree) -> None:
        kernel(lambda: order.place(tuple(map(lax.axis_index, _GRID_NAMES)), longest_first), *refs)

    grid = zip(_GRID_NAMES, order.grid, strict=True)
    return _launch(name, problem, order.longest_first, grid, kernel_of_item, *rest)


def launch_in_rounds(
    name: str, problem: GPUProblem, order: Order, rounds: Any, kernel: Any, *rest: Any
) -> list[Array]:
    """Runs `kernel(fold_items, operands, results, scratch)` in programs with several work items.

    `fold_items(function, state)` folds `function(read_item, state)` over the work items of a
    program. `read_item(n)` reads (part, b, h, i) at that point of the program: an n that the
    compiler does not know, such as the number of a tile, keeps it from reading earlier, see
    `later`. n does not change the result.

    `rounds` are `Order.rounds`. If None, each program has one work item, and the device starts
    programs as others end. For `rest` see `_launch`.
    """
    if rounds is None:

        def kernel_of_item(read_item: Callable[[], Any], *refs: Ref) -> None:
            item = read_item()
            kernel(lambda function, state: function(lambda _: item, state), *refs)

        return launch(name, problem, order, kernel_of_item, *rest)

    def kernel_of_items(indices: Any, *refs: Any) -> None:
        longest_first, items_of_programs = indices

        def fold_step(function: Callable[[Any, Any], Any], i: Index, state: Tree) -> Any:
            def flat_index(n: Any) -> Any:
                return items_of_programs[lax.axis_index("program"), i + later(n)]

            def read_item(n: Any) -> Any:
                section, rest = _split(flat_index(n), order.grid[1] * order.grid[2])
                return order.place((section, *_split(rest, order.grid[2])), longest_first)

            compute = functools.partial(function, read_item)
            return lax.cond(flat_index(0) >= 0, compute, lambda x: x, state)

        def fold_items(function: Callable[[Any, Any], Any], state: Tree) -> Any:
            step = functools.partial(fold_step, function)
            return tile_schedule.repeat(0, rounds.shape[1], step, state)

        kernel(fold_items, *refs)

    indices, grid = (order.longest_first, rounds), [("program", rounds.shape[0])]
    return _launch(name, problem, indices, grid, kernel_of_items, *rest)


def _split(n: AnyArray, size: int) -> tuple[Any, Any]:
    """Returns quotient and remainder, as NumPy arrays if n is one."""
    if isinstance(n, np.ndarray):
        return np.divmod(n, size)
    return lax.div(n, np.int32(size)), lax.rem(n, np.int32(size))


def _launch(
    name: str,
    problem: GPUProblem,
    indices: Any,
    grid: Iterable[tuple[str, int]],
    kernel: Callable[..., Any],
    operands: Tree,
    results: Tree,
    scratch: Tree,
    warpgroups: int,
) -> list[Array]:
    """Runs `kernel(indices, operands, results, scratch)` in a program for each index of a grid.

    indices, operands: trees of arrays, which the kernel reads as references to global memory.
    grid: names and sizes of the axes.
    results: shapes and dtypes of the results.
    scratch: the shared memory and barriers of a program.
    warpgroups: the number of warpgroups of a program.

    On a CPU the kernel is interpreted.
    """
    names, sizes = zip(*grid, strict=True)
    arrays, over = reverse_mode.varying_alike(jax.tree.map(jnp.asarray, (indices, operands)))
    inputs, structure = jax.tree.flatten(arrays)

    def body(*refs: Any) -> None:
        n = len(inputs)
        kernel(*jax.tree.unflatten(structure, refs[:n]), refs[n:-1], refs[-1])

    call = mosaic().kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*x) for x in results],
        scratch_types=[scratch],
        grid=sizes,
        grid_names=names,
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=interpreter() if problem.unit.interpreted else False,
        compiler_params=mosaic().CompilerParams(
            approx_math=problem.approximate, lowering_semantics=mosaic().LoweringSemantics.Lane
        ),
    )
    return [_explicit.vary(over.varying, x) for x in call(*inputs)]


def forward_results(shapes: Shapes, parts: int, heads_first: bool = False) -> list[Any]:
    """Returns the shapes and dtypes of the output and the normalizer of each part of the keys.

    The two arrays of the normalizer are `[parts, B, N, T]`. The output is `[parts, B, T, N, V]` or,
    with `heads_first`, `[parts, B, N, T, V]`. It is in float32 if there are several parts, which
    are joined later.
    """
    by_head = parts, shapes.B, shapes.N, shapes.T
    out = (*by_head, shapes.V) if heads_first else (parts, shapes.B, shapes.T, shapes.N, shapes.V)
    dtype = jnp.float32 if parts > 1 else shapes.dtype
    return [(out, dtype), (by_head, jnp.float32), (by_head, jnp.float32)]


def joined(out: Array, maximum: Array, log_total: Array) -> tuple[Array, softmax.Normalizer]:
    """Joins the results of all parts of the keys to the output `[B, T, N, V]` and the normalizer
    `[B, T, N]`."""
    by_token = (jnp.swapaxes(x, 2, 3) for x in (maximum, log_total))
    return softmax.join(out, softmax.Normalizer(*by_token))
