"""The compiled step of the engine: every row reads up to T tokens, and the next ones are chosen.

Everything that differs between requests is an array with an element for each row, so that the step
is compiled once for each T, whatever requests come. A row draws the tokens that `jattn.generate`
draws for its request alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.cache import Cache


class Draws(NamedTuple):
    """The parameters that choose the next token of each of R rows, as NumPy arrays.

    Attributes:
        keys: `[R, n]`, the data of `jax.random.key(seed)`.
        places: `[R]`, the number of tokens generated so far.
        temperature: `[R]`; 0 chooses the likeliest token.
        top_k, top_p: `[R]`; a number from the vocabulary's size on, and 1, restrict nothing.
        by_rank: `[R]`, whether `generate` would be given `top_k` or `top_p`: it then draws the rank
            of a token instead of the token.
    """

    keys: np.ndarray
    places: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    by_rank: np.ndarray


class StepInputs(NamedTuple):
    """The arrays of a step for R rows.

    Attributes:
        tokens: `[R, T]`, each row's next tokens of its prompt, or its last generated one.
        counts: `[R]`, the number of these tokens; 0 for rows without a request.
        reset: `[R]`, True for rows that begin anew.
        draws: how the tokens after these are chosen.
    """

    tokens: np.ndarray
    counts: np.ndarray
    reset: np.ndarray
    draws: Draws


def run_step(
    definition: nnx.GraphDef, variables: Any, caches: list[Cache], inputs: StepInputs
) -> tuple[Int[Array, " R"], list[Cache]]:
    """Appends tokens to the rows of the caches; returns the token that follows in each row, −1 if
    the model's logits contain NaN, and the caches."""
    model = nnx.merge(definition, variables)
    caches = [cache.reset(inputs.reset) for cache in caches]
    T = inputs.tokens.shape[1]
    valid = jnp.arange(T, dtype=jnp.int32)[None, :] < inputs.counts[:, None]
    logits, caches = model.step(inputs.tokens, caches, valid=valid, deterministic=True)
    last = jnp.maximum(inputs.counts - 1, 0)[:, None, None]
    logits = jnp.take_along_axis(logits, last, axis=1)[:, 0].astype(jnp.float32)
    chosen = choose(logits, inputs.draws)
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), -1, chosen), caches


def choose(logits: Float[Array, "R V"], draws: Draws) -> Int[Array, " R"]:
    """Chooses a token for each row, the one that `jattn.generate` chooses for a batch of this row
    alone.

    JAX draws the noise of the first k of V places as it draws it for k places, so that masking the
    ranks from k on equals drawing among k.
    """
    V = logits.shape[-1]
    greedy = draws.temperature < np.finfo(np.float32).tiny
    temperature = jnp.where(greedy, np.float32(1), draws.temperature)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    ranked, tokens = jax.lax.top_k(scaled, V)
    ranks = jnp.arange(V, dtype=jnp.int32)[None, :]
    ranked = jnp.where(ranks < draws.top_k[:, None], ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = draws.top_p[:, None]
    ranked = jnp.where((likelier < top_p) | (top_p >= 1), ranked, -jnp.inf)
    drawn_from = jnp.where(draws.by_rank[:, None], ranked, scaled)
    drawn = jax.vmap(_draw)(draws.keys, draws.places, drawn_from)
    of_rank = jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.where(greedy, likeliest, jnp.where(draws.by_rank, of_rank, drawn))


def _draw(key: Any, place: Any, logits: Float[Array, " V"]) -> Array:
    """Draws an index with the key of `jattn.generate` for this place of a batch's first row."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key), place)
    return jax.random.categorical(jax.random.fold_in(key, 0), logits).astype(jnp.int32)
