"""Causal masks, computed in two ways, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import printed
from experiments.walkthrough.documents import CODING, INTERACTION, LLMS
from experiments.walkthrough.printed import matches
from experiments.walkthrough.similarity import JOURNEY
from experiments.walkthrough.step import check, draw, panels, same, show, step
from jattn import masks, viz


def softmax_of_scores(scores: jax.Array, **arguments) -> jax.Array:
    """Returns the library's weights for scores [T, S]: with unit vectors as keys, q · k is q."""
    # Queries are [T, 1 head, S], keys [S, 1 head, S].
    query, key = scores[:, None, :], jnp.eye(scores.shape[-1])[:, None, :]
    return jattn.attention_weights(query, key, **arguments)[0]


def filled(rows: list[list[float]], fill: float) -> jax.Array:
    """Returns a printed triangle as an array, with each row filled up to six numbers."""
    return jnp.array([(row + 6 * [fill])[:6] for row in rows])


def masked_example() -> tuple[jax.Array, list[jax.Array]]:
    """Draws the words and the matrices of “Understanding” for its masked attention."""
    randn = np.random.RandomState(0).randn
    # Skips the numbers that its earlier sections draw.
    randn(20 + 16 + 16 + 30 + (20 + 35 + 35 + 30) + (20 + 25 * 3))
    x, *matrices = (jnp.asarray(randn(*shape)) for shape in ((4, 5), (5, 5), (5, 5), (5, 5)))
    return x, matrices


def later_scores_change_nothing(table: jax.Array) -> None:
    """Checks that both ways hide later words, for scores whose softmax is a table of weights."""
    triangle, scores = masks.Causal().dense(6, 6), jnp.log(table)
    ours = jattn.renormalised_causal(table)
    by_infinity = softmax_of_scores(scores, mask=masks.Causal(), scale=1.0)
    check("both ways agree to 1e-15", same(by_infinity, ours, 1e-15))
    wild = softmax_of_scores(jnp.where(triangle, scores, 1e30), mask=masks.Causal(), scale=1.0)
    check("with −∞, later scores of 1e30 change nothing", same(wild, by_infinity, 0))
    moved = jax.nn.softmax(jnp.where(triangle, scores, 0.5), axis=1)
    divides = same(jattn.renormalised_causal(moved), ours)
    check("with division, later scores of 0.5 change nothing either", divides)
    zeroed = jax.nn.softmax(scores * triangle, axis=1)[0]
    print(f"scores times 0: weights of the first word {np.round(zeroed, 2)}")
    check("scores times 0: later words get over half of its weights", zeroed[1:].sum() > 0.5)


def masked_interaction_is_as_printed() -> None:
    """Checks the masked attention of “Understanding”."""
    x, (w_query, w_key, w_value) = masked_example()
    L = jattn.normalised_interaction((x @ w_query) @ (x @ w_key).T, masks.Causal())
    check("masked L is as printed in “Understanding”", matches(L, printed.MASKED_L))
    check("V is as printed in “Understanding”", matches(x @ w_value, printed.MASKED_V))
    y = jattn.self_attention(x, w_query, w_key, w_value, mask=masks.Causal(), scale=1.0)
    check("Y is as printed in “Understanding”", matches(y, printed.MASKED_LV))


@step(
    CODING,
    LLMS,
    INTERACTION,
    uses=(
        softmax_of_scores,
        filled,
        later_scores_change_nothing,
        masked_example,
        masked_interaction_is_as_printed,
    ),
    misprints=(
        "Misprints in “Coding”: the first three rows of the masked and of the divided table have "
        "five numbers instead of six. The last row of the divided table has 0.1555 instead of "
        "0.1565.",
        "Errors in “LLMs Part 2”: `M @ attention_scores` is a product of matrices, which mixes "
        "rows, where entry times entry is meant. Besides, a score times 0 is 0, and e^0 is 1, so "
        "later words still get weights; with the scores used here, over half of them. The version "
        "with −∞ uses `mask`, which is not defined there, and takes the softmax of "
        "`attention_scores_norm` instead of `attenion_scores_masked`.",
    ),
)
def causal() -> None:
    """Causal masks, both ways.

    A model that writes word by word must not read the words that it has yet to write. There are two
    ways to hide them. The first computes all weights, sets those of later words to 0, and divides
    each row by its new sum. The second sets the scores of later words to −∞ before the softmax,
    because e^−∞ is 0. Both give the same weights:

        w_ij = e^(s_ij) / (Σ_(k≤i) e^(s_ik)) "if" j ≤ i
        w_ij = 0 "if" j > i

    In the first way, the sum over the whole row
    cancels in the division, and no later score is left. But a later score of 1e30 would leave 0/0
    in the first way, where −∞ hides it.

    “Coding” prints a table of weights, but not the parameters behind it. So the step starts from
    this table. The text also prints the scores; it hides the later ones.

    `masks.Causal()` is the causal mask. Its method `dense(T, S)` gives it as an array [T, S]: True
    means that a word may be attended to. Masks are combined with `&`, `|` and `~`. The second
    picture shows a mask that allows each word itself, the 23 words before it, and the first 8 words
    of the text. The library cuts a mask into tiles. A tile is empty if it allows no pair of words,
    full if it allows every pair, and mixed otherwise. Empty tiles are not computed.
    """
    table = jnp.asarray(printed.WEIGHTS)
    triangle = masks.Causal().dense(6, 6)
    check("the mask has True on and below the diagonal", same(triangle, np.tri(6) > 0))
    masked = table * triangle
    check("the weights times the mask are as printed", same(masked, filled(printed.MASKED, 0.0), 0))
    divided = masked / jnp.sum(masked, axis=1, keepdims=True)
    show("then divided by the sums of the rows", divided)
    # Arrays of JAX never change. This is a copy with 0.1565 in row 5 and column 2, counted from 0.
    expected = filled(printed.RENORMALISED, 0.0).at[5, 2].set(0.1565)
    check("as printed, within the rounding of the table", same(divided, expected, 2e-4))
    ours = jattn.renormalised_causal(table)
    check("jattn.renormalised_causal(weights) gives the same", same(ours, divided))

    # The text prints −∞ above the diagonal. The mask hides these places anyway, and −∞ times the 0
    # of a unit vector is not a number. So they get 0.25, as they might get any other number.
    scores = jnp.where(triangle, jnp.array(printed.MASKED_SCORES), 0.25)
    by_infinity = softmax_of_scores(scores, mask=masks.Causal(), scale=0.5**0.5)
    check("the softmax of the printed scores / √2 is as printed", same(by_infinity, expected, 1e-4))
    later_scores_change_nothing(table)
    masked_interaction_is_as_printed()
    # The pictures.
    title = "masks.Causal() & (masks.Window(left=23) | masks.Global(8))"
    mask = masks.Causal() & (masks.Window(left=23) | masks.Global(8))
    weights = viz.heatmap(divided, JOURNEY, title="causal weights")
    draw(weights, viz.show_mask(mask, 96, block=8, title=title))


def weights_at_rates(rates: dict[str, jax.Array]) -> Figure:
    """The weights of twelve rows, for each rate of dropout."""
    figure, axes = panels(3, width=8.0, height=3.4)
    for axis, (title, weights) in zip(axes, rates.items(), strict=True):
        axis.imshow(weights, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
        axis.set(title=title, xlabel="word that is attended to")
        axis.set_xticks(range(3), range(1, 4))
        axis.set_yticks(range(12), range(1, 13))
    axes[0].set_ylabel("row")
    figure.colorbar(axes[0].images[0], ax=axes, label="weight")
    return figure


def both_places(weights: jax.Array, dropped: jax.Array, seed: jax.Array) -> None:
    """Compares dropout on weights, and dropout on the output, both with p = 0.2."""
    # Three words, each with a value of two numbers.
    values = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    mean = weights @ values
    on_weights = dropped @ values
    keep = jax.random.bernoulli(seed, 0.8, (len(dropped), 2))
    on_output = jnp.where(keep, mean / 0.8, 0)
    print(f"output without dropout: {mean.round(2)}")
    for name, outputs, ways in (("weights", on_weights, 8), ("output", on_output, 4)):
        different = np.unique(np.asarray(outputs).round(9), axis=0)
        average = np.asarray(outputs.mean(axis=0)).round(2)
        print(f"dropout on the {name}: mean {average}, {len(different)} different outputs")
        check("the mean is that without dropout, to 0.05", same(outputs.mean(axis=0), mean, 0.05))
        check(f"there are {ways} different outputs", len(different) == ways)


@step(CODING, LLMS, uses=(weights_at_rates, both_places))
def dropout() -> None:
    """Dropout, and its two places.

    During training, dropout sets each weight to 0 with probability p. So the model cannot rely on
    one word alone. The other weights are multiplied by 1/(1 − p), so that the sum of a row is 1 in
    the mean, though not in each row:

        w′ = 0 "with probability" p
        w′ = w / (1 − p) "with probability" 1 − p
        p · 0 + (1 − p) · w / (1 − p) = w

    With p = 0.2, a weight of 0.3 becomes 0.3 × 1.25 = 0.375, or 0. With p = 0.5, the weights that
    are left double. After training there is no dropout.

    “Coding” names two places for dropout. The first is on the weights, as above: a mean then leaves
    out whole words. The second is on the output, after the weights have been applied to the values:
    there single numbers of the mean are set to 0, whichever words they came from. Three weights can
    be dropped in 8 ways, and an output of two numbers in 4 ways. “Coding” and “LLMs Part 2” drop
    weights. The paper of 2017 drops numbers of the output of each part of a block, before the
    residual connection adds the input.

    The library decides by a hash of a seed and of the place of the weight. So the same seed drops
    the same weights, even if only some of the rows are computed.
    """
    # Scores whose softmax is 0.3, 0.6, 0.1.
    row = jnp.log(jnp.array([0.3, 0.6, 0.1]))
    # The same query 500 times: [500, 1 head, 3].
    query = jnp.tile(row, (500, 1))[:, None, :]
    # As keys, unit vectors make the query the scores. As values, they make the output the weights.
    unit = jnp.eye(3)[:, None, :]
    # A seed for random numbers. JAX calls it a key. The same seed gives the same numbers.
    seed = jax.random.key(0)

    def dropped(query: jax.Array, p: float) -> jax.Array:
        out = jattn.attention(query, unit, unit, scale=1.0, dropout_rate=p, dropout_key=seed)
        # The only head: [500, 3].
        return out[:, 0]

    fifth = dropped(query, 0.2)
    show("the first five rows", fifth[:5], 3)
    first = sorted({round(float(weight), 12) for weight in fifth[:, 0]})
    check("with p = 0.2, 0.3 becomes 0.375 or 0", first == [0, 0.375])
    share = float(jnp.mean(fifth == 0))
    print(f"share of weights that are dropped: {share:.3f}")
    check("the share that is dropped is 0.2, to 0.03", abs(share - 0.2) < 0.03)
    sums = fifth.sum(axis=1)
    least, mean, most = (float(f(sums)) for f in (jnp.min, jnp.mean, jnp.max))
    print(f"sums of rows: {least:.2f} … {most:.2f}, mean {mean:.3f}")
    check("the mean of the sums is 1, to 0.05", abs(mean - 1) < 0.05)
    check("the sums differ by more than 0.5", most - least > 0.5)
    check("the same seed drops the same weights", same(dropped(query, 0.2), fifth, 0))
    check("also with the first 100 rows alone", same(dropped(query[:100], 0.2), fifth[:100]))
    half = dropped(query, 0.5)
    doubled = 2 * jnp.array([0.3, 0.6, 0.1])
    check("with p = 0.5 a weight doubles or is 0", (half == 0) | (abs(half - doubled) < 1e-12))
    both_places(jnp.exp(row), fifth, seed)

    # The picture.
    whole = jnp.tile(jnp.exp(row), (12, 1))
    draw(weights_at_rates({"p = 0": whole, "p = 0.2": fifth[:12], "p = 0.5": half[:12]}))
