"""Shifted windows (Swin).

A picture of √T × √T tokens is cut into windows of 4 × 4, shifted by 2 rows and columns. A token
attends to its window; each head learns a number for each difference of rows and columns:

    s_(ij) = (q_i · k_j) / √H + b_(Δx, Δy)

Liu, Lin, Cao et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows.
arXiv:2103.14030
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Variant
from jattn import masks, scores


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, table=(plain.HEADS, 7, 7))


def mask(T: int) -> masks.Mask:
    def same_window(b, h, q, kv):
        (q_row, q_column), (kv_row, kv_column) = (divmod(x, round(T**0.5)) for x in (q, kv))
        same_rows = (q_row + 2) // 4 == (kv_row + 2) // 4
        return same_rows & ((q_column + 2) // 4 == (kv_column + 2) // 4)

    return masks.Predicate(same_window)


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array) -> plain.Output:
    side = round(len(q) ** 0.5)

    def bias(s, b, h, q, kv, table):
        rows, columns = q // side - kv // side, q % side - kv % side
        return s + table[h, jnp.clip(rows + 3, 0, 6), jnp.clip(columns + 3, 0, 6)]

    return jattn.attention(q, k, v, mask=mask(len(q)), score=scores.Score(bias, table))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array) -> plain.Output:
    rolled = np.roll(np.arange(round(len(q) ** 0.5)), 2)  # the whole picture is rolled, then cut
    region = rolled // 4 * 3 + np.digitize(rolled, [len(rolled) - 4, len(rolled) - 2])
    same, differences = region[:, None] == region, np.subtract.outer(rolled, rolled)
    rows = np.kron(differences, np.ones_like(differences)).clip(-3, 3) + 3
    columns = np.kron(np.ones_like(differences), differences).clip(-3, 3) + 3
    biased = plain.scores(q, k) + table.reshape(-1, 49)[:, 7 * rows + columns]
    return plain.mean(plain.softmax(biased, np.kron(same, same)), v)


VARIANT = Variant(__doc__, inputs, attention, dense, "pixels attend to later ones", mask)
