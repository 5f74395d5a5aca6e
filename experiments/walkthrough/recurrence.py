"""Recurrent networks beside attention, and decoding with a cache."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import CODING, KERNEL, LLMS
from experiments.walkthrough.step import check, panels, same, show, step
from jattn import masks


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The median time of a call, after the first, which compiles."""
    jax.block_until_ready(function(*arguments))  # JAX computes in the background: wait for it
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def influence(model: Callable[..., Any], x: jax.Array) -> float:
    """How much the last output changes with the first word: the size of all derivatives."""

    def last(first: jax.Array) -> jax.Array:
        return model(x.at[0].set(first))[-1]

    # jacrev: every number of the last output, differentiated by every number of the first word.
    return float(jnp.linalg.norm(jax.jacrev(last)(x[0])))


@step(LLMS, KERNEL, CODING, uses=(seconds, influence))
def recurrence() -> Figure:
    """Recurrent networks and attention.

    A recurrent network reads word by word and keeps what it has read in one vector. From the last
    word back to the first, the gradient goes through as many factors as there are words between:
    it fades. And word 10 cannot be computed before word 5.

    In attention every word reaches every other in one step, whatever lies between, and all words
    are computed at once, as products of matrices. The price is the number of pairs, T × T: four
    times as many for a text twice as long. The table has the gradient from the last output to the
    first word, in models that are not trained yet, the number of steps between the two, and the
    time of a forward pass here.
    """
    width = 128
    unit = jattn.nn.GRU(width, width, rngs=nnx.Rngs(0))  # a gated recurrent unit
    draw = (jax.random.normal(jax.random.key(n), (width, width), jnp.float32) for n in range(3))
    matrices = [matrix / width**0.5 for matrix in draw]  # for queries, keys and values
    models = {
        "recurrent": jax.jit(unit.__call__),  # [T, 128] to [T, 128]
        "attention": jax.jit(lambda x: jattn.self_attention(x, *matrices, mask=masks.Causal())),
    }
    lengths = [16, 64, 256, 1024]
    reach: dict[str, list[float]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    for length in lengths:
        x = jax.random.normal(jax.random.key(length), (length, width), jnp.float32)
        for name, model in models.items():
            reach[name].append(influence(model, x))
            times[name].append(1e3 * seconds(model, x))
    print("                     words" + "".join(f"{length:10}" for length in lengths))
    for name in models:
        steps = [length - 1 if name == "recurrent" else 1 for length in lengths]
        print(f"{name}:  gradient    " + "".join(f"{value:10.1e}" for value in reach[name]))
        print("            steps       " + "".join(f"{value:10}" for value in steps))
        print("            milliseconds" + "".join(f"{value:10.2f}" for value in times[name]))
    slow, direct = reach["recurrent"], reach["attention"]
    gone = slow[2] < 1e-6 * slow[0]
    check("before training, the recurrent gradient is gone over 256 words", gone)
    check("attention's is not", direct[2] > direct[0] / 100)
    longer = times["recurrent"][3] / times["recurrent"][1]
    check("a recurrent pass takes longer, the more steps there are", longer > 4)

    # The picture.
    figure, axes = panels(2, width=8.5, height=3.4)
    titles = "gradient, last word to first", "milliseconds"
    for axis, measured, title in zip(axes, (reach, times), titles, strict=True):
        for (name, values), style in zip(measured.items(), ("o-", "s--"), strict=True):
            axis.plot(lengths, values, style, label=name)
        axis.set(xscale="log", yscale="log", xlabel="words", title=title)
        axis.set_xticks(lengths, map(str, lengths))
        axis.legend()
    return figure


@step(CODING, KERNEL)
def cache() -> Figure:
    """Decoding with a cache.

    A decoder writes one word, reads it, and writes the next. As no word looks ahead, a new word
    changes nothing of those before it, and their keys and values stay what they were. So they are
    kept in a cache: each new word needs its own query, key and value, and one row of scores instead
    of the whole triangle.

    The same call takes one word or many, here a prompt of five, and then one at a time.
    """
    length, count, size = 12, 2, 8
    seeds = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(seed, (1, length, count, size)) for seed in seeds)  # [B, T, N, H]
    whole = jattn.attention(q, k, v, mask=masks.Causal())
    other_k, other_v = (array.at[:, -1].set(9.0) for array in (k, v))  # another last word
    other = jattn.attention(q, other_k, other_v, mask=masks.Causal())
    check("the last word changes nothing before it", same(other[:, :-1], whole[:, :-1]))

    held = jattn.cache.DenseCache.create(1, length, count, size, dtype=q.dtype)
    rows = []
    for start, end in [(0, 5), *((t, t + 1) for t in range(5, length))]:
        new_q, new_k, new_v = (array[:, start:end] for array in (q, k, v))
        out, held = jattn.cached_attention(new_q, new_k, new_v, held, mask=masks.Causal())
        rows.append(out)
    check("word by word, the same comes out as at once", same(jnp.concatenate(rows, axis=1), whole))
    show("a corner of the keys in the cache", np.asarray(held.keys)[0, 0, :3, :4])  # [B, K, S, H]
    print(f"words held: {held.lengths}")

    n = np.arange(1, 257)
    triangle = n * (n + 1) // 2  # scores of n words that do not look ahead
    without, kept = np.cumsum(triangle), np.cumsum(n)  # of all steps up to n
    print(f"scores for 256 words, one head: {without[-1]:,} without a cache, {kept[-1]:,} with it")
    saved = without[-1] / kept[-1]
    print(f"that is {saved:.0f} times as many")
    check("the factor is a third of the number of words", abs(saved / 256 - 1 / 3) < 0.01)
    # The picture.
    figure, axis = panels(1, width=6.5, height=3.4)
    axis.plot(n, without, label="everything anew for each word")
    axis.plot(n, kept, "--", label="with a cache")
    axis.set(xlabel="words written", yscale="log", title="scores computed, one head")
    axis.legend()
    return figure
