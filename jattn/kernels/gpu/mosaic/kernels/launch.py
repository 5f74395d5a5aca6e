"""How programs of warpgroups are launched: in which order, and over which places of a grid."""

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


_MOST_PLACES = 2**16  # whose rounds are found beforehand


_NAMES = ("section", "rank", "unit")  # of the axes of a grid


class Order(NamedTuple):
    """The programs (part, b, h, i) of a launch in the order in which they start.

    Those that visit most tiles start first, so that all end at about the same time: the last ones
    of a causal mask would else go on alone. Of heads, those start together whose keys and values
    the second cache holds.
    """

    sizes: tuple[int, int]  # batch rows, heads of each
    grid: tuple[int, int, int]  # sections, blocks of each head, heads of a section; these in a row
    longest_first: Any  # the blocks, [B or 1, heads or 1, blocks], or None where all are as long
    visited: Any = None  # tiles, [B or 1, heads or 1, blocks], of programs in rounds

    @classmethod
    def of(
        cls, problem: GPUProblem, visits: block_mask.BlockMask, heads: int, parts: int = 1
    ) -> "Order":
        """`parts` of what each block visits have programs of their own."""
        shapes, longest_first = problem.shapes, visits.longest_first(heads)
        each, units = 2 * shapes.S * shapes.H * shapes.dtype.itemsize, parts * shapes.B * heads
        most = 1 if longest_first is None else tuning.current().gpu_cached_bytes // each
        together = max(x for x in range(1, units + 1) if units % x == 0 and x <= max(1, most))
        grid = units // together, problem.blocks[problem.by_key], together
        return cls((shapes.B, heads), grid, longest_first, visits.ends[..., 1])

    def place(self, index: tuple[Any, ...], longest_first: Any) -> tuple[Any, Any, Any, Any]:
        """(part, b, h, i) of the program at this place of the grid."""
        section, rank, unit = index
        row, h = _split(section * np.int32(self.grid[2]) + unit, self.sizes[1])
        part, b = _split(row, self.sizes[0])
        if longest_first is None:
            return part, b, h, rank
        return part, b, h, longest_first[(*block_mask.clamped(longest_first, b, h), rank)]

    def rounds(self, programs: int) -> Any:
        """The places of the grid, by number, that each of so many programs takes one after another,
        `[programs, rounds]`; −1 is none. None where there are not so many places, where all take as
        long, or which take longer is not known beforehand."""
        places = math.prod(self.grid)
        static = isinstance(self.longest_first, np.ndarray)
        if not static or not programs < places <= _MOST_PLACES:
            return None
        _, *at = self.place(np.unravel_index(np.arange(places), self.grid), self.longest_first)
        tiles = self.visited[(*block_mask.clamped(self.visited, *at[:2]), at[2])]
        return _rounds(tiles, programs)


def _rounds(tiles: AnyArray, programs: int) -> AnyArray:
    """Of places with so many tiles those that each program takes: the next one is for the program
    that ends first, as if a place took as long as its tiles and one more."""
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
    """`kernel(place, operands, results, scratch)` in programs (part, b, h, i), otherwise as
    `launch_by_role`."""

    def placed(place: Callable[[], Any], *given: Tree) -> None:
        kernel(place(), *given)

    return launch_by_role(name, problem, order, placed, *rest)


def launch_by_role(
    name: str, problem: GPUProblem, order: Order, kernel: Callable[..., Any], *rest: Tree
) -> list[Array]:
    """`kernel(place, operands, results, scratch)`, where `place()` reads (part, b, h, i): what all
    warpgroups share takes up registers in each of them. Otherwise as `launch_in_rounds`."""

    def placed(longest_first: Ref | None, *given: Tree) -> None:
        kernel(lambda: order.place(tuple(map(lax.axis_index, _NAMES)), longest_first), *given)

    grid = zip(_NAMES, order.grid, strict=True)
    return _launch(name, problem, order.longest_first, grid, placed, *rest)


def launch_in_rounds(
    name: str, problem: GPUProblem, order: Order, rounds: Any, kernel: Any, *rest: Any
) -> list[Array]:
    """`kernel(each, operands, results, scratch)`, where `each(step, state)` folds
    `step(place, state)` over the places of a program. `place(count)` reads (part, b, h, i) where it
    is called, if count is one that the compiler does not know.

    With `rounds` as of an order a program has several places, and tiles of the next are copied
    while one ends. Else it has one, and the device starts programs as others end. The rest are
    operands, results (shapes and dtypes), scratch, and how many warpgroups a program has.
    Interpreted on a CPU."""
    if rounds is None:

        def once(place: tuple[Array, ...], *given: Ref) -> None:
            kernel(lambda step, state: step(lambda _: place, state), *given)

        return launch(name, problem, order, once, *rest)

    def in_rounds(known: Any, *given: Any) -> None:
        longest_first, places = known

        def one(step: Callable[[Any, Any], Any], turn: Index, state: Tree) -> Any:
            def number(count: Any) -> Any:
                return places[lax.axis_index("program"), turn + later(count)]

            def place(count: Any) -> Any:
                section, n = _split(number(count), order.grid[1] * order.grid[2])
                return order.place((section, *_split(n, order.grid[2])), longest_first)

            return lax.cond(number(0) >= 0, lambda x: step(place, x), lambda x: x, state)

        def each(step: Callable[[Any, Any], Any], state: Tree) -> Any:
            return tile_schedule.repeat(0, rounds.shape[1], functools.partial(one, step), state)

        kernel(each, *given)

    known = order.longest_first, rounds
    return _launch(name, problem, known, [("program", rounds.shape[0])], in_rounds, *rest)


def _split(n: AnyArray, size: int) -> tuple[Any, Any]:
    """Quotient and remainder; NumPy's of NumPy's."""
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
    """`kernel(known, operands, results, scratch)` at each place of a grid, whose axes have names
    and sizes; `known` are arrays."""
    names, sizes = zip(*grid, strict=True)
    given = jax.tree.map(jnp.asarray, (known, operands))
    given, over = reverse_mode.varying_alike(given)
    flat, structure = jax.tree.flatten(given)

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
    """Shapes and dtypes of output and normalizer of each part of the keys, `[parts, B, N, T]`; the
    output is `[parts, B, T, N, V]` or, `heads_first`, `[parts, B, N, T, V]`. Outputs that are yet
    to be joined are in float32."""
    rows = parts, shapes.B, shapes.N, shapes.T
    out = (*rows, shapes.V) if heads_first else (parts, shapes.B, shapes.T, shapes.N, shapes.V)
    dtype = jnp.float32 if parts > 1 else shapes.dtype
    return [(out, dtype), (rows, jnp.float32), (rows, jnp.float32)]


def joined(out: Array, maximum: Array, log_total: Array) -> tuple[Array, softmax.Normalizer]:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]` from those of all parts of the keys."""
    along = (jnp.swapaxes(x, 2, 3) for x in (maximum, log_total))
    return softmax.join(out, softmax.Normalizer(*along))
