"""Off-by-one softmax.

With 1 added to the denominator, a head can attend to nothing. The 1 is e^0, that of an additional
key whose score is 0 and whose value is 0:

    w_(ij) = e^(s_(ij)) / (1 + Σ_k e^(s_(ik)))

Miller 2023, Attention Is Off By One. www.evanmiller.org/attention-is-off-by-one.html
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.SoftmaxPlusOne())


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    exponentials = jnp.where(plain.causal(len(q)), jnp.exp(plain.scores(q, k)), 0)
    return plain.mean(exponentials / (1 + exponentials.sum(axis=-1, keepdims=True)), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
