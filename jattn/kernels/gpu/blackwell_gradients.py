"""Gradients of queries, and of keys and values, on Blackwell GPUs, by their fifth matrix units and
tensor memory.

A program keeps 128 queries, or keys. As in the forward pass a warp copies the tiles that come by,
and another starts products: kept rows times streamed ones, once for scores and once for the
cotangents of weights, which one or two warpgroups take to registers, 64 columns each. What these
make of them goes back to its place in tensor memory, as the left side of a product that is added to
a gradient there. The matrix units multiply for the last tile while weights of the next one are
computed: that order is FlashAttention-4's (Zadouri et al. 2026).

Of that three things are missing: that the matrix units do not wait for products whose operands the
next ones overwrite, powers of two by products, and pairs of multiprocessors.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn.kernels.gpu import ampere, backward, mosaic_call, tensor_memory
from jattn.kernels.gpu.registers import TENSOR_ROWS, WIDTH, Problem, Products, Tile, mosaic
from jattn.kernels.gpu.tile_weights import Rows, d_products_then, finished, weights_first
from jattn.kernels.gpu.warpgroups import Ring, store, tiles_in_memory
from jattn.spec import Spec


_KEYS, _VALUES = 0, 1  # gradients of keys, or of queries, and of values
_SHARE = 64  # columns of a tile that a warpgroup has in registers, twice
# Head size of which two gradients and two tiles of 128 columns fill tensor memory, which has 512,
# and two places for such tiles fit shared memory beside the rows that are kept.
_WIDE = 128


class _Memory(NamedTuple):
    """In shared memory: the `kept` rows, which results leave through; tiles that come by, `first`
    of queries (keys) and `second` of d_out (values), and numbers of rows and the spec's arrays
    `beside` them. In tensor memory: `scores`, an alternative of which are weights; `pulled`, the
    cotangents of weights, or else of scores; and gradients, the `sums`.

    Barriers: rows are `loaded`; the matrix units have `scored` a tile and pulled its cotangents
    `back`, `added` a product to each gradient, and are `done` with all; computing warpgroups have
    `weighed` the scores of a tile and `derived` the cotangents of these.
    """

    kept: Any
    first: Ring
    second: Ring
    beside: tuple[Ring, ...]
    scores: Any
    pulled: Any
    sums: Any
    loaded: Any
    scored: Any
    weighed: Any
    back: Any
    derived: Any
    added: Any
    done: Any

    @classmethod
    def scratch(cls, problem: Problem, which: tuple[int, ...]) -> "_Memory":
        shapes, size, unit, groups = problem.shapes, problem.streamed, problem.unit, problem.shares
        barrier = functools.partial(tensor_memory.barrier, unit)
        tensors = functools.partial(tensor_memory.scratch, unit)

        def tile() -> Any:  # and in its place, of half the columns, one of 16 bits
            narrow = tensors(2 * size, shapes.dtype)
            return tensor_memory.alternatives(unit, tensors(size), narrow)

        def ring(places: int) -> Ring:
            tiles = tiles_in_memory(places, size, shapes.H, shapes.dtype)
            return Ring.scratch(tiles, free=barrier(places))

        fits = shapes.H <= _WIDE
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

    def sum_of(self, which: tuple[int, ...], gradient: int, start: int, size: int) -> Any:
        width = self.kept.shape[2]
        return self.sums.at[:, pl.ds(which.index(gradient) * width + start, size)]


def _kept(which: tuple[int, ...]) -> int:
    """How many tiles of rows a program keeps: of keys alone where only values have gradients."""
    return 2 if _KEYS in which else 1


def _beside(problem: Problem, places: int) -> tuple[Ring, ...]:
    """A ring of what belongs to the columns of tiles, by shares; none if there is nothing."""
    groups = problem.shares
    arrays = problem.scratch_beside(places, groups)
    copies = len(arrays) * groups
    if problem.by_key:
        arrays, copies = (
            [mosaic().SMEM((places, groups, 3 * _SHARE), "float32"), *arrays],
            copies + 1,
        )
    if not arrays:
        return ()
    used = mosaic().Barrier(num_barriers=places, num_arrivals=groups)
    return (Ring.scratch(*arrays, free=used, copies=copies),)


class _Program(backward.Program):
    """128 queries or, `by_key`, 128 keys."""

    @property
    def own(self) -> Any:
        return self.at[0], pl.ds(self.at[2] * TENSOR_ROWS, TENSOR_ROWS), self.at[1]

    def share(self, h: Any, x: Any, group: Any) -> Any:
        """Where a warpgroup's columns of block x of a head are."""
        column = x * self.problem.streamed + group * _SHARE
        return self.place(h, self.at[2] * TENSOR_ROWS, column)

    def copy(self, memory: _Memory) -> None:
        """What the warp does that only copies."""
        groups = self.problem.shares
        for i in range(memory.kept.shape[0]):
            mosaic().copy_gmem_to_smem(self.kept[i].at[self.own], memory.kept.at[i], memory.loaded)

        def step(h: Any, x: Any, masked: bool, turn: Any) -> Any:
            first, second = self.tiles(h, x)
            memory.first.fill(turn, first)
            places = [self.share(h, x, group) for group in range(groups)]
            shares = [self.problem.parts_beside(self.leaves, place) for place in places]
            blocks = pl.ds(x * groups, groups)
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

        def step(h: Any, x: Any, masked: bool, turn: Any) -> Any:
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

    def score(self, memory: _Memory, turn: Any) -> None:
        """Starts the products of queries and keys of a turn."""
        unit = self.problem.unit
        memory.first.wait(turn)
        (tile,) = memory.first.at(turn)
        tensor_memory.multiply(unit, memory.scores[0], memory.kept.at[0], tile, transposed=True)
        free = [] if _KEYS in self.which else [memory.first.freed(turn)]
        tensor_memory.commit(unit, *free, memory.scored)

    def pull(self, memory: _Memory, turn: Any) -> None:
        """Starts the products of d_out and values of a turn."""
        unit = self.problem.unit
        memory.second.wait(turn)
        if _KEYS not in self.which:
            return
        (tile,) = memory.second.at(turn)
        tensor_memory.multiply(unit, memory.pulled[0], memory.kept.at[1], tile, transposed=True)
        free = [] if _VALUES in self.which else [memory.second.freed(turn)]
        tensor_memory.commit(unit, *free, memory.back)

    def add_values(self, memory: _Memory, turn: Any) -> None:
        """Starts to add the weighted rows of d_out, once there are weights. Scores of another turn
        may be written over these afterwards."""
        mosaic().barrier_wait(memory.weighed)
        if _VALUES in self.which:
            self.add(memory, _VALUES, memory.scores[1], memory.second, turn)

    def add_keys(self, memory: _Memory, turn: Any) -> None:
        """Starts to add the rows of queries (keys) times the cotangents of scores, likewise."""
        if _KEYS in self.which:
            mosaic().barrier_wait(memory.derived)
            self.add(memory, _KEYS, memory.pulled[1], memory.first, turn)

    def add(self, memory: _Memory, gradient: int, factors: Any, ring: Ring, turn: Any) -> None:
        unit, width = self.problem.unit, self.problem.shapes.H
        (tile,) = ring.at(turn)
        total = memory.sum_of(self.which, gradient, 0, width)
        for group in range(self.problem.shares):
            rows = tile.at[pl.ds(group * _SHARE, _SHARE)]
            tensor_memory.multiply(unit, total, _narrow(factors, group), rows)
        # They lie where the products of the next turn are written.
        added = memory.added.at[gradient]
        tensor_memory.commit(unit, ring.freed(turn), added)
        mosaic().barrier_wait(added)

    # --- weights --------------------------------------------------------------------------------

    def compute(self, memory: _Memory, group: Any, results: Any) -> None:
        """What a warpgroup does that computes."""
        unit, by_key = self.problem.unit, self.problem.by_key
        mine = None if by_key else self.mine(unit)
        numbers = {} if self.problem.heads > 1 else self.problem.numbers(self.leaves, *self.at[:2])
        self.each(group, functools.partial(self.clear, memory))
        tensor_memory.wait_for_stores(unit)

        def step(h: Any, x: Any, masked: bool, turn: Any) -> Any:
            here = self.problem.tile(self.leaves, self.share(h, x, group), numbers)
            rows: Any = mine
            for ring in memory.beside:
                ring.wait(turn)
                beside = [array.at[group] for array in ring.at(turn)]
                if by_key:
                    rows, beside = Rows.read(unit, beside[0]), beside[1:]
                here = here.completed(beside)
                mosaic().commit_smem()  # copies may write then to what was read
                mosaic().barrier_arrive(ring.freed(turn))
            found = self.weigh(memory, group, here, masked, rows)
            if _KEYS in self.which:
                self.derive(memory, group, here, masked, rows, found)
            return turn + 1

        self.fold(step, jnp.int32(0))
        mosaic().barrier_wait(memory.done)
        self.each(group, functools.partial(self.leave, memory, results))

    def mine(self, unit: Any) -> Rows:
        """Of the queries that are kept."""
        return Rows.read(unit, self.rows, *self.at)

    def weigh(self, memory: _Memory, group: Any, here: Tile, masked: bool, rows: Rows) -> Any:
        """Weights from the scores of a turn."""
        unit, scores = self.problem.unit, memory.scores
        mosaic().barrier_wait(memory.scored)
        products = tensor_memory.load(unit, scores[0].at[:, pl.ds(group * _SHARE, _SHARE)])
        tensor_memory.wait_for_loads(unit)
        if _VALUES not in self.which:
            mosaic().barrier_arrive(memory.weighed)
        if not self.problem.by_key:
            rows = rows._replace(log_total=None)
        first = functools.partial(weights_first, masked, self.problem.scale)
        weights, *found = here.run_typed(first, products, rows)
        if _VALUES in self.which:
            weights = weights.value.astype(self.problem.shapes.dtype)
            tensor_memory.store(unit, _narrow(scores[1], group), weights)
            tensor_memory.wait_for_stores(unit)
            mosaic().barrier_arrive(memory.weighed)
        return found

    def derive(
        self, memory: _Memory, group: Any, here: Tile, masked: bool, rows: Rows, found: Any
    ) -> None:
        """The cotangents of a turn's scores, from those of weights."""
        unit, pulled = self.problem.unit, memory.pulled
        mosaic().barrier_wait(memory.back)
        d_weights = tensor_memory.load(unit, pulled[0].at[:, pl.ds(group * _SHARE, _SHARE)])
        tensor_memory.wait_for_loads(unit)
        then = functools.partial(d_products_then, masked)
        d_scores = here.run(then, *found, d_weights, rows).astype(self.problem.shapes.dtype)
        tensor_memory.store(unit, _narrow(pulled[1], group), d_scores)
        tensor_memory.wait_for_stores(unit)
        mosaic().barrier_arrive(memory.derived)

    # --- gradients ------------------------------------------------------------------------------

    def each(self, group: Any, function: Any) -> None:
        """`function(gradient)` of each gradient in a warpgroup of its own, or in the only one."""
        for place, gradient in enumerate(self.which):
            pl.when(group == place % self.problem.shares)(functools.partial(function, gradient))

    def clear(self, memory: _Memory, gradient: int) -> None:
        unit = self.problem.unit
        zeros = unit.lay(jnp.zeros((TENSOR_ROWS, WIDTH), jnp.float32), "ts")
        for start in range(0, self.problem.shapes.H, WIDTH):
            part = memory.sum_of(self.which, gradient, start, WIDTH)
            tensor_memory.store(unit, part, zeros)

    def leave(self, memory: _Memory, results: Any, gradient: int) -> None:
        """A gradient, as shared memory takes it without conflicts between its banks."""
        place, unit = self.which.index(gradient), self.problem.unit._replace(apart=True)
        problem, kept = self.problem._replace(unit=unit), memory.kept.at[place]
        rows = None if problem.by_key else self.mine(unit)
        for start in range(0, problem.shapes.H, WIDTH):
            total = tensor_memory.load(unit, memory.sum_of(self.which, gradient, start, WIDTH))
            tensor_memory.wait_for_loads(unit)
            (found,) = finished(problem, {gradient: total}, rows)
            kept[:, pl.ds(start, WIDTH)] = found.astype(kept.dtype)
        store([(kept, results[place].at[*self.own])])


def _narrow(tile: Any, group: Any) -> Any:
    """A warpgroup's share of a tile of 16 bits: where its share of the wide one begins, so that no
    other's is overwritten."""
    return tile.at[:, pl.ds(2 * group * _SHARE, _SHARE)]


def _gradients(
    problem: Problem, spec: Spec, per_query: Any, key: Array, value: Array, which: tuple[int, ...]
) -> list[Array]:
    """Those of queries, or `which` of keys and values where `problem.by_key`."""
    unit, groups, by_key = problem.unit, problem.shares, problem.by_key
    if problem.shapes.H > _WIDE:  # what is left of shared memory
        problem = problem._replace(most_beside=1 if by_key else 2)

    def run(program: _Program, results: Any, scratch: Any) -> None:
        memory = _Memory(*scratch)
        works = program.copy, program.multiply, functools.partial(program.compute, results=results)
        tensor_memory.by_role(unit, groups, *(functools.partial(x, memory) for x in works))

    gradient = ("keys" if _KEYS in which else "values") if by_key else "queries"
    name = f"jattn_blackwell_d_{gradient}"
    call = problem, spec, per_query, key, value, which
    size = _SHARE if by_key else TENSOR_ROWS
    scratch, computing = _Memory.scratch(problem, which), tensor_memory.warpgroups(unit, groups)
    return backward.launched(name, _Program, call, size, run, scratch, computing)


BACKWARD = mosaic_call.Backward(
    rows=lambda _: TENSOR_ROWS,
    streamed=lambda _, width: (128, 128) if width <= _WIDE else (64, 64),
    products=Products.TENSOR_MEMORY,
    run=_gradients,
    columns=_SHARE,
    of_parameters=ampere.BACKWARD,
)
