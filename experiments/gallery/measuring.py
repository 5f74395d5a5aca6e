"""Checks a variant against its dense formula, and measures both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.benchmark import timing
from experiments.benchmark.peers import Runnable, compiled
from experiments.gallery.variant import Arrays, Variant
from experiments.runs.ending import Failure
from jattn import masks


# The largest difference of an output or gradient, divided by its largest number. Both formulas are
# computed in float32.
TOLERANCE = 5e-4
_TILE = 128
_LONG = 100.0  # milliseconds


@dataclasses.dataclass(frozen=True)
class Times:
    """Median milliseconds of jattn and of the dense formula, and the bytes of temporaries."""

    jattn: float
    dense: float
    jattn_bytes: int
    dense_bytes: int


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The results for a variant.

    Attributes:
        error: the largest difference from the dense formula, as for `TOLERANCE`.
        skipped: the share of 128 × 128 tiles that no query attends to, at the last length.
        forward: the times of each length.
        backward: the times with gradients, at the first length.
    """

    error: float
    skipped: float
    forward: dict[int, Times]
    backward: Times


def results(function: Callable[..., Array], inputs: Arrays, cotangent: Array) -> Arrays:
    """Returns the output of a function as "out", and the gradient of each float array by name."""
    floats = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    out, pull = jax.vjp(lambda floats: function(**{**inputs, **floats}), floats)
    return {"out": out, **pull(cotangent)[0]}


def cotangent_for(variant: Variant, inputs: Arrays) -> Array:
    """Draws a cotangent of the output."""
    out: Any = jax.eval_shape(lambda inputs: variant.dense(**inputs), inputs)
    return jax.random.normal(jax.random.key(1), out.shape)


def largest_error(got: Arrays, expected: Arrays) -> float:
    """Returns the largest difference of two dictionaries of arrays; see `TOLERANCE`.

    Raises:
        Failure: a difference exceeds the tolerance, or is NaN.
    """
    errors = {
        name: float(np.max(np.abs(got[name] - x)) / np.max(np.abs(x)))
        for name, x in jax.device_get(expected).items()
    }
    for name in sorted(errors, key=lambda name: name != "out"):
        error = errors[name]
        if not error <= TOLERANCE:
            what = "the output" if name == "out" else f"the gradient of {name}"
            raise Failure(f"{what} differs from the dense formula by {error:.1e} of its maximum")
    return max(errors.values())


def skipped(variant: Variant, T: int) -> float:
    """Returns the share of tiles that are skipped."""
    if variant.mask is None:
        return 0.0
    tiles = masks.tile_map(variant.mask(T), T, T, _TILE, _TILE)
    return float(np.mean(np.asarray(tiles) == masks.EMPTY))


def measure(variant: Variant, lengths: tuple[int, ...], seconds: float = 0.0) -> Measurement:
    """Checks a variant at the first length, and measures it at all of them.

    `seconds` is the least time for each comparison.

    Raises:
        Failure: the results differ from those of the dense formula.
    """
    first = variant.inputs(jax.random.key(0), lengths[0])
    cotangent = cotangent_for(variant, first)
    both = {"jattn": variant.attention, "dense": variant.dense}
    backward = {
        name: compiled(lambda inputs, x, f=f: results(f, inputs, x), first, cotangent)
        for name, f in both.items()
    }
    error = largest_error(*(jax.device_get(run.run()) for run in backward.values()))
    forward = {}
    for T in lengths:
        inputs = variant.inputs(jax.random.key(0), T)
        programs = {
            name: compiled(lambda inputs, f=f: f(**inputs), inputs) for name, f in both.items()
        }
        forward[T] = _times(programs, seconds)
    return Measurement(error, skipped(variant, lengths[-1]), forward, _times(backward, seconds))


def _times(programs: dict[str, Runnable], seconds: float) -> Times:
    """Measures both programs, short ones in turn and long ones by one run."""
    medians = {name: _warm_milliseconds(program) for name, program in programs.items()}
    short = {name: x for name, x in programs.items() if medians[name] < _LONG}
    medians |= timing.in_turn(short, seconds)[0]
    memory = [programs[name].temporary_bytes or 0 for name in ("jattn", "dense")]
    return Times(medians["jattn"], medians["dense"], *memory)


def _warm_milliseconds(program: Runnable) -> float:
    """Returns the time of the first run, or of the second one if the first takes under a second."""
    first = timing.timed(program)
    return 1e3 * (first if first >= timing.WARM else timing.timed(program))
