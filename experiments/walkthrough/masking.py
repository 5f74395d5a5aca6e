"""What a word may not look at: causal masks, derived twice, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import printed
from experiments.walkthrough.documents import CODING, INTERACTION, LLMS
from experiments.walkthrough.printed import matches
from experiments.walkthrough.similarity import JOURNEY
from experiments.walkthrough.step import check, panels, same, show, step
from jattn import masks, viz


def softmax_of_scores(scores: jax.Array, **arguments) -> jax.Array:
    """The library's weights for scores that are given: with unit vectors as keys, q · k is q."""
    query, key = scores[:, None, :], jnp.eye(scores.shape[-1])[:, None, :]  # [T, 1 head, S]
    return jattn.attention_weights(query, key, **arguments)[0]


def filled(rows: list[list[float]], fill: float) -> jax.Array:
    """A triangle as it is printed, each row filled up to six numbers."""
    return jnp.array([(row + 6 * [fill])[:6] for row in rows])


@step(CODING, LLMS, INTERACTION, uses=(softmax_of_scores, filled))
def causal() -> list[Figure]:
    """Causal masks, both ways.

    A model that writes word by word must not read what it has yet to write. One way: compute all
    weights, set those of later words to 0, and divide each row by what is left of it. The other:
    set later scores to −∞ before the softmax, as e^−∞ is 0. Both are the same numbers, for the
    whole row's sum cancels in the division; nothing of the later scores is left.

    Masks are put together with `&`, `|` and `~`. The second picture has one that keeps each word,
    the 23 before it and the first 8 of the text; beside it stand its tiles, of which the empty ones
    are never computed.

    Misprints in “Coding”: the first three rows of the masked and of the divided table have five
    numbers instead of six, and 0.1555 stands in the last row of the divided table for 0.1565. “LLMs
    Part 2” multiplies by the triangle before its softmax and writes that as `M @ scores`: a product
    of matrices mixes rows, and an entry times 0 has still e^0 = 1 in the softmax, so that later
    words are seen. The second is shown below.
    """
    table = jnp.asarray(printed.WEIGHTS)  # the weights that “Coding” prints, 6 × 6
    triangle = masks.Causal().dense(6, 6)
    check("the triangle of ones is the mask", same(masks.Causal().dense(4, 4), np.tri(4) > 0))
    divided = table * triangle / jnp.sum(table * triangle, axis=1, keepdims=True)
    show("weights times the triangle, divided by the rows' sums", divided)
    right = filled(printed.RENORMALISED, 0.0).at[5, 2].set(0.1565)  # the misprint put right
    check("they are the printed ones, to the rounding of the table", same(divided, right, 2e-4))
    ours = jattn.renormalised_causal(table)
    check("jattn.renormalised_causal(weights) is this", same(ours, divided))

    scores = jnp.array(printed.MASKED_SCORES)  # as printed, with −∞ above the diagonal
    known = jnp.where(triangle, scores, 0.25)  # any number will do there
    by_infinity = softmax_of_scores(known, mask=masks.Causal(), scale=0.5**0.5)
    check("the softmax of the printed scores / √2 is that table", same(by_infinity, right, 1e-4))
    scores = jnp.log(table)  # scores of which the weights are the softmax
    by_infinity = softmax_of_scores(scores, mask=masks.Causal(), scale=1.0)
    check("both ways agree to the last bits", same(by_infinity, ours, 1e-15))
    wild = softmax_of_scores(jnp.where(triangle, scores, 1e30), mask=masks.Causal(), scale=1.0)
    check("later scores of 1e30 change nothing with −∞", same(wild, by_infinity, 0))
    moved = jax.nn.softmax(jnp.where(triangle, scores, 0.5), axis=1)
    check("nor later scores of 0.5 the other way", same(jattn.renormalised_causal(moved), ours))
    zeroed = jax.nn.softmax(jnp.where(triangle, scores, 0.0), axis=1)
    print(f"weights of the first word, with scores times 0: {np.round(zeroed[0], 2)}")
    check("scores times 0 let later words in", zeroed[0, 1:].sum() > 0.5)

    draw = np.random.RandomState(0)
    draw.randn(20 + 16 + 16 + 30 + (20 + 35 + 35 + 30) + (20 + 25 * 3))  # of the steps before
    shapes = (4, 5), (5, 5), (5, 5), (5, 5)
    x, w_query, w_key, w_value = (jnp.asarray(draw.randn(*shape)) for shape in shapes)
    left = jattn.normalised_interaction((x @ w_query) @ (x @ w_key).T, masks.Causal())
    check("masked L of “Understanding” comes out to eight digits", matches(left, printed.MASKED_L))
    check("its V too", matches(x @ w_value, printed.MASKED_V))
    y = jattn.self_attention(x, w_query, w_key, w_value, mask=masks.Causal(), scale=1.0)
    check("and its Y", matches(y, printed.MASKED_LV))
    # The pictures.
    title = "masks.Causal() & (masks.Window(left=23) | masks.Global(8))"
    near = masks.Causal() & (masks.Window(left=23) | masks.Global(8))
    return [
        viz.heatmap(divided, JOURNEY, title="causal weights: each word reads itself and before"),
        viz.show_mask(near, 96, block=8, title=title),
    ]


@step(CODING, LLMS)
def dropout() -> Figure:
    """Dropout on weights.

    While a model is trained, each weight is set to 0 with probability p, so that no word is relied
    upon alone; what is left is multiplied by 1/(1 − p), so that the sum of a row is right in the
    mean, though not in each row. A weight of 0.3 at p = 0.2 becomes 0.3 × 1.25 = 0.375, or 0. At
    p = 0.5 what is left doubles. After training there is none.

    The decision is a hash of a key (a seed, as in `jax.random`) and of the place of the weight. So
    the same key gives the same dropout, also where fewer rows are computed.
    """
    row = jnp.log(jnp.array([0.3, 0.6, 0.1]))  # scores whose softmax is 0.3, 0.6, 0.1
    query = jnp.tile(row, (500, 1))[:, None, :]  # 500 words that look so: [500, 1 head, 3]
    unit = jnp.eye(3)[:, None, :]  # keys that pick scores out, values that show the weights
    key = jax.random.key(0)
    dropped = jattn.attention(query, unit, unit, scale=1.0, dropout_rate=0.2, dropout_key=key)
    dropped = dropped[:, 0]  # the only head: weights [500, 3]
    show("the first five rows", dropped[:5], 3)
    found = sorted({round(float(w), 12) for w in dropped[:, 0]})
    check(f"0.3 becomes {found[1]} or {found[0]:.0f}", found == [0, 0.375])
    share = float(jnp.mean(dropped == 0))
    check(f"a share of {share:.3f} is dropped, p = 0.2", abs(share - 0.2) < 0.03)
    sums = dropped.sum(axis=1)
    least, mean, most = (float(f(sums)) for f in (jnp.min, jnp.mean, jnp.max))
    print(f"rows sum to {least:.2f} … {most:.2f}, to {mean:.3f} in the mean")
    check("sums are 1 in the mean, not in each row", abs(mean - 1) < 0.05 and most - least > 0.5)
    again = jattn.attention(query, unit, unit, scale=1.0, dropout_rate=0.2, dropout_key=key)
    check("the same key drops the same", same(again[:, 0], dropped, 0))
    few = jattn.attention(query[:100], unit, unit, scale=1.0, dropout_rate=0.2, dropout_key=key)
    check("in the first 100 rows alone as well", same(few[:, 0], dropped[:100], 1e-12))
    half = jattn.attention(query, unit, unit, scale=1.0, dropout_rate=0.5, dropout_key=key)[:, 0]
    doubled = 2 * jnp.array([0.3, 0.6, 0.1])
    check("at p = 0.5 what is left doubles", (half == 0) | (jnp.abs(half - doubled) < 1e-12))

    # The picture.
    figure, axes = panels(3, width=8.0, height=3.4)
    shown = {
        "p = 0": jnp.tile(jnp.exp(row), (12, 1)),
        "p = 0.2": dropped[:12],
        "p = 0.5": half[:12],
    }
    for axis, (title, weights) in zip(axes, shown.items(), strict=True):
        axis.imshow(weights, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
        axis.set(title=title, xticks=range(3), xlabel="word that is read")
    axes[0].set_ylabel("row")
    return figure
