"""RetNet: retention.

Without a softmax, attention is a recurrence over the tokens. In each head, a token counts less by a
constant factor γ with each later token:

    w_(ij) = γ_n^(i − j) (q_i · k_j) / √H "for" j ≤ i
    γ_n = 1 − 2^(−4 − n)

The paper also rotates queries and keys, and normalises the output of each head.

Sun, Dong, Huang et al. 2023, Retentive Network: A Successor to Transformer for Large Language
Models. arXiv:2307.08621
"""

import jax.numpy as jnp
import numpy as np

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    _, N, H = q.shape
    log_decay = jnp.log1p(-(2.0 ** (-5 - jnp.arange(N))))
    options = {"feature_map": lambda x: x, "log_decay": log_decay, "normalize": False}
    return jattn.linear_attention(q / H**0.5, k, v, **options)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    T, N, _ = q.shape
    bases = 1 - 0.5 ** np.arange(5, 5 + N)
    decays = bases[:, None, None] ** np.maximum(plain.distance(T), 0)
    return plain.mean(plain.scores(q, k) * (decays * plain.causal(T)).astype(np.float32), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language())
