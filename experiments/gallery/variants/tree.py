"""Speculative decoding of a tree.

A small model drafts a tree of continuations, which the large model checks in one call. Each token
attends to its ancestors and itself, and its position is its depth. In depth-first order the tokens
below j are j + 1 … e_j − 1:

    "query" i "attends to key" j "if" j ≤ i < e_j

Miao, Oliaro, Zhang et al. 2024, SpecInfer: Accelerating Large Language Model Serving with
Tree-based Speculative Inference and Verification. arXiv:2305.09781
"""

import jax.numpy as jnp
import numpy as np

import jattn
from experiments.gallery import plain
from experiments.gallery.trees import ancestors, depths_and_ends
from experiments.gallery.variant import Variant
from jattn import masks, positions


def mask(T: int) -> masks.Mask:
    end = jnp.asarray(depths_and_ends(T)[1])
    return masks.Predicate(lambda b, h, q, kv: (kv <= q) & (q < end[kv]))


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    depths = depths_and_ends(len(q))[0]
    q, k = (positions.rotary(x, depths) for x in (q, k))
    return jattn.attention(q, k, v, mask=mask(len(q)))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    allowed = ancestors(len(q))
    q, k = (plain.rotated(x, np.sum(allowed, axis=1) - 1) for x in (q, k))
    return plain.mean(plain.softmax(plain.scores(q, k), allowed), v)


REASON = "it checks drafts of a trained model, and is not another model"
VARIANT = Variant(__doc__, plain.heads, attention, dense, REASON, mask)
