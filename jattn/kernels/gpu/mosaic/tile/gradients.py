"""The cotangents of a tile's products in registers, from its weights, which are recomputed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.common.slicing import HeadTile
from jattn.kernels.gpu.mosaic.machine import matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.factors import Factors, is_unmodified
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import RegisterLayout
from jattn.kernels.gpu.mosaic.tile.online_softmax import LOG2E, times
from jattn.kernels.gpu.mosaic.tile.parameter import Parameter
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.spec import has_mask, parameters, with_parameters


_MAX_SUM = 256.0  # numbers below have at least 15 binary digits behind the point


class RowStatistics(NamedTuple):
    """Numbers of each query for the backward pass.

    The softmax's shift and the log of its total, both to the base 2; and minus delta, the sum of
    output times its cotangent, without the scale of dropout.
    """

    shift: Array
    log_total: Any
    minus_delta: Array

    @classmethod
    def stacked(cls, factors: Factors, per_query: Tree, size: int) -> tuple[Array, Array]:
        """Stacks maximum, log_total and delta `[B, T, N]` to `[B, N, blocks, 3 · size]`.

        Shift and log of the total are added up in the shift, and the log is 0, except in heads
        whose sums would have too few digits: the second result `[B, N]` says which.
        """
        maximum, log_total, delta = (jnp.swapaxes(x, 1, 2) for x in per_query)
        shift, log_total = maximum * LOG2E, log_total * LOG2E
        fits = jnp.abs(shift + log_total) < _MAX_SUM
        is_large = jnp.any(~fits, axis=2)
        separate = is_large[..., None]
        shift, log_total = (
            jnp.where(separate, shift, shift + log_total),
            jnp.where(separate, log_total, 0),
        )
        stacked = cls(shift, log_total, delta * (-1 / factors.dropout_scale))
        rows = jnp.stack(stacked, axis=2)
        blocks = rows.reshape(*rows.shape[:3], -1, size).swapaxes(2, 3)
        return blocks.reshape(*blocks.shape[:3], 3 * size), is_large

    @classmethod
    def read(cls, unit: Unit, memory: Ref, *block: Index) -> "RowStatistics":
        """Reads the numbers of a block of queries from shared or global memory."""
        letters = [""] * len(block) + ["t"]
        size = memory.shape[-1] // 3
        runs = [pl.ds(i * size, size) for i in range(3)]
        return cls(*(unit.read(memory, (*block, run), letters).value for run in runs))


class Derivation(NamedTuple):
    """The derivatives of a tile, whose scores need the mask if `masked`.

    Its functions take products of queries and keys, the cotangents of weights, which are d_out vᵀ,
    and the statistics of rows. "dropped" are weights after dropout, without its scale.
    """

    masked: bool
    factors: Factors

    def d_products(
        self, tile: HeadTile, products: Array, d_weights: Array, rows: RowStatistics
    ) -> tuple[Array, Array]:
        """Returns the cotangent of q kᵀ, without `factors.gradient`, and the dropped weights."""
        products = times(products, self.factors.product_factor)
        if is_unmodified(tile.spec):
            weights = self._unmodified_weights(tile, products, rows)
            dropped = tile.drop_unscaled(weights)
            return self._d_unmodified(tile, weights, dropped, d_weights, rows), dropped
        score, pull = self._score_and_pull(tile, products)
        weights = self._weights(score, rows)
        dropped = tile.drop_unscaled(weights)
        (gradient,) = pull(_d_scores(tile.spec, weights, dropped, d_weights, rows))
        if self.masked:  # after all else, which may be NaN, also in all of a row
            hidden = score == -jnp.inf
            dropped, gradient = jnp.where(hidden, 0, dropped), jnp.where(hidden, 0, gradient)
        return gradient, dropped

    def weights_first(
        self, tile: HeadTile, products: Array, rows: RowStatistics
    ) -> tuple[Array, Array, Any]:
        """Returns what products of queries and keys determine alone.

        The dropped weights; for `d_products_then` those before dropout, with a negative sign if it
        drops them; and the derivative of the scores, or None if scores are the products.
        """
        products, pull = times(products, self.factors.product_factor), None
        if is_unmodified(tile.spec):
            weights = self._unmodified_weights(tile, products, rows)
        else:
            score, pull = self._score_and_pull(tile, products)
            weights = self._weights(score, rows)
            weights = jnp.where(score == -jnp.inf, 0, weights) if self.masked else weights
        # One number in registers for a weight and for whether dropout keeps it.
        signed = jnp.where(tile.keeps(), weights, -weights) if tile.spec.dropout_rate else weights
        return _unsigned(tile, signed)[1], signed, pull

    def d_products_then(
        self, tile: HeadTile, signed: Array, pull: Any, d_weights: Array, rows: RowStatistics
    ) -> Array:
        """Returns the cotangent of q kᵀ, without `factors.gradient`, from the results of
        `weights_first`."""
        weights, dropped = _unsigned(tile, signed)
        if not tile.spec.dropout_rate:
            d_weights = d_weights + rows.minus_delta[:, None]
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, rows)
        if pull is not None:
            (gradient,) = pull(gradient)
        # What is masked has no weight; its products may be NaN.
        return jnp.where(weights == 0, 0, gradient) if self.masked else gradient

    def d_signed(
        self, tile: HeadTile, signed: Array, d_weights: Array, rows: RowStatistics
    ) -> tuple[Array, Array]:
        """Returns the same as `d_products`, from the signed weights of unmodified scores."""
        weights, dropped = _unsigned(tile, signed)
        return self._d_unmodified(tile, weights, dropped, d_weights, rows), dropped

    def d_parameter(
        self,
        tile: HeadTile,
        products: Array,
        d_weights: Array,
        rows: RowStatistics,
        parameter: Parameter,
    ) -> Array:
        """Returns a tile's contribution to the gradient of a parameter, without `score_factor` and
        `dropout_scale`."""
        products = times(products, self.factors.product_factor)
        score, slope = with_slope(tile, parameter.which, products, self.masked)
        weights = self._weights(score, rows)
        dropped = tile.drop_unscaled(weights)
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, rows) * slope
        if self.masked:  # also in a row that is NaN
            gradient = jnp.where(score == -jnp.inf, 0, gradient)
        return jnp.sum(gradient, axis=tuple({0, 1} - set(parameter.axes)))

    def _score_and_pull(self, tile: HeadTile, products: Array) -> tuple[Array, Any]:
        """Returns scores, and their derivative without the mask."""
        score, pull = jax.vjp(lambda x: tile.modify(x, False), products)
        return (jnp.where(_allowed(tile), score, -jnp.inf) if self._masks(tile) else score), pull

    def _masks(self, tile: HeadTile) -> bool:
        return self.masked and has_mask(tile.spec)

    def _unmodified_weights(self, tile: HeadTile, products: Array, rows: RowStatistics) -> Array:
        """The weights of products, 0 where masked, also in a row that is NaN."""
        weights = self._weights(products, rows)
        return jnp.where(_allowed(tile), weights, 0) if self._masks(tile) else weights

    def _d_unmodified(
        self, tile: HeadTile, weights: Array, dropped: Array, d_weights: Array, rows: RowStatistics
    ) -> Array:
        gradient = _d_scores(tile.spec, weights, dropped, d_weights, rows)
        return jnp.where(weights == 0, 0, gradient) if self._masks(tile) else gradient

    def _weights(self, score: Array, rows: RowStatistics) -> Array:
        """The weights of a tile. If no mask is needed, the log of the total is part of the shift,
        or applied at the end."""
        exponent = score * (self.factors.score_factor * LOG2E) - rows.shift[:, None]
        if self.masked and rows.log_total is not None:
            exponent = exponent - rows.log_total[:, None]
        return jnp.exp2(exponent)


def _d_scores(
    spec: Tree, weights: Array, dropped: Array, d_weights: Array, rows: RowStatistics
) -> Array:
    """The cotangent of scores: weights × (d_weights − delta), where `d_weights` are of `dropped`.
    Without dropout, −delta is already in the sum `d_weights`."""
    if not spec.dropout_rate:
        return weights * d_weights
    return dropped * d_weights + weights * rows.minus_delta[:, None]


def _allowed(tile: HeadTile) -> Any:
    return tile.spec.mask.evaluate(tile.b, tile.h, tile.rows, tile.columns)


def _unsigned(tile: HeadTile, signed: Array) -> tuple[Array, Array]:
    """Returns the weights before dropout, and after it, without its scale."""
    if not tile.spec.dropout_rate:
        return signed, signed
    return jnp.abs(signed), jnp.maximum(signed, 0)


def with_slope(tile: HeadTile, which: int, products: Array, masked: bool) -> tuple[Array, Array]:
    """Returns scores, and the derivative of each by the entry of a parameter that it depends on.

    A score depends on at most one entry. So forward mode computes all derivatives at once, with
    ones in all directions.
    """
    values = parameters(tile.spec)

    def scores(value: Array) -> Array:
        replaced = with_parameters(tile.spec, [*values[:which], value, *values[which + 1 :]])
        return tile._replace(spec=replaced).modify(products, masked)

    return jax.jvp(scores, (values[which],), (jnp.ones_like(values[which]),))


def add_gradients(
    problem: GPUProblem, totals: dict[int, Array], streamed: Ref, **operands: Any
) -> list[Array]:
    """Adds a tile to the gradients: number 0 is of queries or keys, 1 of values.

    `operands` are those of `of_tile`.
    """
    derive = None if 0 in totals else Derivation.d_products
    gradients = of_tile(problem, streamed=streamed, derive=derive, **operands)
    factors = [(gradients[i].astype(streamed[i].dtype), streamed[i]) for i in totals]
    return matrix_units.multiply(problem.unit, factors, onto=[*totals.values()])


def of_tile(
    problem: GPUProblem,
    *,
    masked: bool,
    rows: RowStatistics | Callable[[], RowStatistics],
    resident: Ref,
    streamed: Ref,
    tile: RegisterTile | Callable[[], RegisterTile],
    streamed_arrays: Tree = (),
    derive: Callable[..., Any] | None = None,
) -> Tree:
    """Computes `derive`, a function of `Derivation`, for a tile; by default `d_products`, where
    registers are free.

    `resident` and `streamed` are query and d_out, and key and value, or the other way round. `rows`
    are the statistics of kept queries, or a function that reads them while products are computed.
    `tile` is a tile, or a function that reads it when it is needed: that takes longer, but leaves
    more registers.
    """
    unit, derivation = problem.unit, Derivation(masked, problem.factors)
    (products,), (d_weights,) = ([pair] for pair in zip(resident, streamed, strict=True))
    (products,) = matrix_units.multiply(unit, [products], transposed=True)
    read = rows if callable(rows) else functools.partial(rows._replace, log_total=None)

    def completed() -> RegisterTile:
        return (tile() if callable(tile) else tile).completed(streamed_arrays)

    statistics, known = read(), None if callable(tile) else completed()
    # Registers are scarce while products are computed: what takes many is computed between two
    # products, or read after them, possibly a second time.
    between = derive is None and problem.unmodified and (masked or problem.drops)
    if between:
        known = known or completed()
        first = derivation.weights_first
        products = known.run(lambda *operands: first(*operands)[1], products, statistics)
    drops, columns = problem.drops, problem.refs.sizes["S"]
    onto = None if drops else [unit.spread(statistics.minus_delta, columns)]
    (d_weights,) = matrix_units.multiply(unit, [d_weights], transposed=True, onto=onto)
    statistics = statistics if problem.unmodified else read()
    derive = derive or (Derivation.d_signed if between else Derivation.d_products)
    function = functools.partial(derive, derivation)
    return (known or completed()).run(function, products, d_weights, statistics)


def finished(
    problem: GPUProblem, totals: dict[int, Array], rows: RowStatistics | None
) -> list[Array]:
    """Returns the gradients from the totals; `rows` are the statistics of queries that are kept."""
    factor = problem.factors.gradient
    if rows is None:
        dropout_scale = problem.factors.dropout_scale
        return [times(x, dropout_scale if which else factor) for which, x in totals.items()]

    def normalized(total: Array, log_total: Array) -> Array:
        return total * times(jnp.exp2(-log_total), factor)[:, None]

    layout = RegisterLayout(functools.partial(problem.unit.to_layout, axes="ts"))
    return [mosaic_interpreter.run(normalized, totals[0], rows.log_total, layout=layout)]
