"""Several heads, as a list and side by side; and scores by a small network instead of a product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import CODING, LLMS, MECHANISMS
from experiments.walkthrough.similarity import JOURNEY
from experiments.walkthrough.step import check, panels, same, show, step
from jattn import masks, viz


@step(LLMS, MECHANISMS, CODING)
def heads() -> Figure:
    """One head and many.

    One softmax makes one mean. So the width D is split between N heads of H = D / N numbers, each
    with queries, keys and values of its own: one head may follow grammar, another the meaning. What
    the heads give is put side by side and multiplied by a last matrix; below, only the module at
    the end has it, as `out`.

    Written as a list, heads run one after the other. Side by side in one matrix, they are one
    product, and still each head sees only its own columns. The 2017 paper has 8 heads of 64 in a
    width of 512, so that 8 × 64 = 512 again.
    """
    width, count, size = 512, 8, 64
    x = jax.random.normal(jax.random.key(0), (2, 6, width))  # 2 sentences of 6 words
    # Matrices for queries, keys and values, each [512, 512].
    matrices = [jax.random.normal(jax.random.key(n), (width, width)) / 16 for n in (1, 2, 3)]
    query, key, value = ((x @ w).reshape(2, 6, count, size) for w in matrices)  # [B, T, N, H]
    together = jattn.attention(query, key, value, mask=masks.Causal())
    show("a corner of all heads, side by side", together.reshape(2, 6, width)[0, :3, :5])
    check("8 heads of 64 make a width of 512", together.reshape(2, 6, -1).shape == (2, 6, 512))

    alone = []
    for n in range(count):  # the list: head n has columns 64 n … 64 n + 63
        mine = [w[:, n * size : (n + 1) * size] for w in matrices]
        alone.append(jattn.self_attention(x, *mine, mask=masks.Causal()))
    listed = jnp.concatenate(alone, axis=-1)
    check("the list of heads gives the same", same(listed, together.reshape(2, 6, width)))

    changed = query.at[:, :, 3].set(0.0)  # another query for head 3
    other = jattn.attention(changed, key, value, mask=masks.Causal())
    differs = jnp.max(jnp.abs(other - together), axis=(0, 1, 3))  # for each head
    check("a head sees only its own columns", (differs > 0) == (jnp.arange(count) == 3))

    layer = jattn.nn.MultiHeadAttention(count, width, mask=masks.Causal(), rngs=nnx.Rngs(0))
    listed = jattn.nn.SingleHeads(layer)  # the same weights, as a list of heads
    check("the modules, packed and listed, give the same too", same(layer(x), listed(x), 1e-4))
    sizes = {"query": layer.query.kernel.shape, "out": layer.out.kernel.shape}
    print(f"parameters of the module: {sizes}")
    weights = jattn.attention_weights(query, key, mask=masks.Causal())[0]  # [N, T, S]
    return viz.grid(weights[:4], JOURNEY, title="four of the eight heads, with random weights")


@step(MECHANISMS)
def additive() -> Figure:
    """Additive and multiplicative scores.

    The first attention (RNNsearch, Bahdanau and others, 2014) scored a query and a key by a small
    network: project both, add, take tanh, and sum up with learned weights w. Luong and others
    (2015) used a product with a matrix between, q W k; the Transformer takes the plain product and
    leaves the matrix to the projections.

    A network's score cannot exceed the sum of |w|, so w decides how much of the softmax one word
    can take. A product grows with its vectors, which is why it is scaled, and it is one
    multiplication of matrices. The network's hidden layer would be T × S × A numbers; the library
    never holds it at once.
    """
    size, hidden = 8, 5
    seeds = jax.random.split(jax.random.key(0), 6)
    query, key = (jax.random.normal(seed, (6, size)) for seed in seeds[:2])
    w_query, w_key = (jax.random.normal(seed, (size, hidden)) for seed in seeds[2:4])
    w_score = jax.random.normal(seeds[4], (hidden,))  # w
    middle = jax.random.normal(seeds[5], (size, size))  # Luong's W
    ours = jattn.additive_attention(query, key, key, w_query, w_key, w_score)  # values = keys
    layer = jnp.tanh((query @ w_query)[:, None] + (key @ w_key)[None])  # [T, S, A]
    scores = layer @ w_score  # [T, S]
    check("additive attention is its formula", same(ours, jax.nn.softmax(scores, axis=1) @ key))
    bound = jnp.sum(jnp.abs(w_score))
    print(f"additive scores lie within ±{bound:.2f}, the sum of |w|")
    far = jnp.tanh((1000 * query @ w_query)[:, None] + (1000 * key @ w_key)[None]) @ w_score
    check("also those of vectors a thousand times as long", jnp.abs(far) <= bound)
    longer = (2 * query) @ (2 * key).T
    check(
        "products of vectors twice as long are four times as large", same(longer, 4 * query @ key.T)
    )

    ours = jattn.multiplicative_attention(query, key, key, middle)
    general = jax.nn.softmax((query @ middle) @ key.T, axis=1) @ key
    check("Luong's score is a plain product, with q W for q", same(ours, general))

    long = jnp.zeros((2048, size))  # memory where the hidden layer would take 168 MB
    # Compiled and not run: the program tells how much memory it takes between input and output.
    program = jax.jit(jattn.additive_attention).lower(long, long, long, w_query, w_key, w_score)
    memory: Any = program.compile().memory_analysis()
    used = memory.temp_size_in_bytes
    whole = 2048 * 2048 * hidden * 8
    print(f"2,048 words: {used / 1e6:.0f} MB used, the whole layer would take {whole / 1e6:.0f} MB")
    check("less than a quarter of the hidden layer exists at once", used < whole / 4)

    # The picture.
    line = np.linspace(-3, 3, 61)
    q1, k1 = line[:, None], line[None]  # queries and keys of one number
    figure, axes = panels(2, width=8.0, height=3.4)
    look: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -9, "vmax": 9, "origin": "lower"}
    look |= {"extent": (-3, 3, -3, 3)}
    axes[0].imshow(q1 * k1, **look)
    axes[0].set(title="score q · k", xlabel="key", ylabel="query")
    image = axes[1].imshow(2 * np.tanh(q1 + k1), **look)
    axes[1].set(title="score 2 tanh(q + k)", xlabel="key")
    figure.colorbar(image, ax=axes)
    return figure
