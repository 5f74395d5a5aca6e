"""Y = L X R, with L and R computed from the words: query, key and value; scaling."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import printed
from experiments.walkthrough.diagrams import query_key_value_shapes
from experiments.walkthrough.documents import CODING, INTERACTION, KERNEL, LLMS, MECHANISMS
from experiments.walkthrough.printed import matches
from experiments.walkthrough.similarity import INPUTS
from experiments.walkthrough.step import check, draw, panels, same, show, step
from jattn import viz


def matrices_on_the_left(choices: dict[str, ArrayLike]) -> Figure:
    """Matrices L, by name."""
    figure, axes = panels(4, width=9.0, height=2.6)
    names = range(1, 5)
    for axis, (name, L) in zip(axes, choices.items(), strict=True):
        axis.imshow(L, cmap="Blues", vmin=0, vmax=1)
        axis.set(title=f"L = {name}", xlabel="word of X")
        axis.set_xticks(range(4), names)
        axis.set_yticks(range(4), names)
    axes[0].set_ylabel("row of L X")
    return figure


@step(INTERACTION, uses=(matrices_on_the_left,))
def interaction() -> None:
    """Y = L X R: matrices that mix.

    A sentence is a matrix X with a row for each word. A matrix L on its left mixes rows: each new
    row is a sum of words, each word times a number. A matrix R on its right mixes columns: it
    changes every word by itself, and all words in the same way. Attention has this form; the next
    step says what its L and its R are.

        Y = L X R
        y_i = (Σ_j L_ij x_j) R

    A plain sum of words grows with their number, so L should hold weights. A softmax of each row
    gives them, also where the entries of L are negative.

    `jattn.interaction(x, L, R)` is L X R. Without R, or with None for L, that matrix is left out.
    `jattn.causal_interaction(n, dtype)` is the n × n matrix with ones on and below the diagonal.
    `jattn.normalised_interaction(L)` is the softmax of each row of L.

    “Understanding” draws its matrices from NumPy's generator with seed 0, and prints them. The
    step draws the same numbers in the same order. `matches` compares all eight digits.
    """
    randn = np.random.RandomState(0).randn
    # Four words of five numbers.
    x = jnp.asarray(randn(4, 5))
    show("X", x, 8)
    check("X is as printed", matches(x, printed.X))

    kept = jattn.interaction(x, jnp.eye(4))
    check("L = identity: every word stays as it is", same(kept, x, 0))
    total = jattn.interaction(x, jnp.ones((4, 4)))
    check("L = ones: every row is the sum of all words", same(total, [x.sum(axis=0)] * 4))
    triangle = jattn.causal_interaction(4, jnp.float64)
    before = jattn.interaction(x, triangle)
    show("L = triangle: L X", before, 8)
    check("row n is the sum of the words 1 … n", same(before, jnp.cumsum(x, axis=0)))
    check("L = triangle is as printed", matches(triangle, printed.TRIANGULAR))
    tables = (kept, printed.X), (total, printed.ONES_X), (before, printed.TRIANGULAR_X)
    check("these three L X are as printed", [matches(got, table) for got, table in tables])
    drawn = jnp.asarray(randn(4, 4))
    mixed = jattn.interaction(x, drawn)
    tables = (drawn, printed.RANDOM_L), (mixed, printed.RANDOM_L_X)
    check("a drawn L and its L X are as printed", [matches(got, table) for got, table in tables])

    means = jattn.normalised_interaction(jnp.asarray(randn(4, 4)))
    show("L after a softmax of its rows", means, 8)
    positive = np.all(means > 0) and same(means.sum(axis=1), np.ones(4))
    check("its entries are positive, and its rows sum to 1", positive)
    mean = jattn.interaction(x, means)
    tables = (means, printed.NORMALISED_L), (mean, printed.NORMALISED_L_X)
    check("this L and its L X are as printed", [matches(got, table) for got, table in tables])

    # From five numbers to six.
    R = jnp.asarray(randn(5, 6))
    changed = jattn.interaction(x, None, R)
    check("R and X R are as printed", matches(R, printed.R) and matches(changed, printed.X_R))
    alone = [jattn.interaction(x[n : n + 1], None, R)[0] for n in range(4)]
    check("R changes each word as if it stood alone", same(changed, alone))
    # The picture.
    choices = {"identity": np.eye(4), "ones": np.ones((4, 4)), "triangle": triangle}
    draw(matrices_on_the_left({**choices, "softmax": means}))


def torch_rand(seed: int, *shapes: tuple[int, int]) -> list[jax.Array]:
    """Draws the numbers of torch.rand after torch.manual_seed: 24 bits of a Mersenne Twister."""
    bits = np.random.RandomState(seed)
    draws = [bits.randint(0, 2**32, size=shape, dtype=np.uint32) for shape in shapes]
    return [jnp.asarray((drawn % 2**24) / 2**24) for drawn in draws]


@step(
    INTERACTION,
    CODING,
    LLMS,
    MECHANISMS,
    KERNEL,
    uses=(torch_rand,),
    diagram=query_key_value_shapes(),
    misprints=(
        "Misprints in “Mechanisms”: the projections are printed as `W_k x ↦ q` and `W_q x ↦ k`, "
        "with the two letters exchanged. The shape L × d_k is given for `Q, W`, where Q and K are "
        "meant. The value vectors are called `k_j` in the words, while the formula beside them "
        "sums `v_j`. A head is printed as the triple (Q W, K W, V W), where the attention of the "
        "three is meant.",
        "Misprint in “LLMs Part 2”: the scores are printed as `X1.dot(keys)`, where the query "
        "`X1_Q` and the transposed keys are meant.",
    ),
)
def query_key_value() -> None:
    """Query, key and value.

    A fixed L would mix all sentences in the same way. So L is computed from the words. Three
    learned matrices turn each word into three vectors: a query, which says what the word looks for;
    a key, by which other words find it; and a value, which it gives to them. As matrices, these are
    Q, K and V, with a row for each word. L is the softmax of the rows of Q Kᵀ, and R is the matrix
    W_V that makes the values: attention is Y = L X R again.

        Q = X W_Q, K = X W_K, V = X W_V
        Y = softmax(Q Kᵀ) V

    One matrix for queries and keys would give symmetric scores Q Qᵀ. With two matrices, Q Kᵀ need
    not be symmetric. In the essay's example, the score of phone for RAM need not be that of RAM for
    phone.
    """
    randn = np.random.RandomState(0).randn
    # Skips the numbers that the previous step drew.
    for shape in ((4, 5), (4, 4), (4, 4), (5, 6)):
        randn(*shape)
    shapes = (4, 5), (5, 7), (5, 7), (5, 6)
    x, w_query, w_key, w_value = (jnp.asarray(randn(*shape)) for shape in shapes)
    L = jattn.normalised_interaction((x @ w_query) @ (x @ w_key).T)
    show("L = softmax(Q Kᵀ)", L, 8)
    check("L is as printed in “Understanding”, to eight digits", matches(L, printed.SIZES_L))
    check("V = X R is as printed", matches(x @ w_value, printed.SIZES_V))
    # The whole of attention in one call. Scale 1: the text does not divide the scores by √H.
    y = jattn.self_attention(x, w_query, w_key, w_value, scale=1.0)
    check("so is attention, Y = L V", matches(y, printed.SIZES_LV))
    check("attention is L X R", same(y, jattn.interaction(x, L, w_value)))

    shapes = (4, 5), (5, 5), (5, 5), (5, 5)
    x5, w_query5, w_key5, w_value5 = (jnp.asarray(randn(*shape)) for shape in shapes)
    L5 = jattn.normalised_interaction((x5 @ w_query5) @ (x5 @ w_key5).T)
    y5 = jattn.interaction(x5, L5, w_value5)
    check("with all sizes 5, L is as printed", matches(L5, printed.SQUARE_L))
    check("V is as printed, too", matches(x5 @ w_value5, printed.SQUARE_V))
    check("Y is as printed, too", matches(y5, printed.SQUARE_LV))

    # “Coding” has six words of three numbers, and queries, keys and values of two. It divides
    # the scores by √2, as self_attention does if it is given no scale.
    z = jattn.self_attention(jnp.asarray(INPUTS), *torch_rand(123, (3, 2), (3, 2), (3, 2)))
    show("context vectors of “Your journey starts with one step”", z)
    check("“Coding” prints them for SelfAttention_v1", matches(z, printed.SELF_ATTENTION))

    q, k = x @ w_query, x @ w_key
    check("Q Qᵀ is symmetric", same(q @ q.T, (q @ q.T).T))
    check("Q Kᵀ is not", not same(q @ k.T, (q @ k.T).T, 0.1))
    # The picture.
    draw(viz.heatmap(L, [f"word {i}" for i in range(1, 5)], title="L = softmax(Q Kᵀ)"))


def greatest_weight(query: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """Returns the greatest weight that a query [H] gives to one of the keys [16, H]."""
    return jnp.max(jax.nn.softmax(scale * (keys @ query)))


def gradients(queries: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """Computes the gradient of each query's greatest weight with respect to the query: [1000,
    H]."""
    # jax.grad makes a function that computes the gradient with respect to the first argument.
    gradient = jax.grad(greatest_weight)
    # jax.vmap applies it to many queries and their keys at once, with one scale for all.
    return jax.vmap(gradient, in_axes=(0, 0, None))(queries, keys, scale)


def weights_and_gradients(sizes: list[int], top: np.ndarray, median: np.ndarray) -> Figure:
    """Greatest weights and gradients for each H, unscaled and divided by √H."""
    figure, axes = panels(2, width=8.0)
    drawn = (top, "greatest weight, mean"), (median, "gradient, median")
    for axis, (values, title) in zip(axes, drawn, strict=True):
        axis.plot(sizes, values[0], "o-", label="unscaled")
        axis.plot(sizes, values[1], "s--", label="divided by √H")
        axis.set(xscale="log", xlabel="H, numbers in a query", title=title)
        axis.set_xticks(sizes, map(str, sizes))
        axis.minorticks_off()
    axes[0].set_ylim(0, 1.05)
    axes[1].set_yscale("log")
    axes[0].legend(loc="center right")
    return figure


@step(
    LLMS,
    MECHANISMS,
    uses=(greatest_weight, gradients, weights_and_gradients),
    misprints=(
        "Error in “LLMs Part 2”: the recipe divides by the square root of d1, the width of the "
        "input. The width d2 of queries and keys is meant, because the sums run over d2 numbers.",
    ),
)
def scaling() -> None:
    """Scores are divided by √H.

    Take a query and a key of H independent numbers of mean 0 and variance 1. Their dot product has
    variance H, so scores grow as √H. The Transformer divides them by √H:

        Var(q · k) = Σ_c Var(q_c k_c) = H
        Y = softmax((Q Kᵀ) / √H) V

    With large scores the softmax is nearly a step: one weight is
    nearly 1, and the others are nearly 0.

    How does the greatest weight change with the query? Its gradient with respect to the query
    tells. If the softmax is nearly a step, this gradient is nearly 0 for most queries. For a few
    queries two keys are nearly tied, and there the gradient is large. So most queries take almost
    no part in learning. The table has the median of 1000 queries, because the mean hides this: it
    does not fall with H.

    Scores divided by √H have variance 1 for every H. “LLMs Part 2” guesses that the root is a
    heuristic. It is the standard deviation of the scores under the assumption above. Up to H = 64
    the unscaled gradient is still the larger one; after that it falls quickly.
    """
    sizes = [4, 16, 64, 256, 1024]
    rng = np.random.default_rng(0)
    # For each H and each of two scales: spread (standard deviation) of scores, greatest weight,
    # gradients.
    spread, top, steep = np.zeros((2, 5)), np.zeros((2, 5)), np.zeros((2, 5, 1000))
    for i, size in enumerate(sizes):
        query = jnp.asarray(rng.normal(size=(1000, size)))
        # Sixteen keys for each query.
        keys = jnp.asarray(rng.normal(size=(1000, 16, size)))
        # [1000, 16]: each query times its keys.
        scores = (keys @ query[:, :, None])[:, :, 0]
        for n, scale in enumerate((1.0, size**-0.5)):
            spread[n, i] = jnp.std(scale * scores)
            top[n, i] = jnp.mean(jnp.max(jax.nn.softmax(scale * scores), axis=1))
            # The length of each gradient.
            steep[n, i] = jnp.linalg.norm(gradients(query, keys, scale), axis=1)
    median = np.median(steep, axis=-1)
    print(f"{'':23}spread of   mean greatest    median      mean")
    print(f"{'':14}{'H':>5}{'scores':>10}{'weight':>14}{'gradient':>17}{'gradient':>12}")
    for n, name in enumerate(("unscaled", "divided by √H")):
        for i, size in enumerate(sizes):
            print(f"{name:14}{size:5}{spread[n, i]:10.2f}{top[n, i]:14.3f}", end="")
            print(f"{median[n, i]:17.5f}{steep[n, i].mean():12.5f}")
    check("unscaled scores spread as √H, to 5 %", np.abs(spread[0] / np.sqrt(sizes) - 1) < 0.05)
    check("divided by √H they spread by 1, to 5 %", np.abs(spread[1] - 1) < 0.05)
    check("unscaled, the mean greatest weight at H = 1024 is over 0.95", top[0, -1] > 0.95)
    check(
        "there the median gradient is under a hundredth of that with √H",
        median[0, -1] < median[1, -1] / 100,
    )
    # The half of the queries with the smaller gradients, at H = 1024.
    share = np.sort(steep[:, -1])[:, :500].sum(axis=1) / steep[:, -1].sum(axis=1)
    print(f"share of half of the queries: unscaled {share[0]:.6f}, divided by √H {share[1]:.2f}")
    check("unscaled, half of the queries have under 1/1000 of the gradient", share[0] < 1e-3)
    # The picture.
    draw(weights_and_gradients(sizes, top, median))
