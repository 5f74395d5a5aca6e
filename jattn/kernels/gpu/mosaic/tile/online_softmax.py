"""The online softmax of a tile in registers. Exponents are to the base 2: GPUs compute 2^x."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import softmax
from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.machine import votes
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.tile.problem import LOG2E, SLACK, Factors, GPUProblem, RegisterTile


LOWEST = float(jnp.finfo(jnp.float32).min)  # the running maximum before the first key


def initial(unit: Unit, rows: int, width: int) -> softmax.Partial:
    """Returns the state before the first key, in registers, for `rows` queries and V = `width`."""
    total, weighted = (jnp.zeros(shape, jnp.float32) for shape in ((rows,), (rows, width)))
    maximum = jnp.full((rows,), LOWEST, jnp.float32)
    return softmax.Partial(*map(unit.to_layout, (maximum, total, weighted), ("t", "t", "ts")))


def online(
    problem: GPUProblem, masked: bool, tile: RegisterTile, products: Array, state: softmax.Partial
) -> tuple[Array, softmax.Partial]:
    """Returns the weights of one more tile, and the new state without the tile's weighted values,
    which the caller adds. Both are relative to the new shift."""
    new = online_softmax_step(problem, masked, tile, products, state.maximum, state.total)

    def rescaled(x: Array) -> Array:
        return x * problem.unit.spread(new.factor, x.shape[1])

    weighted = lax.cond(new.rescales, rescaled, lambda x: x, state.weighted)
    return new.weights, softmax.Partial(new.shift, new.total, weighted)


class SoftmaxStep(NamedTuple):
    """The weights of one more tile, and the shift and the total of all keys so far.

    If `rescales`, sums of earlier tiles must be multiplied by `factor [t]`, because they are
    relative to the previous shift.
    """

    weights: Array
    shift: Array
    total: Array
    rescales: Array
    factor: Array


def online_softmax_step(
    problem: GPUProblem,
    masked: bool,
    tile: RegisterTile,
    products: Array,
    shift: Array,
    total: Array,
) -> SoftmaxStep:
    """Computes one step of the online softmax.

    Sums stay relative to an earlier maximum, the shift, until the maximum of any row exceeds it by
    `SLACK` (Zadouri et al. 2026, "FlashAttention-4"). This is exact, because all sums of a row are
    relative to the same shift.
    """
    score, maximum = tile.run(
        functools.partial(_running_maximum, masked, problem.factors), products, shift
    )
    limit = SLACK / problem.factors.log2_units
    rescales = votes.any_above(problem.unit, maximum - shift, limit)
    new_shift = jnp.where(rescales, maximum, shift)
    weigh = functools.partial(_weigh, problem.factors, problem.special)
    weights, total, factor = tile.run(weigh, score, shift, new_shift, total)
    return SoftmaxStep(weights, new_shift, total, rescales, factor)


def _running_maximum(
    masked: bool, factors: Factors, tile: slicing.Scored, products: Array, maximum: Array
) -> tuple[Array, Array]:
    """Returns the scores of a tile, and the running maximum, see `Factors.score_units`.

    All operations must use the same rounded shift. Without `jnp.maximum`, the compiler would fuse
    the product that computes the shift with subtractions, and not round it.
    """
    score = tile.modify(times(products, factors.product_factor), masked)
    return score, jnp.maximum(maximum, times(jnp.max(score, axis=-1), factors.score_units))


def _weigh(
    factors: Factors,
    special: bool,
    tile: slicing.Scored,
    score: Array,
    shift: Array,
    new_shift: Array,
    total: Array,
) -> tuple[Array, Array, Array]:
    """Returns weights relative to the new shift, the new total, and the factor of sums that are
    relative to the previous shift. All weights and sums are divided by 2^headroom.

    If score functions use the special function unit (`special`), which also computes the weights,
    the factor is computed without it.
    """
    headroom, reference = float(factors.headroom), new_shift
    if not factors.modified:
        headroom, reference = 0.0, new_shift + headroom if headroom else new_shift
    exponent = exponents(factors, score, reference)
    weights = jnp.exp2(exponent - headroom if headroom else exponent)
    decrease = times(shift - new_shift, factors.log2_units)
    scale = (exp2_by_products if special else jnp.exp2)(decrease)
    return tile.drop_unscaled(weights), total * scale + jnp.sum(weights, axis=-1), scale


def exponents(factors: Factors, score: Array, shift: Array) -> Array:
    """Returns the exponents of 2 of the weights of scores, relative to a shift `[t]`."""
    return times(times(score, factors.score_units) - shift[:, None], factors.log2_units)


def finish_factor(
    factors: Factors, maximum: Array, total: Array
) -> tuple[Array, softmax.Normalizer]:
    """Returns the factor `[t]` from weighted sums to the output, and the normalizer."""
    ones = jnp.ones_like(total)[:, None]
    out, normalizer = finish(factors, softmax.Partial(maximum, total, ones))
    return out.reshape(-1), normalizer


def finish(factors: Factors, part: softmax.Partial) -> tuple[Array, softmax.Normalizer]:
    """Returns output and normalizer."""
    out, _ = softmax.finish(part)
    maximum, error = part.maximum, None
    if not factors.modified:
        maximum, error = _natural(maximum, float(factors.headroom))
    total = part.total * 2.0**factors.headroom if factors.headroom else part.total
    _, normalizer = softmax.finish(softmax.Partial(maximum, total, total[:, None]))
    if error is not None:
        log_total = normalizer.log_total + jnp.where(total > 0, error, 0)
        normalizer = normalizer._replace(log_total=log_total)
    return times(out, factors.dropout_scale), normalizer


def _natural(shift: Array, headroom: float) -> tuple[Array, Array]:
    """Returns a shift in units of log 2 as a natural logarithm, and the rounding error that the log
    of the total must compensate.

    Three operations round: this conversion, its inverse in the backward pass, and the sum of shift
    and headroom that weights are relative to.
    """
    # Without `jnp.maximum` the compiler would merge the two factors, and round only once, or fuse
    # the second product with the subtraction.
    maximum = jnp.maximum(shift * math.log(2), LOWEST)
    error = shift - jnp.maximum(maximum * LOG2E, LOWEST)
    if headroom:
        reference = shift + headroom
        rounded = reference - shift
        error += (reference - rounded - shift) + (rounded - headroom)
    return maximum, error * math.log(2)


# Coefficients of a polynomial for 2^r with |r| ≤ 1/2, from r^5 down to r^0. The relative error is
# at most 9e-8, and 0 at r = 0, so that the factor of an unchanged maximum is exactly 1.
_POWERS = 1.32647272e-3, 9.67151268e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0


def exp2_by_products(x: Array) -> Array:
    """Returns 2^x for −126 ≤ x ≤ 0, and 2^−126 for x < −126, by multiplications and additions."""
    x = jnp.maximum(x, -126.0)
    # The sum of x and this number has x, rounded to an integer, in its lowest bits.
    magic = np.float32(1.5 * 2**23)
    bits = lax.bitcast_convert_type(x + magic, jnp.int32)
    rest = x - (bits - magic.view(np.int32)).astype(jnp.float32)
    power = functools.reduce(lambda sums, power: sums * rest + power, _POWERS, jnp.zeros_like(x))
    power = lax.bitcast_convert_type(power, jnp.int32) + lax.shift_left(bits, np.int32(23))
    return lax.bitcast_convert_type(power, jnp.float32)


def times(x: Array, factor: float) -> Array:
    """Returns x times a static factor, without an operation if that is 1."""
    return x if factor == 1 else x * factor
