"""T5's relative position bias.

Each head learns a number for each of 32 buckets of distances. Half of the buckets hold one distance
each; the width of the others grows logarithmically up to distance 128:

    s_(ij) = (q_i · k_j) / √H + b_("bucket"(i − j))

Raffel, Shazeer, Roberts et al. 2020, Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer. arXiv:1910.10683
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks, scores


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, table=(32, plain.HEADS))


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array) -> plain.Output:
    bias = scores.RelativeBias(table, bidirectional=False, max_distance=128)
    return jattn.attention(q, k, v, mask=masks.Causal(), score=bias)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array) -> plain.Output:
    distance = np.maximum(plain.distance(len(q)), 0).astype(int)
    far = 16 + np.floor(16 * np.log(np.maximum(distance, 16) / 16) / np.log(8)).astype(int)
    bucket = np.where(distance < 16, distance, np.minimum(far, 31))
    biased = plain.scores(q, k) + jnp.moveaxis(table[bucket], -1, 0)
    return plain.mean(plain.softmax(biased, plain.causal(len(q))), v)


LANGUAGE = Language(lambda N, H: {"table": jnp.zeros((32, N))}, is_rotary=False)
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
