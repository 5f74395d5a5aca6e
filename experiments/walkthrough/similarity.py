"""Words as vectors, and attention without learned parameters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import corpus
from experiments.walkthrough.corpus import sentences, vocabulary
from experiments.walkthrough.documents import CODING, INTERACTION, LLMS, MECHANISMS
from experiments.walkthrough.step import check, constants, draw, panels, same, show, step
from jattn import viz


def company(texts: list[list[str]], words: list[str]) -> np.ndarray:
    """Computes four numbers for each word from the words that share its sentences."""
    place = {word: i for i, word in enumerate(words)}
    together = np.zeros((len(words), len(words)))
    for sentence in texts:
        for a, b in itertools.product(sentence, sentence):
            together[place[a], place[b]] += 1
    # The singular value decomposition; log1p(count) is log(1 + count).
    directions, strengths, _ = np.linalg.svd(np.log1p(together))
    # The four strongest directions; a row for each word.
    return directions[:, :4] * strengths[:4]


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Returns the cosine of the angle between every two rows."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


@step(
    MECHANISMS,
    uses=(constants(corpus.__file__, "NATURE", "MONEY"), sentences, vocabulary, company, cosines),
)
def vectors() -> None:
    """Words as vectors.

    A model computes with numbers, so each word gets a vector. The simplest vectors are one-hot:
    each word has an axis of its own. The cosine of two vectors is 1 if they point in the same
    direction, and 0 if they are at right angles:

        cos(a, b) = (a · b) / (|a| |b|)

    Two different one-hot vectors always have the cosine 0, so they do not say which words are
    similar. Better vectors come from the company of a word: words that occur among the same words
    get similar vectors. word2vec learns such vectors with a small network. Here counts give them.
    The function `company` counts how often two words share a sentence. It takes log(1 + count), and
    a singular value decomposition reduces each row to four numbers.

    The corpus has 18 sentences about rivers and 18 about money. The noun bank occurs in all of
    them. It has only one vector, and this vector lies between the two kinds of sentences. If we
    leave out most sentences about money, the vector moves towards the rivers.

    Four numbers are too few to tell river, lake and muddy apart: their cosines are 1.00. River and
    money still have a cosine of 0.71, because both share sentences with the, bank, was and looked.
    """
    words = vocabulary()
    one_hot = np.eye(len(words))
    check("one-hot vectors: two different words have the cosine 0", same(cosines(one_hot), one_hot))

    learned = company(sentences(), words)
    river, stream, bank, money = map(words.index, ("river", "stream", "bank", "money"))
    show("the vector of bank", learned[bank])
    alike = cosines(learned)
    print(f"river and stream: {alike[river, stream]:.2f}")
    print(f"river and money:  {alike[river, money]:.2f}")
    check("river is closer to stream than to money", alike[river, stream] > alike[river, money])
    print(f"bank and river: {alike[bank, river]:.2f}   bank and money: {alike[bank, money]:.2f}")
    even = abs(alike[bank, river] - alike[bank, money]) < 0.01
    check("bank is as close to river as to money, to 0.01", even)
    between = min(alike[bank, river], alike[bank, money]) > alike[river, money] + 0.1
    check("bank is closer to both than they are to each other", between)

    # All 18 sentences about rivers, and 6 about money, in which some words do not occur.
    texts = sentences()[:24]
    left = [word for word in words if any(word in text for text in texts)]
    river, bank, money = map(left.index, ("river", "bank", "money"))
    uneven = cosines(company(texts, left))
    print(f"with 6 sentences about money: {uneven[bank, river]:.2f}, {uneven[bank, money]:.2f}")
    moved = uneven[bank, river] > uneven[bank, money] + 0.1
    check("then bank is closer to river than to money", moved)

    few = ["river", "lake", "muddy", "bank", "money", "loan", "strict"]
    rows = list(map(words.index, few))
    # The picture.
    picture = viz.heatmap(alike[np.ix_(rows, rows)], few, title="cosines of word vectors")
    picture.axes[0].set(xlabel="word", ylabel="word")
    draw(picture)


JOURNEY = ["Your", "journey", "starts", "with", "one", "step"]
INPUTS = (
    np.array([[43, 15, 89], [55, 87, 66], [57, 85, 64], [22, 58, 33], [77, 25, 10], [5, 80, 55]])
    / 100
)


def softmax(scores: jax.Array) -> jax.Array:
    """Turns each row of scores into positive numbers that sum to 1."""
    # The greatest score of each row is subtracted, so that no exponential is too large for a float.
    powers = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def softmax_of_three_scores() -> Figure:
    """The weights of the scores 0, 1 and s, where s goes from −4 to 6."""
    s = jnp.linspace(-4, 6, 101)
    weights = softmax(jnp.stack([jnp.zeros(101), jnp.ones(101), s], axis=1))
    figure, axes = panels(1, width=6.5, height=3.0)
    names = ("weight of the score 0", "weight of the score 1", "weight of the score s")
    for name, values, style in zip(names, weights.T, (":", "--", "-"), strict=True):
        axes.plot(s, values, style, label=name)
    axes.set(xlabel="s", ylim=(0, 1), title="softmax of the scores 0, 1 and s")
    axes.legend()
    return figure


@step(
    CODING,
    LLMS,
    INTERACTION,
    uses=(constants(__file__, "JOURNEY", "INPUTS"), softmax, softmax_of_three_scores),
)
def simple_self_attention() -> None:
    """Self-attention without learned parameters.

    The context vector of a word is a mean of all words of its sentence. Words that are similar to
    it count more. Three lines compute the context vectors: scores s, which are the dot products of
    every two words; weights w, which are the softmax of each row of scores; and the context vectors
    y, each the sum of all words, each word times its weight. No parameter is learned.

        s_ij = x_i · x_j
        w_ij = e^(s_ij) / (Σ_k e^(s_ik))
        y_i = Σ_j w_ij x_j

    Weights should be positive and sum to 1. To divide the scores by their sum is not enough: the
    scores −1, 2, 2 and −3 have the sum 0. The exponential helps for four reasons. It is positive
    for every score. It grows with the score, so the order of the scores stays the same. It turns
    sums into products: the ratio of two weights is e to the difference of their scores, so a number
    that is added to all scores of a row changes no weight. And it is smooth, so gradients pass
    through it. The score −∞ gives the weight 0, which masks use later.

    This is self-attention because the words that attend are in the same sentence as the words that
    they attend to.

    “Coding” uses six words of three numbers each, but does not print these numbers. They are in the
    book whose chapter 3 it follows: Sebastian Raschka, “Build a Large Language Model (From
    Scratch)”, 2024.
    """
    # [6, 3]: six words of three numbers.
    x = jnp.asarray(INPUTS)
    # How similar every two words are.
    scores = x @ x.T
    # A row for each word that attends, a column for each word that it attends to.
    weights = softmax(scores)
    # For each word, the mean of all words with its weights.
    context = weights @ x
    show("scores", scores)
    show("weights", weights)
    show("context vectors", context)
    check("each row of weights sums to 1", same(weights.sum(axis=1), np.ones(6)))
    check("the scores are symmetric", same(scores, scores.T))
    check("the weights are not symmetric", not same(weights, weights.T, 0.01))

    check("jax.nn.softmax gives the same weights", same(weights, jax.nn.softmax(scores, axis=-1)))
    check(
        "scores that are all greater by 7 give the same weights", same(softmax(scores + 7), weights)
    )
    ratio = jnp.exp(scores[1, 2] - scores[1, 3])
    check("the ratio of two weights is e^(difference)", same(weights[1, 2] / weights[1, 3], ratio))
    negative = jnp.array([-1.0, 2.0, 2.0, -3.0])
    show("softmax of −1, 2, 2, −3, whose sum is 0", softmax(negative))

    # The second word, "journey", by the definition, one word at a time.
    alike = np.array([np.exp(np.dot(INPUTS[1], other)) for other in INPUTS])
    by_hand = sum(a * other for a, other in zip(alike / alike.sum(), INPUTS, strict=True))
    check("for “journey”, sums written out give the same vector", same(context[1], by_hand))
    ours = jattn.simple_self_attention(x)
    check("jattn.simple_self_attention(x) gives the same vectors", same(ours, context))
    # The pictures.
    heatmap = viz.heatmap(weights, JOURNEY, title="weights of simple self-attention")
    draw(heatmap, softmax_of_three_scores())
