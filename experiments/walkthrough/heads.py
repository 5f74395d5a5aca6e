"""Several heads, as a list and side by side, and scores computed by a small network."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.diagrams import heads_side_by_side
from experiments.walkthrough.documents import CODING, LLMS, MECHANISMS
from experiments.walkthrough.similarity import JOURNEY
from experiments.walkthrough.step import check, draw, panels, same, show, step
from jattn import masks, viz


def split(x: jax.Array, matrix: jax.Array, count: int) -> jax.Array:
    """Multiplies x by a matrix and splits the columns into heads: [B, T, D] to [B, T, N, H]."""
    return (x @ matrix).reshape(*x.shape[:2], count, -1)


def parameter_count(module: nnx.Module) -> int:
    """Returns how many parameters a module has."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def heads_are_separate(x: jax.Array, matrices: list[jax.Array], count: int) -> None:
    """Checks that zeros in the columns of one head change no other head."""
    whole = jattn.attention(*(split(x, w, count) for w in matrices), mask=masks.Causal())
    changes_one_head = []
    for which, n in itertools.product(range(3), range(count)):
        # Zeros in the columns of head n, in the matrix of queries, of keys or of values.
        columns = slice(n * whole.shape[-1], (n + 1) * whole.shape[-1])
        zeros = matrices[which].at[:, columns].set(0.0)
        changed = [zeros if i == which else matrix for i, matrix in enumerate(matrices)]
        other = jattn.attention(*(split(x, w, count) for w in changed), mask=masks.Causal())
        # How much each head has changed.
        differs = jnp.max(jnp.abs(other - whole), axis=(0, 1, 3))
        changes_one_head.append((differs > 1e-9) == (jnp.arange(count) == n))
    check("zeros in the columns of one head change this head alone", changes_one_head)


def modules_of_heads(x: jax.Array, count: int) -> None:
    """Compares modules of Flax: heads side by side, a list of heads, and one head."""
    # A module of Flax holds parameters. `rngs` gives the seeds for their first values.
    width = x.shape[-1]
    layer = jattn.nn.MultiHeadAttention(count, width, mask=masks.Causal(), rngs=nnx.Rngs(0))
    # A module with the same parameters that computes a list of heads.
    listed = jattn.nn.SingleHeads(layer)
    # Modules compute in 32 bits, where rounding shows sooner.
    check("both modules give the same, to 1e-4", same(layer(x), listed(x), 1e-4))
    # Flax calls a matrix of parameters a kernel.
    print(f"query matrices of the module {list(layer.query.kernel.shape)}")
    print(f"its last matrix {list(layer.out.kernel.shape)}")
    single = jattn.nn.MultiHeadAttention(1, width, mask=masks.Causal(), rngs=nnx.Rngs(0))
    print(f"parameters of {count} heads side by side: {parameter_count(layer):,}")
    print(f"parameters of {count} layers: {count * parameter_count(single):,}")
    equal = parameter_count(layer) == parameter_count(single)
    check("the heads have as many parameters as one head of the whole width", equal)


@step(
    LLMS,
    MECHANISMS,
    CODING,
    uses=(split, parameter_count, heads_are_separate, modules_of_heads),
    diagram=heads_side_by_side(),
)
def heads() -> None:
    """One head and many, side by side.

    One softmax gives each word one mean. Several heads give it several: one head may follow the
    grammar, and another the meaning. The width D is split between N heads of H = D / N numbers.
    Each head has its own queries, keys and values. The outputs of all heads are put side by side
    and multiplied by one more learned matrix W_O. The first part of this step leaves that matrix
    out.

        head_n = softmax((Q_n K_nᵀ) / √H) V_n
        Y = [head_1, …, head_N] W_O

    Why side by side, and not on top of one another? On top of one another, each head would read
    what the one below it wrote, and wait for it. Each would be a layer with matrices for the whole
    width: N times as many parameters, computed one after the other. Side by side, N heads have as
    many parameters as one head of the whole width, and no head waits for another. Heads in a list
    are still computed one by one; with their columns in one matrix, one product computes all of
    them, and each head uses only its own columns.

    And why not the mean of the heads? A mean does not tell which head said what: it stays the same
    if heads are exchanged, and two heads that say opposite things cancel. Side by side, each head
    keeps its columns, and W_O learns what to make of them. The 2017 paper has 8 heads of 64 numbers
    in a width of 512.
    """
    width, count, size = 512, 8, 64
    # Two sentences of six words: numbers drawn from a seed.
    x = jax.random.normal(jax.random.key(0), (2, 6, width))
    # For queries, keys and values. Divided by 16, they give scores a standard deviation of 2.
    matrices = [jax.random.normal(jax.random.key(n), (width, width)) / 16 for n in (1, 2, 3)]
    query, key, value = (split(x, matrix, count) for matrix in matrices)
    print(f"queries [B, T, N, H] = {list(query.shape)}")
    together = jattn.attention(query, key, value, mask=masks.Causal())
    packed = together.reshape(2, 6, width)
    print(f"all heads side by side [B, T, D] = {list(packed.shape)}")
    show("a corner of them", packed[0, :3, :5])

    # The list. Head n has the columns 64 n … 64 n + 63, with n counted from 0.
    columns = [slice(n * size, (n + 1) * size) for n in range(count)]
    alone = [
        jattn.self_attention(x, *(matrix[:, mine] for matrix in matrices), mask=masks.Causal())
        for mine in columns
    ]
    check("the list of heads gives the same", same(jnp.concatenate(alone, axis=-1), packed))

    heads_are_separate(x, matrices, count)

    exchanged = together[:, :, ::-1]
    check("exchanged heads have the same mean", same(exchanged.mean(axis=2), together.mean(axis=2)))
    different = not same(exchanged.reshape(packed.shape), packed, 0.1)
    check("side by side, exchanged heads differ", different)

    modules_of_heads(x, count)
    # The picture.
    # The heads of the first sentence, [N, T, S], counted from 1.
    weights = jattn.attention_weights(query, key, mask=masks.Causal())[0]
    draw(viz.grid(weights[:4], JOURNEY, title="four of the eight heads, with random matrices"))


def additive_and_product() -> Figure:
    """Scores of queries and keys of one number."""
    line = np.linspace(-3, 3, 61)
    # Queries and keys of one number.
    q1, k1 = line[:, None], line[None]
    figure, axes = panels(2, width=8.0, height=3.4)
    look: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -9, "vmax": 9, "origin": "lower"}
    look |= {"extent": (-3, 3, -3, 3)}
    axes[0].imshow(q1 * k1, **look)
    axes[0].set(title="score q · k", xlabel="key", ylabel="query")
    image = axes[1].imshow(2 * np.tanh(q1 + k1), **look)
    axes[1].set(title="score 2 tanh(q + k)", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes, label="score")
    return figure


def memory_without_the_layer(size: int, *parameters: jax.Array) -> None:
    """Prints the memory that 2,048 words take, and checks that the layer is not in it."""
    long = jnp.zeros((2048, size))
    # jax.jit is the compiler of JAX. `lower` takes arguments for their shapes alone, so that the
    # program is compiled and not run.
    program = jax.jit(jattn.additive_attention).lower(long, long, long, *parameters)
    memory: Any = program.compile().memory_analysis()
    # Temporary memory: what the program needs besides its arguments and its result.
    used = memory.temp_size_in_bytes
    # A number of 64 bits takes eight bytes.
    whole = 2048 * 2048 * len(parameters[-1]) * 8
    print(f"2,048 words: {used / 1e6:.0f} MB, the whole layer would take {whole / 1e6:.0f} MB")
    check("that is less than a tenth of the layer", used < whole / 10)


@step(MECHANISMS, uses=(additive_and_product, memory_without_the_layer))
def additive() -> None:
    """Additive and multiplicative scores.

    The first attention, RNNsearch by Bahdanau and others (2014), computed scores by a small
    network. It projects the query and the key, adds them, takes tanh, and multiplies by a learned
    vector w. In the formula, q and k are rows:

        s_ij = tanh(q_i W_Q + k_j W_K) · w

    Luong and others (2015) put a matrix between query and key, q W k. The Transformer
    takes the dot product q · k, and has its matrices in the projections. “Mechanisms” calls this
    dot product “multiplicative”; here the word means q W k.

    A score of the network lies between −Σ|w| and Σ|w|, so the length of queries and keys cannot
    make it large. A product grows with the length of its vectors; that is one reason to scale it.
    But products are cheap: all scores are one product of matrices. The network has a hidden layer
    of T × S × A numbers. The library computes this layer in parts.
    """
    size, hidden = 8, 5
    # Six seeds from one.
    seeds = jax.random.split(jax.random.key(0), 6)
    query, key = (jax.random.normal(seed, (6, size)) for seed in seeds[:2])
    w_query, w_key = (jax.random.normal(seed, (size, hidden)) for seed in seeds[2:4])
    # The vector w, and Luong's W.
    w_score = jax.random.normal(seeds[4], (hidden,))
    middle = jax.random.normal(seeds[5], (size, size))
    # The keys are the values, too.
    ours = jattn.additive_attention(query, key, key, w_query, w_key, w_score)
    # The hidden layer [T, S, A], and scores [T, S].
    layer = jnp.tanh((query @ w_query)[:, None] + (key @ w_key)[None])
    scores = layer @ w_score
    check("additive attention is its formula", same(ours, jax.nn.softmax(scores, axis=1) @ key))
    bound = jnp.sum(jnp.abs(w_score))
    print(f"the sum of |w| is {bound:.2f}")
    far = jnp.tanh((1000 * query @ w_query)[:, None] + (1000 * key @ w_key)[None]) @ w_score
    check("no score of vectors 1000 times as long exceeds it", jnp.abs(far) <= bound)
    longer = (2 * query) @ (2 * key).T
    check("vectors twice as long make products four times", same(longer, 4 * query @ key.T))

    ours = jattn.multiplicative_attention(query, key, key, middle)
    general = jax.nn.softmax((query @ middle) @ key.T, axis=1) @ key
    check("jattn.multiplicative_attention is softmax((q W) Kᵀ) K", same(ours, general))

    memory_without_the_layer(size, w_query, w_key, w_score)
    # The picture.
    draw(additive_and_product())
