"""Launches programs of warpgroups, in an order, over the places of a grid."""

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


_MAX_PLACES = 2**16  # for which rounds are computed in advance


_NAMES = ("section", "rank", "unit")  # of the axes of a grid


class Order(NamedTuple):
    """The programs (part, b, h, i) of a launch in the order in which they start.

    Programs that visit most tiles start first, so that all end at about the same time; otherwise
    the last programs of a causal mask would run alone. Heads start together if the L2 cache holds
    their keys and values.
    """

    sizes: tuple[int, int]  # batch rows, heads of each
    grid: tuple[int, int, int]  # sections, blocks of each head, consecutive heads of a section
    longest_first: Any  # the blocks, [B or 1, heads or 1, blocks]; None if all are equally long
    visited: Any = None  # the number of tiles, [B or 1, heads or 1, blocks], for rounds

    @classmethod
    def of(
        cls, problem: GPUProblem, visits: block_mask.BlockMask, heads: int, parts: int = 1
    ) -> "Order":
        """Orders programs for each block and each of `parts` of the tiles that it visits."""
        shapes, longest_first = problem.shapes, visits.longest_first(heads)
        each, units = 2 * shapes.S * shapes.H * shapes.dtype.itemsize, parts * shapes.B * heads
        most = 1 if longest_first is None else tuning.current().gpu_cached_bytes // each
        together = max(x for x in range(1, units + 1) if units % x == 0 and x <= max(1, most))
        grid = units // together, problem.blocks[problem.by_key], together
        return cls((shapes.B, heads), grid, longest_first, visits.ends[..., 1])

    def place(self, index: tuple[Any, ...], longest_first: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (part, b, h, i) of the program at this place of the grid."""
        section, rank, unit = index
        row, h = _split(section * np.int32(self.grid[2]) + unit, self.sizes[1])
        part, b = _split(row, self.sizes[0])
        if longest_first is None:
            return part, b, h, rank
        return part, b, h, longest_first[(*block_mask.clamped(longest_first, b, h), rank)]

    def rounds(self, programs: int) -> Any:
        """Assigns the places of the grid, by number, to programs: `[programs, rounds]`; −1 is none.

        None if there are no more places than programs, if all take equally long, or if it is not
        known while tracing which take longer.
        """
        places = math.prod(self.grid)
        static = isinstance(self.longest_first, np.ndarray)
        if not static or not programs < places <= _MAX_PLACES:
            return None
        index = np.unravel_index(np.arange(places), self.grid)
        _, b, h, i = self.place(index, self.longest_first)
        tiles = self.visited[(*block_mask.clamped(self.visited, b, h), i)]
        return _rounds(tiles, programs)


def _rounds(tiles: AnyArray, programs: int) -> AnyArray:
    """Assigns places with these numbers of tiles to programs: each place to the program that ends
    first, as if a place took as long as its tiles and one more."""
    free, taken = [(0, program) for program in range(programs)], [[] for _ in range(programs)]
    for place, count in enumerate(tiles.tolist()):
        time, program = free[0]
        heapq.heapreplace(free, (time + count + 1, program))
        taken[program].append(place)
    most = max(map(len, taken))
    return np.array([x + [-1] * (most - len(x)) for x in taken], np.int32)


def launch(
    name: str, problem: GPUProblem, order: Order, kernel: Callable[..., Any], *rest: Tree
) -> list[Array]:
    """Runs `kernel(place, operands, results, scratch)` in a program for each place of a grid.

    `place()` reads (part, b, h, i): a place that all warpgroups share takes up registers in each of
    them. For the rest see `_launch`.
    """

    def placed(longest_first: Ref | None, *refs: Tree) -> None:
        kernel(lambda: order.place(tuple(map(lax.axis_index, _NAMES)), longest_first), *refs)

    grid = zip(_NAMES, order.grid, strict=True)
    return _launch(name, problem, order.longest_first, grid, placed, *rest)


def launch_in_rounds(
    name: str, problem: GPUProblem, order: Order, rounds: Any, kernel: Any, *rest: Any
) -> list[Array]:
    """Runs `kernel(fold, operands, results, scratch)` in programs that have several places.

    `fold(visit, state)` folds `visit(place, state)` over the places of a program. `place(count)`
    reads (part, b, h, i) at that point of the program, if the compiler does not know `count`.
    `rounds` are those of the order: while a place ends, tiles of the next are copied. If None, each
    program has one place, and the device starts programs as others end. For the rest see `_launch`.
    """
    if rounds is None:

        def once(place: Callable[[], Any], *refs: Ref) -> None:
            index = place()
            kernel(lambda visit, state: visit(lambda _: index, state), *refs)

        return launch(name, problem, order, once, *rest)

    def in_rounds(known: Any, *refs: Any) -> None:
        longest_first, places = known

        def of_turn(visit: Callable[[Any, Any], Any], turn: Index, state: Tree) -> Any:
            def number(count: Any) -> Any:
                return places[lax.axis_index("program"), turn + later(count)]

            def place(count: Any) -> Any:
                section, n = _split(number(count), order.grid[1] * order.grid[2])
                return order.place((section, *_split(n, order.grid[2])), longest_first)

            return lax.cond(number(0) >= 0, lambda x: visit(place, x), lambda x: x, state)

        def fold(visit: Callable[[Any, Any], Any], state: Tree) -> Any:
            visit = functools.partial(of_turn, visit)
            return tile_schedule.repeat(0, rounds.shape[1], visit, state)

        kernel(fold, *refs)

    known = order.longest_first, rounds
    return _launch(name, problem, known, [("program", rounds.shape[0])], in_rounds, *rest)


def _split(n: AnyArray, size: int) -> tuple[Any, Any]:
    """Returns quotient and remainder, as NumPy arrays for these."""
    if isinstance(n, np.ndarray):
        return np.divmod(n, size)
    return lax.div(n, np.int32(size)), lax.rem(n, np.int32(size))


def _launch(
    name: str,
    problem: GPUProblem,
    known: Any,
    grid: Iterable[tuple[str, int]],
    kernel: Callable[..., Any],
    operands: Tree,
    results: Tree,
    scratch: Tree,
    warpgroups: int,
) -> list[Array]:
    """Runs `kernel(known, operands, results, scratch)` at each place of a grid, whose axes have
    names and sizes; interpreted on a CPU.

    `known` and `operands` are arrays, `results` shapes and dtypes. Each program has `warpgroups`.
    """
    names, sizes = zip(*grid, strict=True)
    arrays, over = reverse_mode.varying_alike(jax.tree.map(jnp.asarray, (known, operands)))
    flat, structure = jax.tree.flatten(arrays)

    def body(*refs: Any) -> None:
        n, m = len(flat), len(flat) + len(results)
        kernel(*jax.tree.unflatten(structure, refs[:n]), refs[n:m], refs[m:])

    call = mosaic().kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*x) for x in results],
        scratch_types=scratch,
        grid=sizes,
        grid_names=names,
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=interpreter() if problem.unit.interpreted else False,
        compiler_params=mosaic().CompilerParams(
            approx_math=problem.approximate,
            lowering_semantics=mosaic().LoweringSemantics.Lane,
        ),
    )
    return [_explicit.vary(over.varying, x) for x in call(*flat)]


def forward_results(shapes: Shapes, parts: int, heads_first: bool = False) -> list[Any]:
    """The shapes and dtypes of output and normalizer of each part of the keys.

    The normalizer is `[parts, B, N, T]`, the output `[parts, B, T, N, V]` or, with `heads_first`,
    `[parts, B, N, T, V]`. Outputs of several parts are in float32, to be joined.
    """
    rows = parts, shapes.B, shapes.N, shapes.T
    out = (*rows, shapes.V) if heads_first else (parts, shapes.B, shapes.T, shapes.N, shapes.V)
    dtype = jnp.float32 if parts > 1 else shapes.dtype
    return [(out, dtype), (rows, jnp.float32), (rows, jnp.float32)]


def joined(out: Array, maximum: Array, log_total: Array) -> tuple[Array, softmax.Normalizer]:
    """Joins the results of all parts of the keys to output `[B, T, N, V]` and normalizer
    `[B, T, N]`."""
    along = (jnp.swapaxes(x, 2, 3) for x in (maximum, log_total))
    return softmax.join(out, softmax.Normalizer(*along))
