"""One word in two contexts: a small trained encoder gives a word a vector for each sentence."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jattn
from experiments.walkthrough.corpus import sentences, vocabulary
from experiments.walkthrough.documents import LLMS, MECHANISMS
from experiments.walkthrough.similarity import cosines
from experiments.walkthrough.step import check, draw, panels, step


class Reader(nnx.Module):
    """Guesses the hidden word of a sentence, with one block of the encoder."""

    # A module sets its parts here, and their parameters become its own parameters.
    def __init__(self, words: int, rngs: nnx.Rngs):
        # A vector of 16 numbers for each word, and one more that stands for a hidden word.
        self.embed = jattn.nn.TokenEmbedding(words + 1, 16, rngs=rngs)
        self.positions = jattn.nn.SinusoidalPositions(16)
        self.encoder = jattn.nn.Encoder(
            num_layers=1, features=16, num_heads=2, feed_forward=32, dropout_rate=0.0, rngs=rngs
        )

    def read(self, ids: jax.Array) -> jax.Array:
        """Returns the vector of each word in its sentence: [B, T] to [B, T, 16]."""
        return self.encoder(self.embed(ids) + self.positions(jnp.arange(ids.shape[1])))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Scores each word of the vocabulary at each place: [B, T] to [B, T, words]."""
        # The products of each vector with the table of vectors.
        return self.embed.attend(self.read(ids))


def hidden(ids: np.ndarray, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Hides one word of each sentence; yields the input, the hidden places and the hidden words."""
    rng = np.random.default_rng(0)
    rows = np.arange(len(ids))
    for _ in range(steps):
        places = rng.integers(ids.shape[1], size=len(ids))
        read = ids.copy()
        read[rows, places] = ids.max() + 1
        yield read, places, ids[rows, places]


def guess_loss(model: Reader, read: jax.Array, places: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the mean of −log p, where p is the probability of the correct word."""
    # A number for each word of the vocabulary. Their softmax is the probability of each word.
    logits = model(read)[jnp.arange(len(places)), places]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def learn(
    model: nnx.Module,
    loss: Callable[..., jax.Array],
    batches: Iterable[tuple[np.ndarray, ...]],
    rate: float,
) -> list[float]:
    """Trains a model, one step for each batch, and returns the losses."""
    # Adam is a method that chooses the steps; `wrt` names what changes: the parameters.
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    # nnx.jit is jax.jit for functions that change modules: JAX compiles the function once.
    @nnx.jit
    def update(model: Any, optimizer: Any, *batch: jax.Array) -> jax.Array:
        # The loss, and its gradient with respect to the parameters of the model.
        value, gradients = nnx.value_and_grad(loss)(model, *batch)
        # This changes the parameters in place.
        optimizer.update(model, gradients)
        return value

    # jnp.asarray makes arrays of JAX from arrays of NumPy.
    return [float(update(model, optimizer, *map(jnp.asarray, batch))) for batch in batches]


@step(MECHANISMS, LLMS, uses=(Reader, hidden, guess_loss, learn))
def contexts() -> None:
    """One word, two contexts.

    A table of vectors is static. It has one vector for apple, both in “An apple today” and in “An
    apple iphone”, and one vector for both kinds of bank. Attention makes the vector of a word from
    the words around it, so the vector differs from sentence to sentence.

    A model with one block of the encoder learns to guess hidden words in the corpus of the first
    step. Then it reads every sentence, and we compare the vectors of bank.

    This is the first model on the page that is trained. Training repeats one step. It computes the
    loss, which says how bad the guesses are: p is the probability that the model gives to the
    hidden word of sentence b.

        loss = −(1 / B) Σ_b log p_b

    It computes the gradient of the loss with respect to all parameters. Then it changes the
    parameters a little, so that the loss falls.
    """
    place = {word: i for i, word in enumerate(vocabulary())}
    # [36, 5]: the number of each word. Eighteen sentences about rivers come first.
    ids = np.array([[place[word] for word in sentence] for sentence in sentences()], np.int32)
    model = Reader(len(place), nnx.Rngs(0))
    losses = learn(model, guess_loss, hidden(ids, steps=150), rate=1e-2)
    print(f"loss over training: {losses[0]:.2f} → {np.mean(losses[-10:]):.2f}")

    # Bank is the third word of every sentence.
    static = np.asarray(model.embed(jnp.asarray(ids)))[:, 2]
    contextual = np.asarray(model.read(jnp.asarray(ids)))[:, 2]
    check("the table gives bank one vector in all sentences", np.ptp(static, axis=0) == 0)
    alike = cosines(contextual)
    half = len(ids) // 2
    # Pairs of two different sentences of one kind.
    different = ~np.eye(half, dtype=bool)
    wet, rich = alike[:half, :half][different].mean(), alike[half:, half:][different].mean()
    across = alike[:half, half:].mean()
    print("mean cosine of two vectors of bank")
    print(f"both by rivers: {wet:.2f}   both with money: {rich:.2f}   one of each: {across:.2f}")
    closer = min(wet, rich) > across + 0.2
    check("in context, two banks of one kind are more alike than one of each", closer)

    # The two directions in which the 36 vectors differ most.
    centred = contextual - contextual.mean(axis=0)
    plane = centred @ np.linalg.svd(centred)[2][:2].T
    rivers, money = plane[:half], plane[half:]
    side = np.sign(plane[0, 0])
    separated = np.all(side * rivers[:, 0] > 0) and np.all(side * money[:, 0] < 0)
    check("the sign of the first direction tells the kind of bank", separated)
    # The picture.
    figure, axes = panels(1, width=6.0, height=3.6)
    axes.scatter(*rivers.T, label="bank of a river, stream or lake")
    axes.scatter(*money.T, marker="^", label="bank with money, cash or a loan")
    axes.set(
        xlabel="first direction",
        ylabel="second direction",
        title="bank in 36 sentences (some coincide)",
    )
    axes.legend()
    draw(figure)
