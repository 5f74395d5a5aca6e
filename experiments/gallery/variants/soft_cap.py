"""Soft-capped scores.

Scores are kept between −c and c before the mask, so that no score can grow without bound:

    s′_(ij) = c tanh(s_(ij) / c)

Gemma 2 has c = 50 in its attention. Here c is 5, so that the cap can be seen.

Gemma Team 2024, Gemma 2: Improving Open Language Models at a Practical Size. arXiv:2408.00118
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, scores


CAP = 5.0


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), score=scores.SoftCap(CAP))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    capped = CAP * jnp.tanh(plain.scores(q, k) / CAP)
    return plain.mean(plain.softmax(capped, plain.causal(len(q))), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
