"""Words as vectors, one vector against many, and attention without weights."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough import corpus
from experiments.walkthrough.corpus import sentences, vocabulary
from experiments.walkthrough.documents import CODING, LLMS, MECHANISMS
from experiments.walkthrough.step import check, constants, panels, same, show, step
from jattn import viz


def cosines(vectors: np.ndarray) -> np.ndarray:
    """The cosine of the angle between each two rows."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


@step(
    MECHANISMS, uses=(constants(corpus.__file__, "NATURE", "MONEY"), sentences, vocabulary, cosines)
)
def vectors() -> Figure:
    """Words as vectors.

    A model computes with numbers, so each word gets a vector. The simplest choice gives every word
    an axis of its own (one-hot): then no two words have anything in common. Better vectors are
    learned from company: words that stand among the same words get similar vectors. word2vec learns
    them with a small network; here the counts themselves do it, as the logarithm of how often two
    words share a sentence, log(1 + count), reduced to four numbers a word by a singular value
    decomposition.

    The corpus has two worlds, rivers and money, and one noun that lives in both: bank. As it has
    one vector only, that vector must lie between the two.
    """
    words = vocabulary()
    place = {word: i for i, word in enumerate(words)}
    one_hot = np.eye(len(words))
    check("one-hot vectors: no two words are similar", same(cosines(one_hot), np.eye(len(words))))

    together = np.zeros((len(words), len(words)))  # how often two words share a sentence
    for sentence in sentences():
        for a, b in itertools.product(sentence, sentence):
            together[place[a], place[b]] += 1
    left, strength, _ = np.linalg.svd(np.log1p(together))  # log(1 + count)
    learned = left[:, :4] * strength[:4]  # a row for each word
    show("the vector of bank", learned[place["bank"]])

    alike = cosines(learned)
    near = alike[place["river"], place["stream"]]
    far = alike[place["river"], place["money"]]
    print(f"river and stream: {near:.2f}   river and money: {far:.2f}")
    check("river is closer to stream than to money", near > far + 0.1)
    by_river, by_money = alike[place["bank"], place["river"]], alike[place["bank"], place["money"]]
    print(f"bank and river: {by_river:.2f}   bank and money: {by_money:.2f}")
    check("bank is as close to river as to money", abs(by_river - by_money) < 0.01)
    few = ["river", "lake", "muddy", "bank", "money", "loan", "strict"]
    at = [place[word] for word in few]
    return viz.heatmap(alike[np.ix_(at, at)], few, title="cosines of word vectors")


class Reader(nnx.Module):  # Flax's class of modules, as nn.Module is that of torch
    """Guesses the word that is hidden in a sentence, with one layer of a Transformer's encoder."""

    def __init__(self, words: int, rngs: nnx.Rngs):  # Rngs: seeds for the first parameters
        self.embed = jattn.nn.TokenEmbedding(words + 1, 16, rngs=rngs)  # one more: "hidden"
        self.positions = jattn.nn.SinusoidalPositions(16)
        self.encoder = jattn.nn.Encoder(
            num_layers=1, features=16, num_heads=2, feed_forward=32, dropout_rate=0.0, rngs=rngs
        )

    def read(self, ids: jax.Array) -> jax.Array:
        """The vector of each word after it has seen its sentence: [B, T] to [B, T, 16]."""
        where = self.positions(jnp.arange(ids.shape[1]))  # a vector for each place, a later step
        return self.encoder(self.embed(ids) + where)

    def __call__(self, ids: jax.Array) -> jax.Array:
        # How well each word fits: products with the table of vectors; no attention here.
        return self.embed.attend(self.read(ids))


def train(model: Reader, ids: np.ndarray, steps: int) -> list[float]:
    """Hides one word of each sentence, and makes the model guess it."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)  # changes the parameters
    rng = np.random.default_rng(0)
    hidden_id = ids.max() + 1

    @nnx.jit  # jax.jit for functions that change modules
    def update(model: Any, optimizer: Any, masked: jax.Array, at: jax.Array) -> jax.Array:
        def loss(model: Reader) -> jax.Array:
            logits = model(masked)[jnp.arange(len(at)), at]
            wanted = jnp.asarray(ids)[jnp.arange(len(at)), at]
            return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

        value, gradients = nnx.value_and_grad(loss)(model)  # the loss and its gradient by them
        optimizer.update(model, gradients)  # in place
        return value

    losses = []
    for _ in range(steps):
        at = rng.integers(ids.shape[1], size=len(ids))
        masked = ids.copy()
        masked[np.arange(len(ids)), at] = hidden_id
        losses.append(float(update(model, optimizer, jnp.asarray(masked), jnp.asarray(at))))
    return losses


@step(MECHANISMS, LLMS, uses=(Reader, train))
def contexts() -> Figure:
    """One word, two contexts.

    A table of vectors is static: “An apple today” and “An apple iphone” hold the same vector for
    apple, and the bank of a river is the bank that lends. Attention makes the vector of a word from
    the words around it, so that it differs from sentence to sentence.

    A model with one layer of attention is trained on the corpus of the first step to guess hidden
    words. Then it reads every sentence, and we look at what has become of bank.
    """
    place = {word: i for i, word in enumerate(vocabulary())}
    ids = np.array([[place[word] for word in sentence] for sentence in sentences()], np.int32)
    model = Reader(len(place), nnx.Rngs(0))
    losses = train(model, ids, steps=150)
    print(f"loss over training: {losses[0]:.2f} → {np.mean(losses[-10:]):.2f}")

    static = np.asarray(model.embed(ids))[:, 2]  # bank is the third word of every sentence
    contextual = np.asarray(model.read(jnp.asarray(ids)))[:, 2]
    check("the table gives bank one vector in all sentences", np.ptp(static, axis=0) == 0)
    half = len(ids) // 2  # sentences of rivers, then as many of money
    alike = cosines(contextual)
    two = ~np.eye(half, dtype=bool)  # a bank and another, not with itself
    wet, rich = alike[:half, :half][two].mean(), alike[half:, half:][two].mean()
    across = alike[:half, half:].mean()
    print(f"two banks of rivers: {wet:.2f}   with money: {rich:.2f}   one of each: {across:.2f}")
    closer = min(wet, rich) > across + 0.2
    check("in context, banks of one kind are more alike than of two kinds", closer)

    centred = contextual - contextual.mean(axis=0)
    plane = centred @ np.linalg.svd(centred)[2][:2].T  # the two directions that differ most
    rivers, money = plane[:half], plane[half:]
    side = np.sign(plane[0, 0])  # of all rivers; all money is on the other
    apart = np.all(side * rivers[:, 0] > 0) and np.all(side * money[:, 0] < 0)
    check("the first direction tells which kind it is", apart)
    # The picture.
    figure, axes = panels(1, width=6.0, height=3.6)
    axes.scatter(*rivers.T, label="bank of a river, stream or lake")
    axes.scatter(*money.T, marker="^", label="bank with money, cash or a loan")
    axes.set(xlabel="first direction", ylabel="second direction", title="bank in 36 sentences")
    axes.legend()
    return figure


# Six words in three numbers each, the example of Raschka, "Build a Large Language Model (From
# Scratch)", 2024, chapter 3, which the document about coding attention retells.
JOURNEY = ["Your", "journey", "starts", "with", "one", "step"]
INPUTS = (
    np.array([[43, 15, 89], [55, 87, 66], [57, 85, 64], [22, 58, 33], [77, 25, 10], [5, 80, 55]])
    / 100
)


@step(CODING, LLMS, uses=(constants(__file__, "JOURNEY", "INPUTS"),))
def simple_self_attention() -> Figure:
    """Self-attention without weights.

    The context vector of a word is a mean of all words of its sentence, in which similar words
    count more. Three lines make it: products of every two words (scores), a softmax over each row
    (weights, which are positive and sum to 1), and sums of the words by these weights. Nothing is
    learned.

    Self means that the words that ask and the words that are asked stand in one sentence.
    """
    x = jnp.asarray(INPUTS)  # [6 words, 3 numbers]
    scores = x @ x.T  # how similar each two words are
    weights = jax.nn.softmax(scores, axis=-1)  # each row: where a word looks
    context = weights @ x  # means of words by these weights
    show("scores", scores)
    show("weights", weights)
    show("context vectors", context)
    check("rows of the weights sum to 1", same(weights.sum(axis=1), np.ones(6)))
    check(
        "scores are symmetric, weights are not",
        same(scores, scores.T) and not same(weights, weights.T),
    )

    # The same by the definition, for the second word, "journey".
    alike = np.array([np.exp(np.dot(INPUTS[1], other)) for other in INPUTS])
    by_hand = sum(a * other for a, other in zip(alike / alike.sum(), INPUTS, strict=True))
    check("for “journey”, sums written out give the same", same(context[1], by_hand))
    ours = jattn.simple_self_attention(x)
    check("jattn.simple_self_attention(x) is these three lines", same(ours, context))
    return viz.heatmap(weights, JOURNEY, title="who looks at whom, without learned weights")
