"""Y = L X R, and how L and R come to depend on the words: query, key and value; scaling."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import printed
from experiments.walkthrough.documents import CODING, INTERACTION, KERNEL, LLMS, MECHANISMS
from experiments.walkthrough.printed import matches
from experiments.walkthrough.similarity import INPUTS
from experiments.walkthrough.step import check, panels, same, show, step
from jattn import viz


@step(INTERACTION)
def interaction() -> Figure:
    """Y = L X R: matrices that mix.

    A sentence is a matrix X with a row for each word. A matrix L on its left mixes rows, so words
    act on one another; a matrix R on its right mixes columns, so every word is changed in the same
    way by itself. All of attention is a good choice of L and R.

    The document draws from NumPy's generator with seed 0 and prints what comes out. Here are its
    choices of L, with its numbers, to all eight digits.
    """
    draw = np.random.RandomState(0).randn  # the document's random numbers, in its order
    x = jnp.asarray(draw(4, 5))  # 4 words, 5 numbers each
    show("X", x, 8)
    check("X is the document's", matches(x, printed.X))

    keep = jattn.interaction(x, jnp.eye(4))  # L = identity: each word stays what it is
    check("the identity leaves every word alone", matches(keep, printed.X))
    total = jattn.interaction(x, jnp.ones((4, 4)))  # L = ones: each becomes the sum of all
    check("ones sum up all words, for each word", matches(total, printed.ONES_X))
    earlier = jattn.causal_interaction(4, jnp.float64)  # ones on and below the diagonal
    before = jattn.interaction(x, earlier)
    show("sums of a word and those before it", before, 8)
    check("a triangle sums what came before", matches(before, printed.TRIANGULAR_X))
    left = jnp.asarray(draw(4, 4))  # any other matrix
    check("L may be drawn at random", matches(left, printed.RANDOM_L))
    mixed = jattn.interaction(x, left)
    check("then it mixes at random", matches(mixed, printed.RANDOM_L_X))

    means = jattn.normalised_interaction(jnp.asarray(draw(4, 4)))  # exp, then rows that sum to 1
    show("L after a softmax of its rows", means, 8)
    check("softmax makes each row a mean", matches(means, printed.NORMALISED_L))
    check("and L X a mean of words", matches(jattn.interaction(x, means), printed.NORMALISED_L_X))
    right = jnp.asarray(draw(5, 6))  # R: from 5 numbers to 6
    check("R is the document's", matches(right, printed.R))
    changed = jattn.interaction(x, None, right)
    check("R changes every word alike, to 6 numbers", matches(changed, printed.X_R))

    # The picture.
    figure, axes = panels(4, width=9.0, height=2.6)
    choices = {
        "identity": np.eye(4),
        "ones": np.ones((4, 4)),
        "triangle": earlier,
        "softmax": means,
    }
    for axis, (name, matrix) in zip(axes, choices.items(), strict=True):
        axis.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
        axis.set(title=name, xticks=range(4), yticks=range(4), xlabel="word that is read")
    axes[0].set_ylabel("word that reads")
    return figure


def torch_rand(seed: int, *shapes: tuple[int, int]) -> list[np.ndarray]:
    """What torch.rand draws after torch.manual_seed: 24 bits of the same Mersenne Twister."""
    bits = np.random.RandomState(seed)
    draws = [bits.randint(0, 2**32, size=shape, dtype=np.uint32) for shape in shapes]
    return [(drawn % 2**24) / 2**24 for drawn in draws]


@step(INTERACTION, CODING, LLMS, MECHANISMS, KERNEL, uses=(torch_rand,))
def query_key_value() -> Figure:
    """Query, key and value.

    A fixed L would mix all sentences alike. So L is made from the words: learned matrices turn each
    word into a query (what it looks for), a key (what it can be found by) and a value (what it
    gives). L is the softmax of the products of queries and keys, and R is the value matrix:
    attention is Y = L X R again. With two matrices instead of one, the scores Q Kᵀ need not be
    symmetric: phone, for example, may score RAM higher than RAM scores phone.

    Misprints: in “Mechanisms” the projections stand as `W_k x ↦ q` and `W_q x ↦ k`, the letters
    exchanged, the weighted sum is over vectors k where it says values, and a head is written as a
    triple of products where their attention is meant.
    """
    draw = np.random.RandomState(0).randn
    for shape in ((4, 5), (4, 4), (4, 4), (5, 6)):  # what the step before drew
        draw(*shape)
    x, w_query, w_key, w_value = (jnp.asarray(draw(*s)) for s in ((4, 5), (5, 7), (5, 7), (5, 6)))
    left = jattn.normalised_interaction((x @ w_query) @ (x @ w_key).T)  # L, from the words
    show("L = softmax(Q Kᵀ)", left, 8)
    check("L is the document's, to eight digits", matches(left, printed.SIZES_L))
    check("so is V = X R", matches(x @ w_value, printed.SIZES_V))
    y = jattn.self_attention(x, w_query, w_key, w_value, scale=1.0)
    check("and so is attention, Y = L V", matches(y, printed.SIZES_LV))
    check("which is Y = L X R", same(y, jattn.interaction(x, left, w_value)))

    shapes = (4, 5), (5, 5), (5, 5), (5, 5)
    x5, w_query5, w_key5, w_value5 = (jnp.asarray(draw(*shape)) for shape in shapes)
    left5 = jattn.normalised_interaction((x5 @ w_query5) @ (x5 @ w_key5).T)
    check("with all sizes 5, L is the document's", matches(left5, printed.SQUARE_L))
    check("V too", matches(x5 @ w_value5, printed.SQUARE_V))
    check("and Y", matches(jattn.interaction(x5, left5, w_value5), printed.SQUARE_LV))

    weights = [jnp.asarray(w) for w in torch_rand(123, (3, 2), (3, 2), (3, 2))]
    z = jattn.self_attention(jnp.asarray(INPUTS), *weights)  # six words, now scaled by 1/√2
    show("context vectors of “Your journey starts with one step”", z)
    check("they are what the other document's class prints", matches(z, printed.SELF_ATTENTION))

    q, k = x @ w_query, x @ w_key
    check("products of queries among themselves are symmetric", same(q @ q.T, (q @ q.T).T))
    check("products of queries and keys are not", not same(q @ k.T, (q @ k.T).T, 0.1))
    return viz.heatmap(left, [f"word {i}" for i in range(1, 5)], title="L = softmax(Q Kᵀ)")


@step(LLMS, MECHANISMS)
def scaling() -> Figure:
    """Why products are divided by √H.

    A product of two vectors of H independent numbers of variance 1 has variance H. So scores grow
    as √H, and with them the softmax becomes a step: one weight is nearly 1, all others nearly 0,
    and then small changes of the scores change nothing. The gradient is gone, nothing is learned.

    Divided by √H, scores have variance 1 for every H. “LLMs Part 2” guesses that this is a
    heuristic; it is just the standard deviation. Its recipe divides by the square root of d1, the
    width of the input, where the width d2 of queries and keys is meant: the sums run over d2.
    """
    sizes = [4, 16, 64, 256, 1024]
    rng = np.random.default_rng(0)
    measured = []
    for size in sizes:
        query, key = jnp.asarray(rng.normal(size=(2, 1000, 16, size)))
        scores = jnp.sum(query[:, :1] * key, axis=-1)  # 1000 times, one query against 16 keys
        for scale in (1.0, size**-0.5):
            weights = jax.nn.softmax(scale * scores, axis=-1)
            # The derivative of a weight by its own score is w (1 − w).
            slope = jnp.mean(jnp.max(weights * (1 - weights), axis=-1))
            measured.append((jnp.std(scale * scores), jnp.mean(jnp.max(weights, axis=-1)), slope))
    spread, top, slope = np.array(measured).reshape(len(sizes), 2, 3).transpose(2, 1, 0)
    print("     H   unscaled: spread  top weight  gradient   scaled: spread  top weight  gradient")
    for i, size in enumerate(sizes):
        plain, scaled = ((spread[n, i], top[n, i], slope[n, i]) for n in (0, 1))
        print(f"{size:6}{plain[0]:18.2f}{plain[1]:12.3f}{plain[2]:10.4f}", end="")
        print(f"{scaled[0]:17.2f}{scaled[1]:12.3f}{scaled[2]:10.4f}")
    check("unscaled scores spread as √H", np.abs(spread[0] / np.sqrt(sizes) - 1) < 0.05)
    check("scaled scores spread by 1, whatever H is", np.abs(spread[1] - 1) < 0.05)
    check("unscaled, one word gets nearly all at H = 1024", top[0, -1] > 0.95)
    check("and the gradient falls to a fifth of the scaled one", slope[0, -1] < slope[1, -1] / 5)

    # The picture.
    figure, axes = panels(2, width=8.0)
    for axis, values, title in zip(
        axes, (top, slope), ("greatest weight", "gradient"), strict=True
    ):
        axis.plot(sizes, values[0], "o-", label="unscaled")
        axis.plot(sizes, values[1], "s--", label="divided by √H")
        axis.set(xscale="log", xlabel="H, numbers in a query", title=title, ylim=(0, None))
    axes[0].legend()
    return figure
