"""The online softmax of a tile in registers. All exponents are to the base 2, as units of GPUs
compute 2^x.
"""

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
from jattn.kernels.gpu.mosaic.tile.factors import Factors
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile


_LOG2E = math.log2(math.e)


_LOWEST = float(jnp.finfo(jnp.float32).min)  # maximum of no keys, to the base 2


# How far, to the base 2, a maximum moves before sums are rescaled. Weights are at most 2^8 then, in
# float16 too, and have as many digits as any.
_SLACK = 8.0


def online(
    problem: GPUProblem, masked: bool, here: RegisterTile, products: Array, before: softmax.Partial
) -> tuple[Array, softmax.Partial]:
    """The weights of more keys, and what there is so far, both relative to a new shift; weighted
    values are yet to be added."""
    found = soften(problem, masked, here, products, before.maximum, before.total)

    def rescaled(x: Array) -> Array:
        return x * problem.unit.spread(found.factor, x.shape[1])

    weighted = lax.cond(found.far, rescaled, lambda x: x, before.weighted)
    return found.weights, softmax.Partial(found.shift, found.total, weighted)


class Softened(NamedTuple):
    """The weights of more keys, and shift and total of all so far. Where the shift has moved far,
    each row of what is relative to the one before is to be multiplied with a factor."""

    weights: Array
    shift: Array
    total: Array
    far: Array
    factor: Array


def soften(
    problem: GPUProblem,
    masked: bool,
    here: RegisterTile,
    products: Array,
    shift: Array,
    total: Array,
) -> Softened:
    """The softmax of more keys.

    Sums stay relative to a maximum that is no longer the highest, until that of any row has moved
    far (Zadouri et al. 2026, "FlashAttention-4"). This is exact: all that a row sums is relative to
    the same shift.
    """
    highest = functools.partial(_highest, masked, problem.factors)
    score, maximum = here.run(highest, products, shift)
    far = votes.any_above(problem.unit, maximum - shift, _SLACK)
    now = jnp.where(far, maximum, shift)
    weigh = functools.partial(_weigh, problem.factors, problem.special)
    weights, total, factor = here.run(weigh, score, shift, now, total)
    return Softened(weights, now, total, far, factor)


def _highest(
    masked: bool, factors: Factors, here: slicing.Scored, products: Array, maximum: Array
) -> tuple[Array, Array]:
    """The scores of more keys, and the maximum of all so far.

    It is to the base 2, and all is relative to it as it is rounded: it comes from `max`, so that no
    product becomes one operation with a subtraction.
    """
    score = here.modify(times(products, factors.before), masked)
    return score, jnp.maximum(maximum, jnp.max(score, axis=-1) * (factors.after * _LOG2E))


def _weigh(
    factors: Factors,
    special: bool,
    here: slicing.Scored,
    score: Array,
    before: Array,
    now: Array,
    total: Array,
) -> tuple[Array, Array, Array]:
    """Weights relative to what the shift is now, the new total, and what sums that are relative to
    the shift before are to be multiplied with. Where the unit for 2^x has `special` functions of
    scores to compute, it computes weights alone."""
    weights = jnp.exp2(score * (factors.after * _LOG2E) - now[:, None])
    scale = (exp2_by_products if special else jnp.exp2)(before - now)
    return here.drop_unscaled(weights), total * scale + jnp.sum(weights, axis=-1), scale


def finish_apart(
    factors: Factors, maximum: Array, total: Array
) -> tuple[Array, softmax.Normalizer]:
    """`finish` for such a sum: what it is to be multiplied with, and the normalizer."""
    ones = jnp.ones_like(total)[:, None]
    out, normalizer = finish(factors, softmax.Partial(maximum, total, ones))
    return out.reshape(-1), normalizer


def finish(factors: Factors, part: softmax.Partial) -> tuple[Array, softmax.Normalizer]:
    """Output and normalizer. The maximum is rounded once more. What that changes, when the backward
    pass takes it to the base 2 again, goes to the log of the total."""
    maximum = jnp.maximum(part.maximum * math.log(2), _LOWEST)  # or two products become one
    lost = (part.maximum - _shift(maximum)) * math.log(2)
    natural = part._replace(maximum=maximum)
    out, normalizer = softmax.finish(natural)
    lost = jnp.where(part.total > 0, lost, 0)
    return times(out, factors.kept), normalizer._replace(log_total=normalizer.log_total + lost)


def _shift(maximum: Array) -> Array:
    """To the base 2, rounded: the maximum keeps the product from becoming one operation with a
    subtraction."""
    return jnp.maximum(maximum * _LOG2E, _LOWEST)


# Of 2^r for |r| of at most a half, from r^5 down: relative error 9e-8, and none at 0, where a
# maximum stays what it was.
_POWERS = 1.32647272e-3, 9.67151268e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0


def exp2_by_products(x: Array) -> Array:
    """2^x for x of at most 0, and 2^-126 below -126."""
    x = jnp.maximum(x, -126.0)
    magic = np.float32(1.5 * 2**23)  # adding it rounds, and leaves an integer in the lowest bits
    bits = lax.bitcast_convert_type(x + magic, jnp.int32)
    rest = x - (bits - magic.view(np.int32)).astype(jnp.float32)
    power = functools.reduce(lambda found, one: found * rest + one, _POWERS, jnp.zeros_like(x))
    power = lax.bitcast_convert_type(power, jnp.int32) + lax.shift_left(bits, np.int32(23))
    return lax.bitcast_convert_type(power, jnp.float32)


def nothing(rows: int, width: int) -> softmax.Partial:
    """What no keys contribute."""
    total, weighted = (jnp.zeros(shape, jnp.float32) for shape in ((rows,), (rows, width)))
    return softmax.Partial(jnp.full((rows,), _LOWEST, jnp.float32), total, weighted)


def times(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor
