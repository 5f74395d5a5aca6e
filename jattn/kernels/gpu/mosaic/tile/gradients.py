"""The gradients of a tile in registers, from its recomputed weights."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._pytree import split_letters
from jattn._types import Index, Ref, Tree
from jattn.kernels.common.slicing import HeadTile
from jattn.kernels.gpu.mosaic.machine import matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import RegisterLayout
from jattn.kernels.gpu.mosaic.tile.online_softmax import exponents, times
from jattn.kernels.gpu.mosaic.tile.problem import (
    LOG2E,
    Factors,
    GPUProblem,
    RegisterTile,
    is_unmodified,
)
from jattn.spec import Spec, has_mask, parameter_letters, parameters, with_parameters


_MAX_SUM = 256.0  # smaller float32 numbers have at least 15 binary digits behind the point


class RowStatistics(NamedTuple):
    """Three numbers of each query of a tile for the backward pass.

    shift: what the softmax subtracts from scores, in the units of `Factors.score_units`.
    log_total: the base-2 log of the total; None if it is part of the shift, or applied at the end.
    minus_delta: −delta, divided by the scale of dropout; delta = rowsum(d_out · out) − d_lse.
    """

    shift: Array
    log_total: Any
    minus_delta: Array

    @classmethod
    def stacked(cls, factors: Factors, per_query: Tree, size: int) -> tuple[Array, Array]:
        """Stacks maximum, log_total and delta `[B, T, N]` to `[B, N, blocks, 3 × size]`.

        `log_total` is added to the shift and replaced by 0, except in heads in which a sum would
        have too few digits. The second result, booleans `[B, N]`, tells which heads these are.
        """
        # XLA would transpose delta within its sum over V, which then takes five times as long.
        per_query = lax.optimization_barrier(tuple(per_query))
        maximum, log_total, delta = (jnp.swapaxes(x, 1, 2) for x in per_query)
        unit = factors.log2_units
        shift, log_total = maximum * (LOG2E / unit), log_total * LOG2E
        total = shift + log_total / unit
        fits = jnp.abs(total) < _MAX_SUM
        is_large = jnp.any(~fits, axis=2)
        separate = is_large[..., None]
        shift = jnp.where(separate, shift, total)
        log_total = jnp.where(separate, log_total, 0)
        statistics = cls(shift, log_total, delta * (-1 / factors.dropout_scale))
        stacked = jnp.stack(statistics, axis=2)
        blocks = stacked.reshape(*stacked.shape[:3], -1, size).swapaxes(2, 3)
        return blocks.reshape(*blocks.shape[:3], 3 * size), is_large

    @classmethod
    def read(cls, unit: Unit, memory: Ref, *block: Index) -> "RowStatistics":
        """Reads the statistics of a block of queries from shared or global memory."""
        letters = [""] * len(block) + ["t"]
        size = memory.shape[-1] // 3
        slices = [pl.ds(i * size, size) for i in range(3)]
        return cls(*(unit.read(memory, (*block, x), letters).value for x in slices))


class Parameter(NamedTuple):
    """A parameter of the score function.

    which: its index in `parameters(spec)`.
    sizes: its sizes for one head, by axis name.
    separate: the number of batch rows and of heads that have entries of their own.
    """

    which: int
    sizes: dict[str, int]
    separate: tuple[int, int]

    @classmethod
    def of(cls, spec: Spec, which: int) -> "Parameter":
        leaf, letters = parameters(spec)[which], parameter_letters(spec)[which]
        axis_letters = split_letters(letters) or [str(axis) for axis in range(leaf.ndim)]
        sizes = dict(zip(axis_letters, leaf.shape, strict=True))
        return cls(which, sizes, (sizes.pop("*B", 1), sizes.pop("N", 1)))

    @property
    def looked_up(self) -> bool:
        """Whether a tile may read any of its entries, not only those of its queries or keys."""
        return not set(self.sizes) <= {"T", "S"}

    @property
    def by_distance(self) -> bool:
        """Whether it has an entry for each distance, so that a tile reads one for each diagonal."""
        return "distances" in self.sizes

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a tile's gradient `[t, s]` that kernels do not sum over, at least one."""
        if self.by_distance:
            return 0, 1
        return tuple(axis for axis, x in enumerate("TS") if self.runs_along(x)) or (0,)

    def runs_along(self, letter: str) -> bool:
        """Returns whether the parameter has several entries along T or S."""
        return self.sizes.get(letter, 1) > 1

    def shared(self, B: int, N: int) -> tuple[int, int]:
        """Returns the number of batch rows and of heads of a call that share their entries."""
        batch, heads = self.separate
        return 1 if batch > 1 else B, 1 if heads > 1 else N

    def of_heads(self, sums: Array) -> Array:
        """Returns the gradient for each head, `[B, N, ...]`, from `sums [B, N, T]` over keys or
        `[B, N, S]` over queries."""
        if not any(map(self.runs_along, "TS")):
            sums = sums.sum(axis=2)
        return sums.reshape(*sums.shape[:2], *self.sizes.values())


class Derivation(NamedTuple):
    """The derivatives of a tile, whose scores need the mask if `masked`.

    Its methods take `products` q kᵀ, the cotangents of weights, `d_weights` = d_out vᵀ, and the
    `statistics` of the tile's queries. "Dropped weights" are weights after dropout, which sets some
    to 0 and does not scale the others. "Signed weights" are weights before dropout, with a negative
    sign where dropout sets them to 0.
    """

    masked: bool
    factors: Factors

    def d_products(
        self, tile: HeadTile, products: Array, d_weights: Array, statistics: RowStatistics
    ) -> tuple[Array, Array]:
        """Returns the cotangent of q kᵀ, without `factors.gradient`, and the dropped weights."""
        products = times(products, self.factors.product_factor)
        if is_unmodified(tile.spec):
            weights = self._product_weights(tile, products, statistics)
            dropped = tile.drop_unscaled(weights)
            return self._d_unmodified(tile, weights, dropped, d_weights, statistics), dropped
        score, pull = self._score_and_pull(tile, products)
        weights = self._weights(score, statistics)
        dropped = tile.drop_unscaled(weights)
        (gradient,) = pull(_d_scores(tile.spec, weights, dropped, d_weights, statistics))
        if self.masked:  # at the end: weights and gradients of masked pairs may be NaN
            excluded = score == -jnp.inf
            dropped, gradient = jnp.where(excluded, 0, dropped), jnp.where(excluded, 0, gradient)
        return gradient, dropped

    def weights_first(
        self, tile: HeadTile, products: Array, statistics: RowStatistics
    ) -> tuple[Array, Array, Any]:
        """Computes what depends on `products` only, before `d_weights` are computed.

        Returns the dropped weights and, for `d_products_then`, the signed weights and the pullback
        of the scores, or None if scores are the products.
        """
        products, pull = times(products, self.factors.product_factor), None
        if is_unmodified(tile.spec):
            weights = self._product_weights(tile, products, statistics)
        else:
            score, pull = self._score_and_pull(tile, products)
            weights = self._weights(score, statistics)
            weights = jnp.where(score == -jnp.inf, 0, weights) if self.masked else weights
        # The sign saves registers: it tells whether dropout keeps a weight.
        signed = jnp.where(tile.keeps(), weights, -weights) if tile.spec.dropout_rate else weights
        return _unsigned(tile, signed)[1], signed, pull

    def d_products_then(
        self, tile: HeadTile, signed: Array, pull: Any, d_weights: Array, statistics: RowStatistics
    ) -> Array:
        """Returns the cotangent of q kᵀ, without `factors.gradient`, from the results of
        `weights_first`."""
        weights, dropped = _unsigned(tile, signed)
        if not tile.spec.dropout_rate:
            d_weights = d_weights + statistics.minus_delta[:, None]
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, statistics)
        if pull is not None:
            (gradient,) = pull(gradient)
        # The gradient of a masked pair, whose weight is 0, may be NaN.
        return jnp.where(weights == 0, 0, gradient) if self.masked else gradient

    def d_signed(
        self, tile: HeadTile, signed: Array, d_weights: Array, statistics: RowStatistics
    ) -> tuple[Array, Array]:
        """Computes the results of `d_products` from signed weights, if scores are unmodified."""
        weights, dropped = _unsigned(tile, signed)
        return self._d_unmodified(tile, weights, dropped, d_weights, statistics), dropped

    def d_parameter(
        self,
        tile: HeadTile,
        products: Array,
        d_weights: Array,
        statistics: RowStatistics,
        parameter: Parameter,
    ) -> Array:
        """Returns a tile's term of the gradient of a parameter, without `score_factor` and
        `dropout_scale`."""
        products = times(products, self.factors.product_factor)
        score, slope = with_slope(tile, parameter.which, products, self.masked)
        weights = self._weights(score, statistics)
        dropped = tile.drop_unscaled(weights)
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, statistics) * slope
        if self.masked:  # else masked pairs would be NaN if a query's weights are NaN
            gradient = jnp.where(score == -jnp.inf, 0, gradient)
        return jnp.sum(gradient, axis=tuple({0, 1} - set(parameter.axes)))

    def _score_and_pull(self, tile: HeadTile, products: Array) -> tuple[Array, Any]:
        """Returns scores, and their pullback without the mask."""
        score, pull = jax.vjp(lambda x: tile.modify(x, False), products)
        return (jnp.where(_allowed(tile), score, -jnp.inf) if self._masks(tile) else score), pull

    def _masks(self, tile: HeadTile) -> bool:
        """Returns whether the mask must be applied."""
        return self.masked and has_mask(tile.spec)

    def _product_weights(self, tile: HeadTile, products: Array, statistics: RowStatistics) -> Array:
        """Returns the weights of scores that are products: 0 for masked pairs, also of a query
        whose other weights are NaN."""
        weights = self._weights(products, statistics)
        return jnp.where(_allowed(tile), weights, 0) if self._masks(tile) else weights

    def _d_unmodified(
        self,
        tile: HeadTile,
        weights: Array,
        dropped: Array,
        d_weights: Array,
        statistics: RowStatistics,
    ) -> Array:
        """Returns the cotangent of products that are scores: 0 for masked pairs."""
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, statistics)
        return jnp.where(weights == 0, 0, gradient) if self._masks(tile) else gradient

    def _weights(self, score: Array, statistics: RowStatistics) -> Array:
        """Returns the weights of a tile.

        Only a masked tile may have a separate log of the total: see `stacked` and
        `BlockMask.without_full`.
        """
        exponent = exponents(self.factors, score, statistics.shift)
        if self.masked and statistics.log_total is not None:
            exponent = exponent - statistics.log_total[:, None]
        return jnp.exp2(exponent)


def _d_scores(
    spec: Tree, weights: Array, dropped: Array, d_weights: Array, statistics: RowStatistics
) -> Array:
    """Returns the cotangent of scores, dropped × d_weights − weights × delta / dropout_scale.
    Without dropout, `d_weights` includes −delta already."""
    if not spec.dropout_rate:
        return weights * d_weights
    return dropped * d_weights + weights * statistics.minus_delta[:, None]


def _allowed(tile: HeadTile) -> Any:
    """Returns the mask of a tile."""
    return tile.spec.mask.evaluate(tile.b, tile.h, tile.rows, tile.columns)


def _unsigned(tile: HeadTile, signed: Array) -> tuple[Array, Array]:
    """Returns the weights before dropout and the dropped weights from signed weights."""
    if not tile.spec.dropout_rate:
        return signed, signed
    return jnp.abs(signed), jnp.maximum(signed, 0)


def with_slope(tile: HeadTile, which: int, products: Array, masked: bool) -> tuple[Array, Array]:
    """Returns scores, and the derivative of each by the entry of parameter `which` that it reads.

    A score reads at most one entry. So forward mode computes all derivatives at once, from a
    tangent of ones.
    """
    values = parameters(tile.spec)

    def scores(value: Array) -> Array:
        replaced = with_parameters(tile.spec, [*values[:which], value, *values[which + 1 :]])
        return tile._replace(spec=replaced).modify(products, masked)

    return jax.jvp(scores, (values[which],), (jnp.ones_like(values[which]),))


def add_gradients(
    problem: GPUProblem, totals: dict[int, Array], streamed: Ref, **operands: Any
) -> dict[int, Array]:
    """Adds a tile to the gradients `totals`: 0 is the gradient of queries or keys, 1 of values.

    `operands` are arguments of `of_tile`.
    """
    derive = None if 0 in totals else Derivation.d_products
    gradients = of_tile(problem, streamed=streamed, derive=derive, **operands)
    factors = [(gradients[i].astype(streamed[i].dtype), streamed[i]) for i in totals]
    sums = matrix_units.multiply(problem.unit, factors, onto=[*totals.values()])
    return dict(zip(totals, sums, strict=True))


def of_tile(
    problem: GPUProblem,
    *,
    masked: bool,
    statistics: RowStatistics | Callable[[], RowStatistics],
    resident: Ref,
    streamed: Ref,
    tile: RegisterTile | Callable[[], RegisterTile],
    streamed_arrays: Tree = (),
    derive: Callable[..., Any] | None = None,
) -> Tree:
    """Computes a derivative of a tile.

    resident, streamed: query and d_out, and key and value, or the other way round; references to
        shared memory.
    statistics: those of kept queries, or a function that reads those of streamed queries.
    tile: the tile, or a function that reads it where it is needed, which takes longer but fewer
        registers.
    streamed_arrays: the tile's parts of the spec's arrays that were streamed.
    derive: a method of `Derivation`. By default `d_products`, or `d_signed` with weights that are
        computed between the two products.
    """
    unit, derivation = problem.unit, Derivation(masked, problem.factors)
    (products,), (d_weights,) = ([pair] for pair in zip(resident, streamed, strict=True))
    (products,) = matrix_units.multiply(unit, [products], transposed=True)
    read: Any = statistics
    if isinstance(statistics, RowStatistics):
        read = functools.partial(statistics._replace, log_total=None)

    def completed() -> RegisterTile:
        return (tile() if callable(tile) else tile).completed(*streamed_arrays)

    loaded, early = read(), None if callable(tile) else completed()
    # Registers are scarce while products are computed. So masks and dropout of unmodified scores
    # are computed between the two products. Other functions are computed after both; they read
    # streamed statistics again instead of keeping them.
    between = derive is None and problem.unmodified and (masked or problem.drops)
    if between:
        early = early or completed()
        signed = lambda *operands: derivation.weights_first(*operands)[1]  # noqa: E731
        products = early.run(signed, products, loaded)
    drops, columns = problem.drops, problem.refs.sizes["S"]
    onto = None if drops else [unit.spread(loaded.minus_delta, columns)]
    (d_weights,) = matrix_units.multiply(unit, [d_weights], transposed=True, onto=onto)
    loaded = loaded if problem.unmodified else read()
    derive = derive or (Derivation.d_signed if between else Derivation.d_products)
    function = functools.partial(derive, derivation)
    return (early or completed()).run(function, products, d_weights, loaded)


def finished(
    problem: GPUProblem, totals: dict[int, Array], statistics: RowStatistics | None
) -> list[Array]:
    """Returns the gradients from the totals of all tiles.

    `statistics` are those of the kept queries, or None if keys are kept.
    """
    factor = problem.factors.gradient
    if statistics is None:
        dropout_scale = problem.factors.dropout_scale
        return [times(x, dropout_scale if which else factor) for which, x in totals.items()]

    def normalized(total: Array, log_total: Array) -> Array:
        return total * times(jnp.exp2(-log_total), factor)[:, None]

    layout = RegisterLayout(functools.partial(problem.unit.to_layout, axes="ts"))
    return [mosaic_interpreter.run(normalized, totals[0], statistics.log_total, layout=layout)]
