"""Attention to chosen ones of 16 blocks of tokens, in plain `jax.numpy`."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.gallery import plain


COUNT = 16
_ROWS, _COLUMNS = np.indices((COUNT, COUNT))
FIRST, BEFORE = _COLUMNS == 0, _COLUMNS == _ROWS - 1


def means(x: plain.Keys) -> Float[Array, "C N H"]:
    """Computes the mean of the keys or values of each block."""
    return jnp.mean(x.reshape(COUNT, len(x) // COUNT, *x.shape[1:]), axis=1)


def allowed(importance: Float[Array, "N C C"], kept: int, T: int) -> Bool[Array, "N T T"]:
    """Returns the causal pairs of each block of queries with its own block and the most important
    earlier ones, `kept` blocks in all."""
    ranked = jnp.where(_COLUMNS < _ROWS, importance, -jnp.inf)
    ranked = jnp.where(_COLUMNS == _ROWS, jnp.inf, ranked)
    least = jnp.sort(ranked, axis=-1)[..., COUNT - kept, None]
    is_kept = (ranked >= least) & (_COLUMNS <= _ROWS)
    size = T // COUNT
    return jnp.repeat(jnp.repeat(is_kept, size, axis=1), size, axis=2) & plain.causal(T)
