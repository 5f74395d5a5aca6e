"""Gradients of queries, and of keys and values, on Blackwell GPUs, by fifth-generation tensor cores
and tensor memory.

A program keeps 128 queries, or keys. As in the forward pass a warp copies streamed tiles, and
another starts products: kept rows times streamed ones, once for scores and once for the cotangents
of weights. One or two warpgroups load these to registers, 64 columns each, or 32 if scores and
their derivative need more registers. They write weights and cotangents of scores back to tensor
memory, as the left sides of products that are added to gradients there. The tensor cores multiply
for the last tile while weights of the next one are computed: that order is FlashAttention-4's
(Zadouri et al. 2026). Gradients of keys have numbers of rows for each column: a warpgroup computes
32 columns of these at once, because registers would not hold more beside the weights that wait for
their cotangents.

Three parts of it are missing: that the tensor cores do not wait for products whose operands the
next ones overwrite, powers of two by products, and pairs of multiprocessors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import scores
from jattn._types import Index, Ref, Tree
from jattn.kernels.gpu.mosaic.kernels import ampere, backward, mosaic_call
from jattn.kernels.gpu.mosaic.machine import tensor_memory
from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, WIDTH, Products
from jattn.kernels.gpu.mosaic.machine.streams import Stream
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import store, tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.kernels.gpu.mosaic.tile.gradients import Derivation, RowStatistics, finished
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem, RegisterTile
from jattn.spec import Spec


_KEYS, _VALUES = 0, 1  # gradients of keys, or of queries, and of values
_ROWS = 64  # that products add up
# The head size of which two gradients and two tiles of 128 columns fill the 512 columns of tensor
# memory, and of which two places for such tiles fit shared memory beside the rows that are kept.
_WIDE = 128


class _GradientMemory(NamedTuple):
    """The memory of a program.

    In shared memory: the `resident` rows, which results also pass through; streamed tiles, `first`
    of queries (keys) and `second` of d_out (values), and the spec's `arrays` and numbers of rows
    for these. In tensor memory: `scores`, in float32, and weights, in 16 bits; `pulled`, likewise
    the cotangents of weights, and those of scores; and gradients, the `sums`.

    Barriers: rows are `loaded`; the tensor cores have `scored` a tile and pulled its cotangents
    `back`, `added` a product to each gradient, and are `done` with all; computing warpgroups have
    `weighed` the scores of a tile and `derived` the cotangents of these.
    """

    resident: Ref
    first: Stream
    second: Stream
    arrays: tuple[Stream, ...]
    scores: Ref
    pulled: Ref
    sums: Ref
    loaded: Ref
    scored: Ref
    weighed: Ref
    back: Ref
    derived: Ref
    added: Ref
    done: Ref

    @classmethod
    def scratch(cls, problem: GPUProblem, which: tuple[int, ...]) -> "_GradientMemory":
        shapes, size, unit = problem.shapes, problem.streamed, problem.unit
        barrier = functools.partial(tensor_memory.barrier, unit)
        tensors = functools.partial(tensor_memory.scratch, unit)

        def tile() -> Tree:  # in float32, and in 16 bits, which take half the columns
            if _is_separate(problem):
                return tensors(size), tensors(size, shapes.dtype)
            return tensor_memory.alternatives(unit, tensors(size), tensors(2 * size, shapes.dtype))

        def ring(places: int) -> Stream:
            tiles = tiles_in_memory(places, size, shapes.H, shapes.dtype)
            return Stream.ring(tiles, free=barrier(places))

        groups, places = _groups(problem), 2 if shapes.H <= _WIDE else 1
        resident = 2 if _KEYS in which else 1  # tiles of rows: one if only values have gradients
        return cls(
            resident=tiles_in_memory(resident, TENSOR_ROWS, shapes.H, shapes.dtype),
            first=ring(2),
            second=ring(places),
            arrays=_streamed_arrays(problem, places),
            scores=tile(),
            pulled=tile(),
            sums=tensors(len(which) * shapes.H),
            loaded=mosaic().Barrier(num_arrivals=resident),
            scored=barrier(1),
            weighed=barrier(1, groups),
            back=barrier(1),
            derived=barrier(1, groups),
            added=barrier(2),
            done=barrier(1),
        )

    def sum_of(self, which: tuple[int, ...], gradient: int, start: int, size: int) -> Ref:
        width = self.resident.shape[2]
        return self.sums.at[:, pl.ds(which.index(gradient) * width + start, size)]


def _is_separate(problem: GPUProblem) -> bool:
    """Returns whether a tile of 16 bits has a separate place, because a product takes the columns
    of two warpgroups. Otherwise it lies in the place of a tile in float32: a warpgroup's narrow
    columns begin where its wide ones do, so that it overwrites no others."""
    return problem.streamed // _groups(problem) < _ROWS


def _narrow(problem: GPUProblem, tile: Any, start: Any, size: int) -> Any:
    """Columns of a tile of 16 bits."""
    return tile.at[:, pl.ds(start if _is_separate(problem) else 2 * start, size)]


def _groups(problem: GPUProblem) -> int:
    """The number of warpgroups that compute, each the same number of a tile's columns."""
    return min(2, problem.shares)


def _streamed_arrays(problem: GPUProblem, places: int) -> tuple[Stream, ...]:
    """A ring of the arrays that belong to the columns of tiles, by shares; none without arrays."""
    shares, arrays = problem.shares, problem.streamed_scratch(places, problem.shares)
    copies = len(arrays) * shares
    if problem.by_key:
        statistics = mosaic().SMEM((places, shares, 3 * problem.share), "float32")
        arrays, copies = [statistics, *arrays], copies + 1
    if not arrays:
        return ()
    used = mosaic().Barrier(num_barriers=places, num_arrivals=_groups(problem))
    return (Stream.ring(*arrays, free=used, copies=copies),)


class _BlackwellGradients(backward.GradientProgram):
    """128 queries or, with `by_key`, 128 keys."""

    def run(self) -> None:
        roles = self.copy, self.multiply, self.compute
        tensor_memory.by_role(self.problem.unit, _groups(self.problem), *roles)

    @property
    def block(self) -> Tree:
        return self.part(self.place[2] * TENSOR_ROWS, TENSOR_ROWS, self.place[1])

    def share(self, h: Array, x: Array, number: Index) -> Tree:
        """The index of a share of the columns of block x of a head."""
        column = x * self.problem.streamed + number * self.problem.share
        return self.tile_index(h, self.place[2] * TENSOR_ROWS, column)

    def copy(self) -> None:
        """Copies kept rows and streamed tiles, in one warp."""
        numbers = range(self.problem.shares)
        for i in range(self.memory.resident.shape[0]):
            source = self.resident[i].at[self.block]
            mosaic().copy_gmem_to_smem(source, self.memory.resident.at[i], self.memory.loaded)

        def visit(h: Array, x: Array, masked: bool, turn: Index) -> Array:
            first, second = self.tiles(h, x)
            self.memory.first.fill(turn, first)
            indices = [self.share(h, x, number) for number in numbers]
            shares = [self.problem.streamed_parts(self.leaves, index) for index in indices]
            blocks = self.place[0], h, pl.ds(x * len(numbers), len(numbers))
            statistics = [self.statistics.at[blocks]] if self.problem.by_key else []
            for ring in self.memory.arrays:
                ring.fill(turn, *statistics, *map(list, zip(*shares, strict=True)))
            self.memory.second.fill(turn, second)
            return turn + 1

        turns = self.fold(visit, jnp.int32(0))
        for ring in (self.memory.first, self.memory.second, *self.memory.arrays):
            ring.drain(turns)

    # --- products -------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Starts all products, in one warp."""
        memory = self.memory
        mosaic().barrier_wait(memory.loaded)

        def visit(h: Array, x: Array, masked: bool, turn: Index) -> Array:
            pl.when(turn > 0)(functools.partial(self.add_values, turn - 1))
            memory.first.wait(turn)
            self.start(memory.scores[0], 0, memory.first, turn, memory.scored, _KEYS)
            pl.when(turn > 0)(functools.partial(self.add_keys, turn - 1))
            memory.second.wait(turn)
            if _KEYS in self.which:
                self.start(memory.pulled[0], 1, memory.second, turn, memory.back, _VALUES)
            return turn + 1

        turns = self.fold(visit, jnp.int32(0))

        @pl.when(turns > 0)
        def _() -> None:
            self.add_values(turns - 1)
            self.add_keys(turns - 1)

        tensor_memory.commit(self.problem.unit, memory.done)

    def start(
        self, total: Ref, kept: int, ring: Stream, turn: Index, done: Ref, gradient: int
    ) -> None:
        """Starts the products of kept rows and a turn's tile, which `gradient` needs once more."""
        (tile,), unit = ring.of_turn(turn), self.problem.unit
        tensor_memory.multiply(unit, total, self.memory.resident.at[kept], tile, transposed=True)
        free = [] if gradient in self.which else [ring.freed(turn)]
        tensor_memory.commit(unit, *free, done)

    def add_values(self, turn: Index) -> None:
        """Starts to add the weighted rows of d_out, as soon as there are weights. Scores of another
        turn may overwrite these afterwards."""
        mosaic().barrier_wait(self.memory.weighed)
        if _VALUES in self.which:
            self.add(_VALUES, self.memory.scores[1], self.memory.second, turn)

    def add_keys(self, turn: Index) -> None:
        """Starts to add the rows of queries (keys) times the cotangents of scores, likewise."""
        if _KEYS in self.which:
            mosaic().barrier_wait(self.memory.derived)
            self.add(_KEYS, self.memory.pulled[1], self.memory.first, turn)

    def add(self, gradient: int, factors: Ref, ring: Stream, turn: Index) -> None:
        """Adds products to a gradient, and waits: the next turn overwrites their factors."""
        unit, (tile,) = self.problem.unit, ring.of_turn(turn)
        total = self.memory.sum_of(self.which, gradient, 0, self.problem.shapes.H)
        for start in range(0, self.problem.streamed, _ROWS):
            left = _narrow(self.problem, factors, start, _ROWS)
            tensor_memory.multiply(unit, total, left, tile.at[pl.ds(start, _ROWS)])
        added = self.memory.added.at[gradient]
        tensor_memory.commit(unit, ring.freed(turn), added)
        mosaic().barrier_wait(added)

    # --- weights --------------------------------------------------------------------------------

    def compute(self, group: Index) -> None:
        """Computes weights, the cotangents of scores and the results, in a warpgroup."""
        kept = self.kept_statistics(self.problem.unit, *self.place)
        self.for_gradients(group, self.clear)
        tensor_memory.wait_for_stores(self.problem.unit)

        def of_head(h: Array) -> Callable[..., Any]:
            constants = self.problem.constants(self.leaves, self.place[0], h)

            def visit(x: Array, masked: bool, turn: Index) -> Array:
                numbers = self.shares_of(group)
                share = functools.partial(self.share, h, x)
                tiles = [self.problem.tile(self.leaves, share(i), constants) for i in numbers]
                tiles, read = self.completed(turn, numbers, tiles, kept)
                weighed = self.weigh(group, tiles, masked, read)
                again = [x() for x in read]  # weights leave no registers for delta
                for ring in self.memory.arrays:
                    mosaic().commit_smem()  # copies may then overwrite what was read
                    mosaic().barrier_arrive(ring.freed(turn))
                if _KEYS in self.which:
                    self.derive(group, tiles, masked, again, weighed)
                return turn + 1

            return visit

        self.fold_heads(of_head, jnp.int32(0))
        mosaic().barrier_wait(self.memory.done)
        self.for_gradients(group, self.write_result)

    def completed(
        self, turn: Index, numbers: Tree, tiles: Tree, kept_statistics: Tree
    ) -> tuple[list[RegisterTile], list[Any]]:
        """Returns a turn's tiles with their streamed arrays, and functions that read the statistics
        of their queries: `kept_statistics`, or streamed ones."""
        read: list[Any] = [lambda: kept_statistics for _ in numbers]
        for ring in self.memory.arrays:
            ring.wait(turn)
            for i, number in enumerate(numbers):
                arrays = [array.at[number] for array in ring.of_turn(turn)]
                if self.problem.by_key:
                    read[i] = functools.partial(
                        RowStatistics.read, self.problem.unit, arrays.pop(0)
                    )
                tiles[i] = tiles[i].completed(*arrays)
        return tiles, read

    def weigh(self, group: Index, tiles: Tree, masked: bool, read: list[Any]) -> list[Any]:
        """Computes weights from the scores of a turn."""
        unit, scores = self.problem.unit, self.memory.scores
        mosaic().barrier_wait(self.memory.scored)
        products = self.loaded_run(scores[0], group, self.columns)
        if _VALUES not in self.which:
            mosaic().barrier_arrive(self.memory.weighed)
        first = Derivation(masked, self.problem.factors).weights_first
        weights, weighed = [], []
        for tile, part, read_statistics in zip(tiles, self.split(products), read, strict=True):
            statistics = read_statistics()
            statistics = statistics if self.problem.by_key else statistics._replace(log_total=None)
            dropped, *rest = tile.run_typed(first, part, statistics)
            weights.append(dropped.value.astype(self.problem.shapes.dtype))
            weighed.append(rest)
        if _VALUES in self.which:
            tensor_memory.store(unit, self.narrow(scores[1], group), _joined(weights))
            tensor_memory.wait_for_stores(unit)
            mosaic().barrier_arrive(self.memory.weighed)
        return weighed

    def derive(
        self,
        group: Index,
        tiles: list[RegisterTile],
        masked: bool,
        statistics: list[RowStatistics],
        weighed: list[Any],
    ) -> None:
        """Computes the cotangents of a turn's scores, from those of weights."""
        unit, pulled = self.problem.unit, self.memory.pulled
        mosaic().barrier_wait(self.memory.back)
        # If registers are scarce, the cotangents of a share are used before more are loaded.
        runs = self.shares_of(group) if masked else [group]
        size = self.problem.share if masked else self.columns
        d_weights = (x for i in runs for x in self.split(self.loaded_run(pulled[0], i, size)))
        then = Derivation(masked, self.problem.factors).d_products_then
        d_scores = [
            tile.run(then, *first, part, x).astype(self.problem.shapes.dtype)
            for tile, part, first, x in zip(tiles, d_weights, weighed, statistics, strict=True)
        ]
        tensor_memory.store(unit, self.narrow(pulled[1], group), _joined(d_scores))
        tensor_memory.wait_for_stores(unit)
        mosaic().barrier_arrive(self.memory.derived)

    @property
    def columns(self) -> int:
        """The number of columns of a tile that a warpgroup computes."""
        return self.problem.streamed // _groups(self.problem)

    def shares_of(self, group: Index) -> list[Any]:
        """The shares that a warpgroup computes in turn, because registers hold no more at once."""
        count = self.columns // self.problem.share
        return [group * count + i for i in range(count)]

    def loaded_run(self, tile: Ref, i: Index, size: int) -> Array:
        """Loads the i-th run of `size` columns of a tile to registers."""
        run = tensor_memory.load(self.problem.unit, tile.at[:, pl.ds(i * size, size)])
        tensor_memory.wait_for_loads(self.problem.unit)
        return run

    def split(self, x: Array) -> list[Array]:
        """Splits an array into shares of columns."""
        (rows, columns), share = x.shape, self.problem.share
        if columns == share:
            return [x]
        firsts = range(0, columns, share)
        return [lax.slice(x, (0, first), (rows, first + share)) for first in firsts]

    def narrow(self, tile: Ref, group: Index) -> Ref:
        """A warpgroup's columns of a tile of 16 bits."""
        return _narrow(self.problem, tile, group * self.columns, self.columns)

    # --- gradients ------------------------------------------------------------------------------

    def for_gradients(self, group: Index, function: Callable[..., Any]) -> None:
        """Runs `function(gradient)` for each gradient, in different warpgroups if there are two."""
        for place, gradient in enumerate(self.which):
            assigned = place % _groups(self.problem)
            pl.when(group == assigned)(functools.partial(function, gradient))

    def clear(self, gradient: int) -> None:
        unit = self.problem.unit
        zeros = unit.zeros(TENSOR_ROWS, WIDTH)
        for start in range(0, self.problem.shapes.H, WIDTH):
            part = self.memory.sum_of(self.which, gradient, start, WIDTH)
            tensor_memory.store(unit, part, zeros)

    def write_result(self, gradient: int) -> None:
        """Writes a gradient, in a layout without bank conflicts in shared memory."""
        place, unit = self.which.index(gradient), self.problem.unit._replace(splits_rows=True)
        problem, resident = self.problem._replace(unit=unit), self.memory.resident.at[place]
        statistics = self.kept_statistics(unit, *self.place)
        for start in range(0, problem.shapes.H, WIDTH):
            total = tensor_memory.load(unit, self.memory.sum_of(self.which, gradient, start, WIDTH))
            tensor_memory.wait_for_loads(unit)
            (columns,) = finished(problem, {gradient: total}, statistics)
            resident[:, pl.ds(start, WIDTH)] = columns.astype(resident.dtype)
        store([(resident, self.results[place].at[*self.block])])


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _gradients(problem: GPUProblem, *call: Any) -> list[Array]:
    """Computes gradients as `mosaic_call.GradientKernels.run`."""
    unit, groups, by_key, which = problem.unit, _groups(problem), problem.by_key, call[-1]
    if problem.shapes.H > _WIDE:  # shared memory has no room for more
        problem = problem._replace(max_streamed_arrays=1 if by_key else 2)
    gradient = ("keys" if _KEYS in which else "values") if by_key else "queries"
    name, size = f"jattn_blackwell_d_{gradient}", problem.share if by_key else TENSOR_ROWS
    rest = _GradientMemory.scratch(problem, which), tensor_memory.warpgroups(unit, groups)
    return backward.launched(name, _BlackwellGradients, (problem, *call), size, *rest)


def _columns(spec: Spec, by_key: bool) -> int:
    return 32 if by_key or _is_long(spec, by_key=False) else 64


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    fits = (width <= _WIDE and not _is_long(spec, by_key) for by_key in (False, True))
    keys, queries = (128 if x else 64 for x in fits)
    return keys, queries


def _is_long(spec: Spec, by_key: bool) -> bool:
    """Returns whether a tile's scores and their derivative need more registers than 64 columns
    leave.

    All score functions do but a single linear one by places; and dropout does with any score
    function, or by keys, where hashes are of columns.
    """
    chain = scores.in_order(spec.score)
    is_nonlinear = any(isinstance(x, scores.SoftCap | scores.Score) for x in chain)
    by_positions = bool(chain) and not hoisted.positions_are_places(spec)
    drops = spec.dropout_rate > 0 and (by_key or bool(chain))
    return drops or is_nonlinear or len(chain) > 1 or by_positions


BACKWARD = mosaic_call.GradientKernels(
    rows=lambda _: TENSOR_ROWS,
    streamed=_streamed,
    products=Products.TENSOR_MEMORY,
    run=_gradients,
    columns=_columns,
    of_parameters=ampere.BACKWARD,
)
