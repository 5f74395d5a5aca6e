"""A call as the warpgroups of a kernel compute it: its sizes in whole tiles, and its spec."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jattn import dropout
from jattn._types import AnyArray, Index
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.machine.registers import Unit, Value
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.tile import kernel_refs
from jattn.kernels.gpu.mosaic.tile.factors import Factors, is_unmodified
from jattn.kernels.gpu.mosaic.tile.kernel_refs import TileIndex
from jattn.kernels.gpu.mosaic.tile.register_tile import InMemory, RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs
from jattn.spec import Shapes, Spec, Tiling


class Problem(NamedTuple):
    """The sizes of a call in whole tiles, the tiles of a program and the spec as its warpgroups
    read it: each has some of the program's queries, or of its keys if `by_key`."""

    shapes: Shapes
    tiling: Tiling
    rules: SpecRefs
    unit: Unit
    factors: Factors
    approximate: bool
    special: bool
    drops: bool
    unmodified: bool
    most_beside: int | None = None

    @classmethod
    def of(
        cls,
        spec: Spec,
        shapes: Shapes,
        tiling: Tiling,
        unit: Unit,
        refs: Callable[..., SpecRefs] = SpecRefs,
        columns: int | None = None,
    ) -> "Problem":
        """A warpgroup computes so many `columns` of a tile at once, or all."""
        by_key = unit.transposed
        (q, kv), rows = (x if columns is None else min(x, columns) for x in tiling), unit.rows
        own = Tiling(q, rows) if by_key else Tiling(rows, kv)
        # Rows that come by have their hashes with them, others make theirs once.
        spec = dropout.hashed(spec, shapes, rows=by_key)
        factors, spec = Factors.of(spec)
        rules, drops = refs(spec, own, by_key), spec.dropout_rate > 0
        unit = unit._replace(apart=by_key or rules.differs_by_key())
        operations, unmodified = _operations(spec, rules), is_unmodified(spec)
        how = _approximate(spec, operations), bool(operations & _SPECIAL), drops, unmodified
        return cls(shapes, tiling, rules, unit, factors, *how)

    @property
    def by_key(self) -> bool:
        return self.unit.transposed

    @property
    def streamed(self) -> int:
        """Queries of a tile if `by_key`, else keys: of those that come by."""
        return self.tiling[0 if self.by_key else 1]

    @property
    def share(self) -> int:
        """Columns of a tile that a warpgroup computes at once."""
        return self.rules.sizes["T" if self.by_key else "S"]

    @property
    def shares(self) -> int:
        """Parts of so many columns of one tile."""
        return self.streamed // self.share

    @property
    def groups(self) -> int:
        """Warpgroups of a program that keep queries, or keys if `by_key`."""
        return self.tiling[1 if self.by_key else 0] // self.unit.rows

    @property
    def blocks(self) -> tuple[int, int]:
        """How many of queries and of keys."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    def parts(self) -> int:
        """The number of parts of the keys, each of which a program of its own attends to."""
        queries, keys = self.blocks
        return block_mask.parts(self.shapes.B * self.shapes.N * queries, keys)

    @property
    def heads(self) -> int:
        """Query heads that share what a program keeps."""
        return self.shapes.G if self.by_key else 1

    def visits(self, spec: Spec) -> block_mask.BlockMask:
        """The tiles that each block of queries visits, or of keys if `by_key`."""
        return block_mask.of(self.kinds(spec), by_key=self.by_key).compact()

    def kinds(self, spec: Spec) -> AnyArray:
        """The tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    @property
    def beside(self) -> list[int]:
        """Which of the spec's arrays come by in shared memory, beside a tile of keys (queries):
        `most_beside` of them, or all."""
        along = self.rules.along("T" if self.by_key else "S")
        return [] if self.unit.by_warp else along[: self.most_beside]

    def scratch_beside(self, *places: int) -> list[Any]:
        """Shared memory for these, for so many tiles."""
        arrays = [self.rules.arrays[i] for i in self.beside]
        return [mosaic().SMEM((*places, self.share), x.dtype) for x in arrays]

    def parts_beside(self, leaves: list[Any], place: TileIndex) -> list[Any]:
        """A tile's parts of these in global memory."""
        parts = self.rules.parts(leaves, place)
        return [memory.at[index] for memory, index in (parts[i] for i in self.beside)]

    def numbers(self, leaves: list[Any], b: Index, h: Index) -> dict[int, Value]:
        """Those of the spec's arrays that are a number for all tiles of a head."""
        place = TileIndex(b, h, 0, 0)
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        alike = ((i, x, y) for i, (x, y) in parts if i not in self.rules.varying)
        return {i: self.unit.read(*x, y) for i, x, y in alike}

    def tile(
        self, leaves: list[Any], place: TileIndex, numbers: dict[int, Value]
    ) -> "RegisterTile":
        """What a tile needs beside `numbers`, read before the products that are waited for, but for
        what comes by in shared memory."""
        unit, tables = self.unit, {i: InMemory(leaves[i]) for i in self.rules.tables}
        known = dict.fromkeys(self.beside) | tables | numbers
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        read = [known[i] if i in known else unit.read(*x, letters) for i, (x, letters) in parts]
        return RegisterTile(unit, self.shapes, self.rules, read, place)


# What is only approximated by the instructions for it, too roughly for functions of positions; the
# error of tanh is 5e-4, about what rounding to 16 bits is.
_ROUGH = frozenset("sin cos tan log log1p".split())


# What the unit that computes 2^x computes too.
_SPECIAL = _ROUGH | frozenset("erf exp exp2 logistic rsqrt sqrt tanh".split())


def _operations(spec: Spec, rules: SpecRefs) -> frozenset[str]:
    """What score functions and their derivatives are made of."""
    if spec.score is None:
        return frozenset()
    function, operands = rules.example()
    return frozenset(kernel_refs.primitives(jax.make_jaxpr(function)(*operands).jaxpr))


def _approximate(spec: Spec, operations: frozenset[str]) -> bool:
    """Whether approximate instructions will do; that for exp2 always would."""
    exact = spec.precision in ("highest", "float32", lax.Precision.HIGHEST)
    return not operations & (_ROUGH | {"tanh", "logistic"} if exact else _ROUGH)
