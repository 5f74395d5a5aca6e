"""The cotangents of a tile's products in registers, from its weights, which are computed again."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.machine import matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.factors import Factors, is_unmodified
from jattn.kernels.gpu.mosaic.tile.online_softmax import _LOG2E, times
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.spec import has_mask, parameters, with_parameters


_NEAR = 256.0  # numbers below have 15 digits behind the binary point, and more


class Rows(NamedTuple):
    """What the backward pass knows of a row of queries: the softmax's shift and the log of its
    total, both to the base 2; and minus delta, the sum of output times its cotangent, of what
    dropout keeps unscaled."""

    shift: Array
    log_total: Any
    minus_delta: Array

    @classmethod
    def stacked(cls, factors: Factors, per_query: Tree, size: int) -> tuple[Array, Array]:
        """`[B, N, blocks, 3 · size]`, of maximum, log_total and delta `[B, T, N]`; and the heads
        `[B, N]` in which shift and log of the total cannot be one number, which would have
        too few digits. In others it is the shift, and the log is 0."""
        maximum, log_total, delta = (jnp.swapaxes(x, 1, 2) for x in per_query)
        shift, log_total = maximum * _LOG2E, log_total * _LOG2E
        near = jnp.abs(shift + log_total) < _NEAR
        far = jnp.any(~near, axis=2)
        apart = far[..., None]
        shift, log_total = (
            jnp.where(apart, shift, shift + log_total),
            jnp.where(apart, log_total, 0),
        )
        rows = jnp.stack(cls(shift, log_total, delta * (-1 / factors.kept)), axis=2)
        blocks = rows.reshape(*rows.shape[:3], -1, size).swapaxes(2, 3)
        return blocks.reshape(*blocks.shape[:3], 3 * size), far

    @classmethod
    def read(cls, unit: Unit, memory: Ref, *block: Index) -> "Rows":
        """Of a block of queries, from shared or global memory."""
        letters = [""] * len(block) + ["t"]
        size = memory.shape[-1] // 3
        runs = [pl.ds(i * size, size) for i in range(3)]
        return cls(*(unit.read(memory, (*block, run), letters).value for run in runs))


def d_products(
    masked: bool,
    factors: Factors,
    here: slicing.Tile,
    products: Array,
    d_weights: Array,
    rows: Rows,
) -> tuple[Array, Array]:
    """The cotangent of q kᵀ from that of the weights, d_out vᵀ, less `factors.gradient`; and the
    weights after dropout, less `factors.kept`."""
    products = times(products, factors.before)
    if is_unmodified(here.spec):
        weights = _unmodified_weights(masked, factors, here, products, rows)
        kept = here.drop_unscaled(weights)
        return _d_unmodified(masked, here, weights, kept, d_weights, rows), kept
    score, pull = _score_and_pull(masked, here, products)
    weights = _weights(masked, factors, score, rows)
    kept = here.drop_unscaled(weights)
    (found,) = pull(_d_scores(here.spec, weights, kept, d_weights, rows))
    if masked:  # after all else, which may be NaN, also in all of a row
        hidden = score == -jnp.inf
        kept, found = jnp.where(hidden, 0, kept), jnp.where(hidden, 0, found)
    return found, kept


def _d_scores(spec: Tree, weights: Array, kept: Array, d_weights: Array, rows: Rows) -> Array:
    """The cotangent of scores: weights × (d_weights − delta), where d_weights are of the weights
    after dropout. Without dropout they come with −delta, from which their sum started."""
    if not spec.dropout_rate:
        return weights * d_weights
    return kept * d_weights + weights * rows.minus_delta[:, None]


def _score_and_pull(masked: bool, here: slicing.Tile, products: Array) -> tuple[Array, Any]:
    """Scores, and their derivative without the mask."""
    score, pull = jax.vjp(lambda x: here.modify(x, False), products)
    if masked and has_mask(here.spec):
        allowed = here.spec.mask.evaluate(here.b, here.h, here.rows, here.columns)
        score = jnp.where(allowed, score, -jnp.inf)
    return score, pull


def weights_first(
    masked: bool, factors: Factors, here: slicing.Tile, products: Array, rows: Rows
) -> tuple[Array, Array, Any]:
    """What products of queries and keys say alone: weights after dropout, and for
    `d_products_then` those before it, in their sign whether it drops them, and the derivative of
    the scores, or None where these are the products."""
    products, pull = times(products, factors.before), None
    if is_unmodified(here.spec):
        weights = _unmodified_weights(masked, factors, here, products, rows)
    else:
        score, pull = _score_and_pull(masked, here, products)
        weights = _weights(masked, factors, score, rows)
        weights = jnp.where(score == -jnp.inf, 0, weights) if masked else weights
    signed = _signed(here, weights)
    return _kept(here, signed), signed, pull


def d_products_then(
    masked: bool, here: slicing.Tile, signed: Array, pull: Any, d_weights: Array, rows: Rows
) -> Array:
    """The cotangent of q kᵀ, less `factors.gradient`, from that of the weights and what
    `weights_first` found."""
    weights, kept = _before(here, signed), _kept(here, signed)
    if not here.spec.dropout_rate:
        d_weights = d_weights + rows.minus_delta[:, None]
    found = _d_scores(here.spec, weights, kept, d_weights, rows)
    if pull is not None:
        (found,) = pull(found)
    # What is masked has no weight; what its products would give may be NaN.
    return jnp.where(weights == 0, 0, found) if masked else found


def _signed(here: slicing.Tile, weights: Array) -> Array:
    """Weights, and in their sign whether dropout drops them: one number each in registers."""
    return jnp.where(here.keeps(), weights, -weights) if here.spec.dropout_rate else weights


def _before(here: slicing.Tile, signed: Array) -> Array:
    """Weights before dropout."""
    return jnp.abs(signed) if here.spec.dropout_rate else signed


def _kept(here: slicing.Tile, signed: Array) -> Array:
    """Weights after dropout, less `factors.kept`."""
    return jnp.maximum(signed, 0) if here.spec.dropout_rate else signed


def d_parameter(
    which: int,
    along: tuple[int, ...],
    masked: bool,
    factors: Factors,
    here: slicing.Tile,
    products: Array,
    d_weights: Array,
    rows: Rows,
) -> Array:
    """What a tile adds to the gradient of one of its parameters, summed over axes but `along`, less
    `factors.after` and `factors.kept`."""
    score, slope = with_slope(here, which, times(products, factors.before), masked)
    weights = _weights(masked, factors, score, rows)
    kept = here.drop_unscaled(weights)
    found = _d_scores(here.spec, weights, kept, d_weights, rows) * slope
    if masked:  # also in a row that is NaN
        found = jnp.where(score == -jnp.inf, 0, found)
    return jnp.sum(found, axis=tuple({0, 1} - set(along)))


def with_slope(
    tile: slicing.Tile, which: int, products: Array, masked: bool
) -> tuple[Array, Array]:
    """Returns scores, and the derivative of each by the entry of a parameter that it depends on.

    A score depends on at most one entry. So forward mode computes all derivatives at once, with
    ones in all directions.
    """
    values = parameters(tile.spec)

    def scores(value: Array) -> Array:
        replaced = with_parameters(tile.spec, [*values[:which], value, *values[which + 1 :]])
        return tile._replace(spec=replaced).modify(products, masked)

    return jax.jvp(scores, (values[which],), (jnp.ones_like(values[which]),))


def _unmodified_weights(
    masked: bool, factors: Factors, here: slicing.Tile, products: Array, rows: Rows
) -> Array:
    """Those of products, 0 where masked also in a row that is NaN."""
    spec, weights = here.spec, _weights(masked, factors, products, rows)
    if not masked or not has_mask(spec):
        return weights
    return jnp.where(spec.mask.evaluate(here.b, here.h, here.rows, here.columns), weights, 0)


def _d_unmodified(
    masked: bool, here: slicing.Tile, weights: Array, kept: Array, d_weights: Array, rows: Rows
) -> Array:
    found = _d_scores(here.spec, weights, kept, d_weights, rows)
    return jnp.where(weights == 0, 0, found) if masked and has_mask(here.spec) else found


def signed(
    masked: bool, factors: Factors, here: slicing.Tile, products: Array, rows: Rows
) -> Array:
    """Of products weights, and in their sign whether dropout drops them."""
    return _signed(here, _unmodified_weights(masked, factors, here, products, rows))


def d_signed(
    masked: bool,
    factors: Factors,
    here: slicing.Tile,
    signed: Array,
    d_weights: Array,
    rows: Rows,
) -> tuple[Array, Array]:
    """`d_products` from what `signed` gives."""
    weights, kept = _before(here, signed), _kept(here, signed)
    return _d_unmodified(masked, here, weights, kept, d_weights, rows), kept


def _weights(masked: bool, factors: Factors, score: Array, rows: Rows) -> Array:
    """Those of a tile. Where no mask is needed, a log of the total is part of the shift, or left to
    the end."""
    exponent = score * (factors.after * _LOG2E) - rows.shift[:, None]
    if masked and rows.log_total is not None:
        exponent = exponent - rows.log_total[:, None]
    return jnp.exp2(exponent)


def add_gradients(
    problem: GPUProblem,
    masked: bool,
    rows: Rows | Callable[[], Rows],
    kept: Ref,
    streamed: Ref,
    totals: dict[int, Array],
    here: RegisterTile | Callable[[], RegisterTile],
    beside: Tree = (),
) -> list[Array]:
    """The gradients with what a tile adds to them: 0 is that of queries or keys, 1 of values. The
    others are as `of_tile` takes them."""
    derive = None if 0 in totals else d_products
    found = of_tile(problem, masked, rows, kept, streamed, here, beside, derive)
    factors = [(found[i].astype(streamed[i].dtype), streamed[i]) for i in totals]
    return matrix_units.multiply(problem.unit, factors, onto=[*totals.values()])


def of_tile(
    problem: GPUProblem,
    masked: bool,
    rows: Rows | Callable[[], Rows],
    kept: Ref,
    streamed: Ref,
    here: RegisterTile | Callable[[], RegisterTile],
    beside: Tree = (),
    derive: Callable[..., Any] | None = None,
) -> Tree:
    """What `derive` makes of a tile's products and d_out vᵀ; None is `d_products`, computed where
    registers are free.

    What is kept and what comes by are query and d_out, or key and value; `rows` those of the
    queries that are kept, or how to read them while products are under way; `here` is a tile, or
    how to read it where it is needed, which takes longer and leaves more registers.
    """
    unit = problem.unit
    (products,), (d_weights,) = ([pair] for pair in zip(kept, streamed, strict=True))
    (products,) = matrix_units.multiply(unit, [products], transposed=True)
    read = rows if callable(rows) else functools.partial(rows._replace, log_total=None)
    rows, at = read(), None if callable(here) else here.completed(beside)
    # Registers are scarce while products are under way: what has many to keep is computed between
    # them, or read behind them, maybe again.
    between = derive is None and problem.unmodified and (masked or problem.drops)
    if between:
        at = at or _read(here).completed(beside)
        products = at.run(functools.partial(signed, masked, problem.factors), products, rows)
    onto = None if problem.drops else [unit.spread(rows.minus_delta, problem.refs.sizes["S"])]
    (d_weights,) = matrix_units.multiply(unit, [d_weights], transposed=True, onto=onto)
    rows, at = rows if problem.unmodified else read(), at or _read(here).completed(beside)
    derive = derive or (d_signed if between else d_products)
    return at.run(functools.partial(derive, masked, problem.factors), products, d_weights, rows)


def _read(here: RegisterTile | Callable[[], RegisterTile]) -> RegisterTile:
    return here() if callable(here) else here


def finished(problem: GPUProblem, totals: dict[int, Array], rows: Rows | None) -> list[Array]:
    """The gradients from the totals; `rows` are those of queries that are kept."""
    factor, kept = problem.factors.gradient, problem.factors.kept
    if rows is None:
        return [times(x, kept if which else factor) for which, x in totals.items()]

    def normalized(total: Array, log_total: Array) -> Array:
        return total * times(jnp.exp2(-log_total), factor)[:, None]

    lay = functools.partial(problem.unit.to_layout, axes="ts")
    return [
        mosaic_interpreter.run(
            normalized, totals[0], rows.log_total, layout=mosaic_interpreter.RegisterLayout(lay)
        )
    ]
