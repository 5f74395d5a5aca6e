"""Recurrent networks compared with attention, and decoding with a cache."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.diagrams import recurrent_and_direct
from experiments.walkthrough.documents import CODING, KERNEL, LLMS
from experiments.walkthrough.step import check, draw, panels, same, step
from jattn import masks


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the least time of a call, over at least seven calls and at least 0.2 s."""
    # The first call compiles. JAX computes in the background, so we wait for the result.
    jax.block_until_ready(function(*arguments))
    taken = []
    end = time.perf_counter() + 0.2
    while len(taken) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken.append(time.perf_counter() - start)
    return min(taken)


def influence(model: Callable[..., Any], x: jax.Array) -> float:
    """Returns the greatest derivative of the last output with respect to the first word."""

    def last(first: jax.Array) -> jax.Array:
        return model(x.at[0].set(first))[-1]

    # jax.jacrev computes the derivative of each output number with respect to each input number.
    return float(jnp.max(jnp.abs(jax.jacrev(last)(x[0]))))


def row(name: str, values: Sequence[float], style: str) -> str:
    """Formats a line of a table: a name, and numbers in one style."""
    return f"{name:30}" + "".join(f"{value:11{style}}" for value in values)


def reach_and_times(
    lengths: list[int], reach: dict[str, list[float]], times: dict[str, list[float]]
) -> Figure:
    """Gradients and times for each number of words, a line for each model."""
    figure, axes = panels(2, width=8.5, height=3.4)
    titles = "gradient, last word to first", "milliseconds"
    for axis, measured, title in zip(axes, (reach, times), titles, strict=True):
        shown = lengths[: len(measured["attention"])]
        for (name, values), style in zip(measured.items(), ("o-", "s--"), strict=True):
            axis.plot(shown, values, style, label=name)
        axis.set(xscale="log", yscale="log", xlabel="words", title=title)
        axis.set_xticks(shown, map(str, shown))
        axis.minorticks_off()
        axis.legend()
    return figure


@step(
    LLMS,
    KERNEL,
    CODING,
    uses=(seconds, influence, row, reach_and_times),
    diagram=recurrent_and_direct(),
)
def recurrence() -> None:
    """The limits of recurrent networks.

    A sentence cannot be translated word by word, and a word may depend on one that came long
    before. Before 2017, most models of language were recurrent networks. A recurrent network reads
    word by word. It keeps what it has read in one vector, the state h, and cannot compute state 10
    before state 5. On the way from the last word back to the first, the gradient is multiplied once
    for every word between them:

        h_t = f(h_(t−1), x_t)
        ∂h_T / ∂h_1 = Π_(t=2)^T ∂h_t / ∂h_(t−1)

    So there are three problems. One vector has to hold the whole text, the gradient fades or
    explodes, and the words are computed one after the other. Attention answers all three. Every
    word reads every other word directly, and its result is a mean of what it reads, with weights w.
    All words are computed at once, as products of matrices.

        y_t = Σ_j w_tj v_j

    The price is T × T weights: for a text twice as long, four times as many. The next steps explain
    where the weights and the vectors v come from. Here attention is one call,
    `jattn.self_attention`, and `masks.Causal()` lets a word read only itself and the words before
    it, as in the recurrent network.

    The step compares a gated recurrent unit and attention, both of width 128 and without training.
    The gradient is that of the last output with respect to the first word. The times are
    of a forward pass on the machine that made this page. The recurrent network needs as many steps
    as there are words, so its time grows with T. The time of attention grows with T × T as soon as
    the pairs outweigh all else. Where the two lines cross depends on the machine.
    """
    width = 128
    # GRU: a gated recurrent unit, from [T, 128] to [T, 128]. Its parameters have 64 bits here.
    unit = jattn.nn.GRU(width, width, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    normals = (jax.random.normal(jax.random.key(n), (width, width)) for n in range(3))
    # For queries, keys and values.
    matrices = [matrix / width**0.5 for matrix in normals]
    # jax.jit compiles a function or a module.
    models = {
        "recurrent": jax.jit(unit),
        "attention": jax.jit(lambda x: jattn.self_attention(x, *matrices, mask=masks.Causal())),
    }
    lengths = [16, 64, 256, 1024, 4096]
    reach: dict[str, list[float]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    for length in lengths:
        x = jax.random.normal(jax.random.key(length), (length, width))
        for name, model in models.items():
            times[name].append(1e3 * seconds(model, x))
            # For 4,096 words all derivatives would take too much time.
            if length < 4096:
                reach[name].append(influence(model, x))
    print(row("words", lengths, ""))
    for name in models:
        print(row(f"{name}: gradient", reach[name], ".1e"))
        print(row(f"{name}: milliseconds", times[name], ".2f"))
    slow, direct = reach["recurrent"], reach["attention"]
    faded = slow[2] < 1e-30 * slow[0]
    check("recurrent: from 16 to 256 words the gradient falls over 10³⁰-fold", faded)
    lasts = direct[2] > direct[0] / 100
    check("attention: from 16 to 256 words it falls less than 100-fold", lasts)
    longer = times["recurrent"][4] / times["recurrent"][2]
    check("recurrent: 4,096 words take over 8 times as long as 256", longer > 8)
    faster = times["attention"][2] < times["recurrent"][2]
    check("attention takes less time for 256 words than recurrence", faster)
    # The picture.
    draw(reach_and_times(lengths, reach, times))


def scores_so_far(n: np.ndarray, without: np.ndarray, cached: np.ndarray) -> Figure:
    """The scores for n words, without a cache and with one."""
    figure, axis = panels(1, width=6.5, height=3.4)
    axis.plot(n, without, label="without a cache")
    axis.plot(n, cached, "--", label="with a cache")
    axis.set(xlabel="words written", yscale="log", title="scores for all words so far, one head")
    axis.legend()
    return figure


def one_more_word(seeds: jax.Array) -> None:
    """Measures the time of word 1,024, for 8 heads of 64 numbers, with and without a cache."""
    shape = (1, 1024, 8, 64)
    q, k, v = (jax.random.normal(seed, shape, jnp.float32) for seed in seeds)
    mask = masks.Causal()
    add = jax.jit(lambda q, k, v, cached: jattn.cached_attention(q, k, v, cached, mask=mask))
    anew = jax.jit(lambda q, k, v: jattn.attention(q, k, v, mask=mask))
    cached = jattn.cache.DenseCache.create(*shape)
    _, cached = add(*(array[:, :-1] for array in (q, k, v)), cached=cached)
    last = [array[:, -1:] for array in (q, k, v)]
    fast = seconds(lambda *new: add(*new, cached=cached), *last)
    slow = seconds(anew, q, k, v)
    print(f"word 1,024: {1e3 * fast:.2f} ms with a cache, {1e3 * slow:.2f} ms without")
    check("with a cache it takes less time", fast < slow)


@step(CODING, KERNEL, relation="Goes on from", uses=(scores_so_far, one_more_word))
def cache() -> None:
    """Decoding with a cache.

    A decoder writes one word, reads it, and writes the next. In causal attention no word attends to
    later words, so a new word changes nothing before it. The keys and values of the words before
    stay what they were. They can be kept in a cache. Each new word then needs its own query, key
    and value, and one row of scores instead of the whole triangle.

    `jattn.cached_attention` takes one new word or many. Here it takes a prompt of five words, and
    then one word at a time.

    Without a cache, n words take n (n + 1) / 2 scores each time that a word is added. With a cache,
    word n takes n scores. Summed over N words, this is

        Σ_(n=1)^N (n (n + 1)) / 2 ≈ N³ / 6 "without a cache"
        Σ_(n=1)^N n ≈ N² / 2 "with a cache"

    The ratio is about N/3.
    """
    length, count, size = 12, 2, 8
    seeds = jax.random.split(jax.random.key(0), 3)
    # Queries, keys and values, [B, T, N, H].
    q, k, v = (jax.random.normal(seed, (1, length, count, size)) for seed in seeds)
    whole = jattn.attention(q, k, v, mask=masks.Causal())
    # Another last word.
    other_k, other_v = (array.at[:, -1].set(9.0) for array in (k, v))
    other = jattn.attention(q, other_k, other_v, mask=masks.Causal())
    check("the last word changes nothing before it", same(other[:, :-1], whole[:, :-1]))

    # Room for 12 words. A call returns its output and a new cache.
    cache = jattn.cache.DenseCache.create(1, length, count, size, dtype=q.dtype)
    rows = []
    for start, end in [(0, 5), *((t, t + 1) for t in range(5, length))]:
        new_q, new_k, new_v = (array[:, start:end] for array in (q, k, v))
        out, cache = jattn.cached_attention(new_q, new_k, new_v, cache, mask=masks.Causal())
        rows.append(out)
    check("word by word, the same comes out as at once", same(jnp.concatenate(rows, axis=1), whole))
    # The cache is [B, K, S, H]: a query reads all keys of its head, so these stand side by side.
    check("the cache holds the keys", same(cache.keys[0], jnp.swapaxes(k[0], 0, 1)))
    print(f"words in the cache: {cache.lengths}")

    one_more_word(seeds)
    # The scores for all words up to n, for each n, without a cache and with one.
    n = np.arange(1, 257)
    anew, cached = np.cumsum(n * (n + 1) // 2), np.cumsum(n)
    print(f"256 words, one head: {anew[-1]:,} scores without a cache, {cached[-1]:,} with one")
    # The picture.
    draw(scores_so_far(n, anew, cached))
