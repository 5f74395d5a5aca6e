"""Neighbourhood attention in any number of dimensions, as NATTEN defines it."""

import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn import masks


def mask(shape: tuple[int, ...], window: int, stride: int = 1, dilation: int = 1) -> masks.Mask:
    """Returns the mask of the tokens of a grid, in row-major order.

    Along each axis, `stride` neighbouring queries share the window of their middle one. At the
    edges windows are moved inwards, so that all queries have equally many keys; nothing is padded.
    With dilation d, tokens whose coordinates have different remainders by d ignore each other.
    """

    def neighbours(b: Array, h: Array, q: Array, kv: Array) -> Array:
        return functools.reduce(
            operator.and_,
            (
                _is_near(q // below % size, kv // below % size, size, window, stride, dilation)
                for size, below in zip(shape, _sizes_below(shape), strict=True)
            ),
        )

    return masks.Predicate(neighbours)


def _sizes_below(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _is_near(q: Array, kv: Array, size: int, window: int, stride: int, dilation: int) -> Array:
    """Returns whether a key is in the window of a query along one axis."""
    place, remainder = q // dilation, q % dilation
    last = (size - 1 - remainder) // dilation  # of the tokens with this remainder
    leader = jnp.minimum(place // stride * stride + stride // 2, last)
    start = jnp.clip(leader - window // 2, 0, last + 1 - window)
    key_place = kv // dilation
    return (kv % dilation == remainder) & (key_place >= start) & (key_place < start + window)


def allowed(shape: tuple[int, ...], window: int, stride: int = 1, dilation: int = 1) -> np.ndarray:
    """Returns the matrix of allowed pairs, from lists of the nearest keys along each axis."""
    matrix = np.ones((1, 1), bool)
    for size in shape:
        axis = np.zeros((size, size), bool)
        for remainder in range(dilation):
            tokens = range(remainder, size, dilation)
            for place, token in enumerate(tokens):
                group = [*enumerate(tokens)][place // stride * stride :][:stride]
                middle = group[min(stride // 2, len(group) - 1)][0]
                by_place = sorted(range(len(tokens)), key=lambda key: _rank(key, middle, window))
                axis[token, [tokens[key] for key in by_place[:window]]] = True
        matrix = np.kron(matrix, axis)
    return matrix


def _rank(key: int, middle: int, window: int) -> float:
    """Returns the rank of a key: the nearest come first, of two equally near ones the left one if
    the window is even."""
    return abs(key - middle + (0.25 if window % 2 == 0 else 0.0))
