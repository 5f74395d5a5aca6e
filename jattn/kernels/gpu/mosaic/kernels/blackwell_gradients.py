"""Gradients of queries, and of keys and values, on Blackwell GPUs, by their fifth matrix units and
tensor memory.

A program keeps 128 queries, or keys. As in the forward pass a warp copies the tiles that come by,
and another starts products: kept rows times streamed ones, once for scores and once for the
cotangents of weights, which one or two warpgroups take to registers, 64 columns each, or 32 where
scores and their derivative need more registers. What these make of them goes back to tensor memory,
as the left side of a product that is added to a gradient there. The matrix units multiply for the
last tile while weights of the next one are computed: that order is FlashAttention-4's (Zadouri et
al. 2026). Gradients of keys have numbers of rows for each column: of these a warpgroup computes
32 at once, or registers would not hold them beside what waits for cotangents of weights.

Of that three things are missing: that the matrix units do not wait for products whose operands the
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
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import Ring, store, tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.kernels.gpu.mosaic.tile.gradients import Rows, d_products_then, finished, weights_first
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.spec import Spec


_KEYS, _VALUES = 0, 1  # gradients of keys, or of queries, and of values
_ROWS = 64  # that products add up
# Head size of which two gradients and two tiles of 128 columns fill tensor memory, which has 512,
# and two places for such tiles fit shared memory beside the rows that are kept.
_WIDE = 128


class _Memory(NamedTuple):
    """In shared memory: the `kept` rows, which results leave through; tiles that come by, `first`
    of queries (keys) and `second` of d_out (values), and numbers of rows and the spec's arrays
    `beside` them. In tensor memory: `scores`, in float32, and weights, in 16 bits; `pulled`,
    likewise the cotangents of weights, and those of scores; and gradients, the `sums`.

    Barriers: rows are `loaded`; the matrix units have `scored` a tile and pulled its cotangents
    `back`, `added` a product to each gradient, and are `done` with all; computing warpgroups have
    `weighed` the scores of a tile and `derived` the cotangents of these.
    """

    kept: Ref
    first: Ring
    second: Ring
    beside: tuple[Ring, ...]
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
    def scratch(cls, problem: GPUProblem, which: tuple[int, ...]) -> "_Memory":
        shapes, size, unit = problem.shapes, problem.streamed, problem.unit
        barrier = functools.partial(tensor_memory.barrier, unit)
        tensors = functools.partial(tensor_memory.scratch, unit)

        def tile() -> Tree:  # in float32, and in 16 bits, which take half the columns
            if _is_apart(problem):
                return tensors(size), tensors(size, shapes.dtype)
            return tensor_memory.alternatives(unit, tensors(size), tensors(2 * size, shapes.dtype))

        def ring(places: int) -> Ring:
            tiles = tiles_in_memory(places, size, shapes.H, shapes.dtype)
            return Ring.scratch(tiles, free=barrier(places))

        fits, groups = shapes.H <= _WIDE, _groups(problem)
        return cls(
            kept=tiles_in_memory(_kept(which), TENSOR_ROWS, shapes.H, shapes.dtype),
            first=ring(2),
            second=ring(2 if fits else 1),
            beside=_beside(problem, 2 if fits else 1),
            scores=tile(),
            pulled=tile(),
            sums=tensors(len(which) * shapes.H),
            loaded=mosaic().Barrier(num_arrivals=_kept(which)),
            scored=barrier(1),
            weighed=barrier(1, groups),
            back=barrier(1),
            derived=barrier(1, groups),
            added=barrier(2),
            done=barrier(1),
        )

    def sum_of(self, which: tuple[int, ...], gradient: int, start: int, size: int) -> Ref:
        width = self.kept.shape[2]
        return self.sums.at[:, pl.ds(which.index(gradient) * width + start, size)]


def _is_apart(problem: GPUProblem) -> bool:
    """Whether a tile of 16 bits has a place of its own, where a product takes the columns of two
    warpgroups. Else it is in that of a tile in float32. Those of a warpgroup begin where its wide
    ones do, so that no other's are overwritten."""
    return problem.streamed // _groups(problem) < _ROWS


def _narrow(problem: GPUProblem, tile: Any, start: Any, size: int) -> Any:
    """Columns of a tile of 16 bits."""
    return tile.at[:, pl.ds(start if _is_apart(problem) else 2 * start, size)]


def _groups(problem: GPUProblem) -> int:
    """Warpgroups that compute, each as many of a tile's columns as any other."""
    return min(2, problem.shares)


def _kept(which: tuple[int, ...]) -> int:
    """How many tiles of rows a program keeps: of keys alone where only values have gradients."""
    return 2 if _KEYS in which else 1


def _beside(problem: GPUProblem, places: int) -> tuple[Ring, ...]:
    """A ring of what belongs to the columns of tiles, by shares; none if there is nothing."""
    shares = problem.shares
    arrays = problem.streamed_scratch(places, shares)
    copies = len(arrays) * shares
    if problem.by_key:
        arrays, copies = (
            [mosaic().SMEM((places, shares, 3 * problem.share), "float32"), *arrays],
            copies + 1,
        )
    if not arrays:
        return ()
    used = mosaic().Barrier(num_barriers=places, num_arrivals=_groups(problem))
    return (Ring.scratch(*arrays, free=used, copies=copies),)


class _Program(backward.Program):
    """128 queries or, `by_key`, 128 keys."""

    @property
    def own(self) -> Tree:
        return self.at[0], pl.ds(self.at[2] * TENSOR_ROWS, TENSOR_ROWS), self.at[1]

    def share(self, h: Array, x: Array, number: Index) -> Tree:
        """Where some columns of block x of a head are."""
        column = x * self.problem.streamed + number * self.problem.share
        return self.place(h, self.at[2] * TENSOR_ROWS, column)

    def copy(self, memory: _Memory) -> None:
        """What the warp does that only copies."""
        numbers = range(self.problem.shares)
        for i in range(memory.kept.shape[0]):
            mosaic().copy_gmem_to_smem(self.kept[i].at[self.own], memory.kept.at[i], memory.loaded)

        def step(h: Array, x: Array, masked: bool, turn: Index) -> Array:
            first, second = self.tiles(h, x)
            memory.first.fill(turn, first)
            places = [self.share(h, x, number) for number in numbers]
            shares = [self.problem.streamed_parts(self.leaves, place) for place in places]
            blocks = pl.ds(x * len(numbers), len(numbers))
            rows = [self.rows.at[self.at[0], h, blocks]] if self.problem.by_key else []
            for ring in memory.beside:
                ring.fill(turn, *rows, *map(list, zip(*shares, strict=True)))
            memory.second.fill(turn, second)
            return turn + 1

        turns = self.fold(step, jnp.int32(0))
        for ring in (memory.first, memory.second, *memory.beside):
            ring.drain(turns)

    # --- products -------------------------------------------------------------------------------

    def multiply(self, memory: _Memory) -> None:
        """What the warp does that starts products."""
        mosaic().barrier_wait(memory.loaded)

        def step(h: Array, x: Array, masked: bool, turn: Index) -> Array:
            pl.when(turn > 0)(functools.partial(self.add_values, memory, turn - 1))
            self.score(memory, turn)
            pl.when(turn > 0)(functools.partial(self.add_keys, memory, turn - 1))
            self.pull(memory, turn)
            return turn + 1

        turns = self.fold(step, jnp.int32(0))

        @pl.when(turns > 0)
        def _() -> None:
            self.add_values(memory, turns - 1)
            self.add_keys(memory, turns - 1)

        tensor_memory.commit(self.problem.unit, memory.done)

    def score(self, memory: _Memory, turn: Index) -> None:
        """Starts the products of queries and keys of a turn."""
        unit = self.problem.unit
        memory.first.wait(turn)
        (tile,) = memory.first.at(turn)
        tensor_memory.multiply(unit, memory.scores[0], memory.kept.at[0], tile, transposed=True)
        free = [] if _KEYS in self.which else [memory.first.freed(turn)]
        tensor_memory.commit(unit, *free, memory.scored)

    def pull(self, memory: _Memory, turn: Index) -> None:
        """Starts the products of d_out and values of a turn."""
        unit = self.problem.unit
        memory.second.wait(turn)
        if _KEYS not in self.which:
            return
        (tile,) = memory.second.at(turn)
        tensor_memory.multiply(unit, memory.pulled[0], memory.kept.at[1], tile, transposed=True)
        free = [] if _VALUES in self.which else [memory.second.freed(turn)]
        tensor_memory.commit(unit, *free, memory.back)

    def add_values(self, memory: _Memory, turn: Index) -> None:
        """Starts to add the weighted rows of d_out, once there are weights. Scores of another turn
        may be written over these afterwards."""
        mosaic().barrier_wait(memory.weighed)
        if _VALUES in self.which:
            self.add(memory, _VALUES, memory.scores[1], memory.second, turn)

    def add_keys(self, memory: _Memory, turn: Index) -> None:
        """Starts to add the rows of queries (keys) times the cotangents of scores, likewise."""
        if _KEYS in self.which:
            mosaic().barrier_wait(memory.derived)
            self.add(memory, _KEYS, memory.pulled[1], memory.first, turn)

    def add(self, memory: _Memory, gradient: int, factors: Ref, ring: Ring, turn: Index) -> None:
        unit, width = self.problem.unit, self.problem.shapes.H
        (tile,) = ring.at(turn)
        total = memory.sum_of(self.which, gradient, 0, width)
        for start in range(0, self.problem.streamed, _ROWS):
            left = _narrow(self.problem, factors, start, _ROWS)
            tensor_memory.multiply(unit, total, left, tile.at[pl.ds(start, _ROWS)])
        # They lie where the products of the next turn are written.
        added = memory.added.at[gradient]
        tensor_memory.commit(unit, ring.freed(turn), added)
        mosaic().barrier_wait(added)

    # --- weights --------------------------------------------------------------------------------

    def compute(self, memory: _Memory, group: Index, results: Ref) -> None:
        """What a warpgroup does that computes."""
        mine = None if self.problem.by_key else self.mine(self.problem.unit)
        self.each(group, functools.partial(self.clear, memory))
        tensor_memory.wait_for_stores(self.problem.unit)

        def of_head(h: Array) -> Callable[..., Any]:
            numbers = self.problem.constants(self.leaves, self.at[0], h)

            def step(x: Array, masked: bool, turn: Index) -> Array:
                own = self.own_shares(group)
                tiles = [self.problem.tile(self.leaves, self.share(h, x, i), numbers) for i in own]
                tiles, read = self.completed(memory, turn, own, tiles, mine)
                found = self.weigh(memory, group, tiles, masked, read)
                rows = [each() for each in read]  # again: weights leave no registers for delta
                for ring in memory.beside:
                    mosaic().commit_smem()  # copies may write then to what was read
                    mosaic().barrier_arrive(ring.freed(turn))
                if _KEYS in self.which:
                    self.derive(memory, group, tiles, masked, rows, found)
                return turn + 1

            return step

        self.fold_heads(of_head, jnp.int32(0))
        mosaic().barrier_wait(memory.done)
        self.each(group, functools.partial(self.leave, memory, results))

    def completed(
        self,
        memory: _Memory,
        turn: Index,
        own: list[Any],
        tiles: list[RegisterTile],
        mine: Rows | None,
    ) -> tuple[list[RegisterTile], list[Any]]:
        """A turn's tiles with what comes by beside them, and how to read of each what is known of
        rows, where that is not `mine`."""
        read: list[Any] = [lambda: mine for _ in own]
        for ring in memory.beside:
            ring.wait(turn)
            for i, number in enumerate(own):
                beside = [array.at[number] for array in ring.at(turn)]
                if self.problem.by_key:
                    read[i] = functools.partial(Rows.read, self.problem.unit, beside.pop(0))
                tiles[i] = tiles[i].completed(beside)
        return tiles, read

    def mine(self, unit: Tree) -> Rows:
        """Of the queries that are kept."""
        return Rows.read(unit, self.rows, *self.at)

    def weigh(
        self,
        memory: _Memory,
        group: Index,
        tiles: list[RegisterTile],
        masked: bool,
        read: list[Any],
    ) -> list[Any]:
        """Weights from the scores of a turn."""
        unit, scores = self.problem.unit, memory.scores
        mosaic().barrier_wait(memory.scored)
        products = self.taken(scores[0], group, self.columns)
        if _VALUES not in self.which:
            mosaic().barrier_arrive(memory.weighed)
        first = functools.partial(weights_first, masked, self.problem.factors)
        weights, found = [], []
        for here, part, each in zip(tiles, self.split(products), read, strict=True):
            rows = each() if self.problem.by_key else each()._replace(log_total=None)
            own, *others = here.run_typed(first, part, rows)
            weights.append(own.value.astype(self.problem.shapes.dtype))
            found.append(others)
        if _VALUES in self.which:
            tensor_memory.store(unit, self.narrow(scores[1], group), _joined(weights))
            tensor_memory.wait_for_stores(unit)
            mosaic().barrier_arrive(memory.weighed)
        return found

    def derive(
        self,
        memory: _Memory,
        group: Index,
        tiles: list[RegisterTile],
        masked: bool,
        rows: list[Rows],
        found: list[Any],
    ) -> None:
        """The cotangents of a turn's scores, from those of weights."""
        unit, pulled = self.problem.unit, memory.pulled
        mosaic().barrier_wait(memory.back)
        # Where registers are scarce, those of a share are used before others are taken.
        runs = self.own_shares(group) if masked else [group]
        size = self.problem.share if masked else self.columns
        d_weights = (x for i in runs for x in self.split(self.taken(pulled[0], i, size)))
        then = functools.partial(d_products_then, masked)
        d_scores = [
            here.run(then, *own, part, each).astype(self.problem.shapes.dtype)
            for here, part, own, each in zip(tiles, d_weights, found, rows, strict=True)
        ]
        tensor_memory.store(unit, self.narrow(pulled[1], group), _joined(d_scores))
        tensor_memory.wait_for_stores(unit)
        mosaic().barrier_arrive(memory.derived)

    @property
    def columns(self) -> int:
        """Of a tile, those of a warpgroup."""
        return self.problem.streamed // _groups(self.problem)

    def own_shares(self, group: Index) -> list[Any]:
        """The numbers of those that a warpgroup computes, one after another: registers hold no more
        at once."""
        each = self.columns // self.problem.share
        return [group * each + i for i in range(each)]

    def taken(self, tile: Ref, i: Index, size: int) -> Array:
        """The i-th run of so many columns of a tile, in registers."""
        found = tensor_memory.load(self.problem.unit, tile.at[:, pl.ds(i * size, size)])
        tensor_memory.wait_for_loads(self.problem.unit)
        return found

    def split(self, x: Array) -> list[Array]:
        """Shares of columns."""
        (rows, columns), share = x.shape, self.problem.share
        if columns == share:
            return [x]
        firsts = range(0, columns, share)
        return [lax.slice(x, (0, first), (rows, first + share)) for first in firsts]

    def narrow(self, tile: Ref, group: Index) -> Ref:
        """A warpgroup's columns of a tile of 16 bits."""
        return _narrow(self.problem, tile, group * self.columns, self.columns)

    # --- gradients ------------------------------------------------------------------------------

    def each(self, group: Index, function: Callable[..., Any]) -> None:
        """`function(gradient)` of each gradient in a warpgroup of its own, or in the only one."""
        for place, gradient in enumerate(self.which):
            own = place % _groups(self.problem)
            pl.when(group == own)(functools.partial(function, gradient))

    def clear(self, memory: _Memory, gradient: int) -> None:
        unit = self.problem.unit
        zeros = unit.to_layout(jnp.zeros((TENSOR_ROWS, WIDTH), jnp.float32), "ts")
        for start in range(0, self.problem.shapes.H, WIDTH):
            part = memory.sum_of(self.which, gradient, start, WIDTH)
            tensor_memory.store(unit, part, zeros)

    def leave(self, memory: _Memory, results: Ref, gradient: int) -> None:
        """A gradient, as shared memory takes it without conflicts between its banks."""
        place, unit = self.which.index(gradient), self.problem.unit._replace(splits_rows=True)
        problem, kept = self.problem._replace(unit=unit), memory.kept.at[place]
        rows = None if problem.by_key else self.mine(unit)
        for start in range(0, problem.shapes.H, WIDTH):
            total = tensor_memory.load(unit, memory.sum_of(self.which, gradient, start, WIDTH))
            tensor_memory.wait_for_loads(unit)
            (found,) = finished(problem, {gradient: total}, rows)
            kept[:, pl.ds(start, WIDTH)] = found.astype(kept.dtype)
        store([(kept, results[place].at[*self.own])])


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _gradients(
    problem: GPUProblem,
    spec: Spec,
    per_query: tuple[Array, ...],
    key: Array,
    value: Array,
    which: tuple[int, ...],
) -> list[Array]:
    """Those of queries, or `which` of keys and values where `problem.by_key`."""
    unit, groups, by_key = problem.unit, _groups(problem), problem.by_key
    if problem.shapes.H > _WIDE:  # what is left of shared memory
        problem = problem._replace(max_streamed_arrays=1 if by_key else 2)

    def run(program: _Program, results: Ref, scratch: Ref) -> None:
        memory = _Memory(*scratch)
        works = program.copy, program.multiply, functools.partial(program.compute, results=results)
        tensor_memory.by_role(unit, groups, *(functools.partial(x, memory) for x in works))

    gradient = ("keys" if _KEYS in which else "values") if by_key else "queries"
    name = f"jattn_blackwell_d_{gradient}"
    call = problem, spec, per_query, key, value, which
    size = problem.share if by_key else TENSOR_ROWS
    scratch, computing = _Memory.scratch(problem, which), tensor_memory.warpgroups(unit, groups)
    return backward.launched(name, _Program, call, size, run, scratch, computing)


def _columns(spec: Spec, by_key: bool) -> int:
    return 32 if by_key or _is_long(spec, by_key=False) else 64


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    fits = (width <= _WIDE and not _is_long(spec, by_key) for by_key in (False, True))
    keys, queries = (128 if x else 64 for x in fits)
    return keys, queries


def _is_long(spec: Spec, by_key: bool) -> bool:
    """Whether a tile's scores and their derivative need more registers than 64 columns leave: of
    all score functions but one that is linear, by places; and with dropout beside any, or by keys,
    where hashes are of columns."""
    chain = scores.in_order(spec.score)
    others = any(isinstance(x, scores.SoftCap | scores.Score) for x in chain)
    by_positions = bool(chain) and not hoisted.positions_are_places(spec)
    drops = spec.dropout_rate > 0 and (by_key or bool(chain))
    return drops or others or len(chain) > 1 or by_positions


BACKWARD = mosaic_call.Backward(
    rows=lambda _: TENSOR_ROWS,
    streamed=_streamed,
    products=Products.TENSOR_MEMORY,
    run=_gradients,
    columns=_columns,
    of_parameters=ampere.BACKWARD,
)
