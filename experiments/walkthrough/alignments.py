"""Where two translators look: RNNsearch with additive attention, and a Transformer."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import CODING, MECHANISMS
from experiments.walkthrough.step import check, constants, panels, step
from jattn import viz


# A sliver of German: the participle stands at the end, in English in the middle.
WORDS = {
    "ich": "I", "er": "he", "wir": "we",
    "habe": "have", "hat": "has", "haben": "have",
    "gesehen": "seen", "gehört": "heard", "gesucht": "sought", "gefunden": "found",
    "alte": "old", "kleine": "small", "rote": "red", "neue": "new",
    "Katze": "cat", "Lampe": "lamp", "Tür": "door", "Uhr": "clock", "Stadt": "town",
    "die": "the",
}  # fmt: skip


def pairs() -> list[tuple[list[str], list[str]]]:
    """Every German sentence of the sliver with its translation."""
    found = []
    words = list(WORDS)
    participles, adjectives, nouns = words[6:10], words[10:14], words[14:19]
    subjects = ("ich", "habe"), ("er", "hat"), ("wir", "haben")
    for (who, has), participle, one, two, noun in itertools.product(
        subjects, participles, adjectives, adjectives, nouns
    ):
        german = [who, has, "die", one, two, noun, participle]
        order = [0, 1, 6, 2, 3, 4, 5]  # the participle comes third
        found.append((german, [WORDS[german[i]] for i in order]))
    return found


# How the attention from target to source is named in the two models.
CROSS = {"RNNsearch": "decoder/attention", "Transformer": "decoder/layers/0/cross_attention"}


def arrays(sentences: list[tuple[list[str], list[str]]]) -> tuple[np.ndarray, np.ndarray]:
    """Sentences as numbers of words, German and English, each `[B, 7]`; 0 begins a sentence."""
    german = {word: i for i, word in enumerate(WORDS, 1)}
    english = {word: i for i, word in enumerate(dict.fromkeys(WORDS.values()), 1)}
    return (
        np.array([[german[word] for word in source] for source, _ in sentences], np.int32),
        np.array([[english[word] for word in target] for _, target in sentences], np.int32),
    )


def shifted(target: np.ndarray) -> np.ndarray:
    """What the decoder reads while it writes: the word before, and 0 at first."""
    return np.pad(target, ((0, 0), (1, 0)))[:, :-1]


def train(model: nnx.Module, source: np.ndarray, target: np.ndarray, steps: int) -> float:
    """Learns to translate by guessing each English word; returns the last loss."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)

    @nnx.jit
    def update(model: Any, optimizer: Any, source: jax.Array, before: jax.Array, target: jax.Array):
        def loss(model: Any) -> jax.Array:
            logits = model(source, before)  # [B, T, words]
            return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    value = 0.0
    for _ in range(steps):
        rows = rng.integers(len(source), size=64)
        batch = (source[rows], shifted(target[rows]), target[rows])
        value = float(update(model, optimizer, *map(jnp.asarray, batch)))
    return value


@step(
    MECHANISMS, CODING, uses=(constants(__file__, "WORDS", "CROSS"), pairs, arrays, shifted, train)
)
def alignment() -> Figure:
    """Alignments of two translators.

    A sentence cannot be translated word by word, as languages have their orders: in German the
    participle stands at the end. A decoder that attends to the source looks for each English word
    at the German words that it needs. Those weights are called the alignment.

    Two small translators learn a sliver of German: RNNsearch, a recurrent network with additive
    attention, as attention began in 2014; and a Transformer of one layer, of 2017. Both are tested
    on sentences that they have not seen, word by word, each given the right words before.

    A Transformer's weights need not be an alignment in words: its encoder is attention too, and may
    have carried the participle to another place before the decoder looks there.
    """
    sentences = pairs()
    np.random.default_rng(1).shuffle(sentences)
    source, target = arrays(sentences)
    seen, unseen = slice(0, 900), slice(900, None)
    vocabularies = int(source.max()) + 1, int(target.max()) + 1
    rnn = jattn.nn.RNNsearch(*vocabularies, features=32, hidden=32, rngs=nnx.Rngs(0))
    transformer = jattn.nn.Transformer(
        *vocabularies,
        features=32,
        num_heads=1,
        feed_forward=64,
        encoder_layers=1,
        decoder_layers=1,
        dropout_rate=0.0,
        rngs=nnx.Rngs(0),
    )
    models = {"RNNsearch": rnn, "Transformer": transformer}

    figure, axes = panels(2, width=8.5, height=4.3)
    german, english = sentences[900]
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        loss = train(model, source[seen], target[seen], steps=300)
        read = jnp.asarray(source[unseen]), jnp.asarray(shifted(target[unseen]))
        right = np.mean(np.argmax(model(*read), axis=-1) == target[unseen])
        print(f"{name}: loss {loss:.3f}, on new sentences {right:.1%} of the next words are right")
        check(f"{name} has learned it, given the right words before", right > 0.97)
        captured = jattn.nn.capture_weights(model, *read)  # of every attention, by its name
        weights = np.asarray(captured[CROSS[name]])[:, 0]  # its only head: [B, English, German]
        # The participle is the English word 2 (from 0) and the German word 6, the last.
        found = np.mean(weights[:, 2].argmax(axis=-1) == 6)
        print(f"    in {found:.0%} the participle looks most at the German one")
        if name == "RNNsearch":
            check("in RNNsearch it does", found > 0.5)
        viz.alignment(weights[0], english, german, title=name, axes=axis)
    return figure
