"""A call as the warpgroups of a kernel compute it: its sizes in whole tiles, and its spec."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import jaxprs_in_params

from jattn import dropout
from jattn._types import AnyArray, Index
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.machine.registers import RegisterValue, Unit
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.tile.factors import Factors, is_unmodified
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import Table
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs, TileIndex
from jattn.spec import Shapes, Spec, Tiling


class GPUProblem(NamedTuple):
    """The sizes of a call in whole tiles, the tiles of a program, and the spec.

    Each warpgroup keeps some of the program's queries or, with `by_key`, of its keys; tiles of keys
    or queries are streamed past them. `max_streamed_arrays` limits the arrays of the spec that are
    streamed through shared memory with them.
    """

    shapes: Shapes
    tiling: Tiling
    refs: SpecRefs
    unit: Unit
    factors: Factors
    approximate: bool
    special: bool
    drops: bool
    unmodified: bool
    max_streamed_arrays: int | None = None

    @classmethod
    def of(
        cls,
        spec: Spec,
        shapes: Shapes,
        tiling: Tiling,
        unit: Unit,
        refs: Callable[..., SpecRefs] = SpecRefs,
        columns: int | None = None,
    ) -> "GPUProblem":
        """Makes the problem; a warpgroup computes `columns` of a tile at once, by default all."""
        by_key = unit.transposed
        q, kv = (x if columns is None else min(x, columns) for x in tiling)
        # Streamed queries have their hashes with them; others compute theirs once.
        spec = dropout.hashed(spec, shapes, rows=by_key)
        factors, spec = Factors.of(spec)
        tile = Tiling(q, unit.rows) if by_key else Tiling(unit.rows, kv)
        spec_refs = refs(spec, tile, by_key)
        operations = _operations(spec, spec_refs)
        return cls(
            shapes,
            tiling,
            spec_refs,
            unit._replace(splits_rows=by_key or spec_refs.differs_by_key()),
            factors,
            _approximate(spec, operations),
            bool(operations & _SPECIAL),
            spec.dropout_rate > 0,
            is_unmodified(spec),
        )

    @property
    def by_key(self) -> bool:
        return self.unit.transposed

    @property
    def streamed(self) -> int:
        """The number of queries of a streamed tile with `by_key`, else of keys."""
        return self.tiling[0 if self.by_key else 1]

    @property
    def share(self) -> int:
        """The number of columns of a tile that a warpgroup computes at once."""
        return self.refs.sizes["T" if self.by_key else "S"]

    @property
    def shares(self) -> int:
        """The number of such shares of a tile."""
        return self.streamed // self.share

    @property
    def groups(self) -> int:
        """The number of warpgroups of a program that keep queries, or keys with `by_key`."""
        return self.tiling[1 if self.by_key else 0] // self.unit.rows

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of query blocks and of key blocks."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    def parts(self) -> int:
        """The number of parts of the keys, each of which a program of its own attends to."""
        queries, keys = self.blocks
        return block_mask.parts(self.shapes.B * self.shapes.N * queries, keys)

    @property
    def heads(self) -> int:
        """The number of query heads that share the keys of a program; 1 without `by_key`."""
        return self.shapes.G if self.by_key else 1

    def visits(self, spec: Spec) -> block_mask.BlockMask:
        """Returns the tiles that each block of queries visits, or of keys with `by_key`."""
        return block_mask.of(self.kinds(spec), by_key=self.by_key).compact()

    def kinds(self, spec: Spec) -> AnyArray:
        """Returns the tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    @property
    def streamed_arrays(self) -> list[int]:
        """The numbers of the spec's arrays that are streamed with a tile of keys (queries)."""
        along = self.refs.along("T" if self.by_key else "S")
        return [] if self.unit.by_warp else along[: self.max_streamed_arrays]

    def streamed_scratch(self, *places: int) -> list[Any]:
        """Shared memory for the streamed arrays of some tiles."""
        arrays = [self.refs.arrays[i] for i in self.streamed_arrays]
        return [mosaic().SMEM((*places, self.share), x.dtype) for x in arrays]

    def streamed_parts(self, leaves: list[Any], index: TileIndex) -> list[Any]:
        """A tile's parts of the streamed arrays, in global memory."""
        parts = self.refs.parts(leaves, index)
        return [memory.at[part] for memory, part in (parts[i] for i in self.streamed_arrays)]

    def constants(self, leaves: list[Any], b: Index, h: Index) -> dict[int, RegisterValue]:
        """Reads the arrays of the spec that are one number for all tiles of a head."""
        return self._read(leaves, TileIndex(b, h, 0, 0), self.refs.varying)

    def tile(
        self, leaves: list[Any], index: TileIndex, constants: dict[int, RegisterValue]
    ) -> RegisterTile:
        """Reads a tile's parts of the spec's arrays, except those that are streamed.

        It is called before the wait for products.
        """
        known: dict[int, Any] = dict.fromkeys(self.streamed_arrays) | constants
        for i, x in self.refs.tables.items():
            look_up = functools.partial(self.unit.look_up, leaves[i])
            table = Table(x.shape, x.dtype, look_up, self.refs.interval(i))
            known[i] = RegisterValue(table, x, "")
        parts = known | self._read(leaves, index, [*known])
        return RegisterTile(
            self.unit, self.shapes, self.refs, [parts[i] for i in range(len(leaves))], index
        )

    def _read(
        self, leaves: list[Any], index: TileIndex, omitted: list[int]
    ) -> dict[int, RegisterValue]:
        pairs = enumerate(zip(self.refs.parts(leaves, index), self.refs.letters, strict=True))
        return {i: self.unit.read(*x, letters) for i, (x, letters) in pairs if i not in omitted}


# Operations that special instructions approximate, too roughly for functions of positions. The
# error of tanh is 5e-4, about that of rounding to 16 bits.
_ROUGH = frozenset("sin cos tan log log1p".split())


# Operations that the unit for 2^x computes too.
_SPECIAL = _ROUGH | frozenset("erf exp exp2 logistic rsqrt sqrt tanh".split())


def _operations(spec: Spec, refs: SpecRefs) -> set[str]:
    """Returns the names of the operations of score functions and their derivatives."""
    if spec.score is None:
        return set()
    function, operands = refs.example()
    return _primitives(jax.make_jaxpr(function)(*operands).jaxpr)


def _primitives(jaxpr: Any) -> set[str]:
    names = {equation.primitive.name for equation in jaxpr.eqns}
    inner = [x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params)]
    return names.union(*map(_primitives, inner))


def _approximate(spec: Spec, operations: set[str]) -> bool:
    """Returns whether approximate instructions suffice. For exp2 they always do."""
    exact = spec.precision in ("highest", "float32", lax.Precision.HIGHEST)
    return not operations & (_ROUGH | {"tanh", "logistic"} if exact else _ROUGH)
