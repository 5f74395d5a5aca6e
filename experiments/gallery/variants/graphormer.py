"""Graphormer.

The tokens are the nodes of a graph, here a tree. Each head learns a number b for each distance, the
number of edges of the shortest path, and a weight e for the mean feature x of these edges:

    s_(ij) = (q_i · k_j) / √H + b_("distance"(i, j)) + e x_(ij)

Ying, Cai, Luo et al. 2021, Do Transformers Really Perform Badly for Graph Representation?
arXiv:2106.05234
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.trees import path_sums
from experiments.gallery.variant import Arrays, Variant
from jattn import scores


def inputs(key: Array, T: int) -> Arrays:
    drawn = plain.heads(key, T, table=(plain.HEADS, 16), e=(plain.HEADS,))
    return {**drawn, "paths": jnp.stack([path_sums(np.ones(T, int)), path_sums(np.arange(T) % 3)])}


def attention(
    q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array, e: plain.PerHead, paths: Array
) -> plain.Output:
    def bias(s, b, h, q, kv, table, e, paths):
        edges, features = paths[0, q, kv], paths[1, q, kv]
        return s + table[h, jnp.minimum(edges, 15)] + e[h] * features / jnp.maximum(edges, 1)

    return jattn.attention(q, k, v, score=scores.Score(bias, table, e, paths))


def dense(
    q: plain.Queries, k: plain.Keys, v: plain.Values, table: Array, e: plain.PerHead, paths: Array
) -> plain.Output:
    edges, features = paths
    means = e[:, None, None] * (features / jnp.where(edges == 0, 1, edges))
    return plain.mean(plain.softmax(plain.scores(q, k) + table[:, edges.clip(max=15)] + means), v)


REASON = "it attends along the edges of a graph"
VARIANT = Variant(__doc__, inputs, attention, dense, REASON)
