"""Alignments of two translators: RNNsearch with additive attention, and a Transformer."""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.contexts import learn
from experiments.walkthrough.documents import CODING, MECHANISMS
from experiments.walkthrough.step import check, constants, draw, panels, step
from jattn import viz


# A little German: the participle is the last word; in English it is in the middle.
WORDS = {
    "ich": "I", "er": "he", "wir": "we",
    "habe": "have", "hat": "has", "haben": "have",
    "gesehen": "seen", "gehört": "heard", "gesucht": "sought", "gefunden": "found",
    "alte": "old", "kleine": "small", "rote": "red", "neue": "new",
    "Katze": "cat", "Lampe": "lamp", "Tür": "door", "Uhr": "clock", "Stadt": "town",
    "die": "the",
}  # fmt: skip


def pairs() -> list[tuple[list[str], list[str]]]:
    """Returns every German sentence of these words with its translation."""
    translated = []
    words = list(WORDS)
    participles, adjectives, nouns = words[6:10], words[10:14], words[14:19]
    subjects = ("ich", "habe"), ("er", "hat"), ("wir", "haben")
    for (who, has), participle, first, second, noun in itertools.product(
        subjects, participles, adjectives, adjectives, nouns
    ):
        german = [who, has, "die", first, second, noun, participle]
        # In English the participle, the last word (6), comes third.
        translated.append((german, [WORDS[german[i]] for i in (0, 1, 6, 2, 3, 4, 5)]))
    return translated


def arrays(sentences: list[tuple[list[str], list[str]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the word numbers of German and English sentences, each `[B, 7]`; 0 is the start."""
    german = {word: i for i, word in enumerate(WORDS, 1)}
    english = {word: i for i, word in enumerate(dict.fromkeys(WORDS.values()), 1)}
    return (
        np.array([[german[word] for word in source] for source, _ in sentences], np.int32),
        np.array([[english[word] for word in target] for _, target in sentences], np.int32),
    )


def shifted(target: np.ndarray) -> np.ndarray:
    """Returns the decoder's input: the word before each target word, and 0 before the first."""
    return np.pad(target, ((0, 0), (1, 0)))[:, :-1]


def lessons(source: np.ndarray, target: np.ndarray, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields training batches of 64 sentences: German, the decoder's input, English."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.integers(len(source), size=64)
        yield source[rows], shifted(target[rows]), target[rows]


def translation_loss(
    model: nnx.Module, source: jax.Array, previous: jax.Array, target: jax.Array
) -> jax.Array:
    """Returns the mean of −log p, where p is the model's probability of the correct word."""
    # [B, T, words]: a number for each English word, at each place.
    logits = model(source, previous)
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def translators(*vocabularies: int) -> dict[str, nnx.Module]:
    """Builds RNNsearch and a Transformer of one block and one head, for these vocabulary sizes."""
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
    return {"RNNsearch": rnn, "Transformer": transformer}


# The name of the attention from target to source in each of the two models.
CROSS = {"RNNsearch": "decoder/attention", "Transformer": "decoder/layers/0/cross_attention"}
PARTS = (constants(__file__, "WORDS", "CROSS"), pairs, arrays, shifted, lessons, translation_loss)


def alignments(maps: dict[str, np.ndarray], english: list[str], german: list[str]) -> Figure:
    """The weights of one sentence, a panel for each of the maps [English, German]."""
    figure, axes = panels(len(maps), width=12.0, height=3.9)
    for axis, (name, weights) in zip(axes, maps.items(), strict=True):
        viz.heatmap(weights, english, german, title=name, values=False, axes=axis)
    return figure


@step(MECHANISMS, CODING, uses=(*PARTS, translators, alignments))
def alignment() -> None:
    """Alignments of two translators.

    A sentence cannot be translated word by word, because languages order words differently. In
    these German sentences the participle is the last word; in English it is the third. A decoder
    that attends to the source can read any German word while it writes. Its weights are called the
    alignment.

    Two small translators learn such sentences. RNNsearch, of 2014, is a recurrent network with
    additive attention. The other is a Transformer of one block. Both are tested on sentences that
    they have not seen. They guess each English word from the German sentence and the correct
    English words before it.

    Attention reads the encoder's vectors, and each of these stands for more than one word.
    RNNsearch's encoder reads the sentence in both directions, so its vector at a word also depends
    on the words before and after. In the first panel, “we” need not attend to “wir”. Only the
    participle is checked.

    In the second panel, the Transformer's participle attends to another word, as when “sought”
    attends to “die”. The reason is that the Transformer's encoder uses attention itself. It can
    bring the participle to another place, and then the decoder reads it there. To follow both,
    multiply the decoder's weights by those of the encoder:

        A = A_decoder A_encoder

    Row by row, this product tells from which German words the vectors come. The third panel shows
    it: “sought” comes from “gesucht”. A product over all layers is the idea of attention rollout
    (Abnar and Zuidema, 2020). Rollout also counts the residual connections, as (A + I) / 2 for each
    layer; the product here leaves them out.
    """
    sentences = pairs()
    np.random.default_rng(1).shuffle(sentences)
    source, target = arrays(sentences)
    seen, unseen = slice(0, 900), slice(900, None)
    models = translators(int(source.max()) + 1, int(target.max()) + 1)
    read = jnp.asarray(source[unseen]), jnp.asarray(shifted(target[unseen]))
    captured, maps = {}, {}
    for name, model in models.items():
        batches = lessons(source[seen], target[seen], steps=300)
        loss = learn(model, translation_loss, batches, rate=3e-3)[-1]
        correct = np.mean(np.argmax(model(*read), axis=-1) == target[unseen])
        print(f"{name}: loss {loss:.3f}, correct words in new sentences: {correct:.1%}")
        check(f"{name} guesses over 97 % of the next words", correct > 0.97)
        # The weights of every attention in the model, by its name.
        captured[name] = jattn.nn.capture_weights(model, *read)
        # There is one head: [B, English, German].
        maps[name] = np.asarray(captured[name][CROSS[name]])[:, 0]
    encoder = np.asarray(captured["Transformer"]["encoder/layers/0/self_attention"])[:, 0]
    maps["Transformer, decoder times encoder"] = maps["Transformer"] @ encoder

    german, english = sentences[900]
    for name, weights in maps.items():
        # The participle is the third English word (2, counted from 0) and the last German word (6).
        greatest = weights[:, 2].argmax(axis=-1)
        print(f"{name}: “{english[2]}” has its greatest weight at “{german[greatest[0]]}”,")
        print(f"    participles at the German participle: {np.mean(greatest == 6):.0%}")
    aligned = np.mean(maps["RNNsearch"][:, 2].argmax(axis=-1) == 6)
    check("RNNsearch aligns the participles in more than half of the sentences", aligned > 0.5)
    # The picture.
    draw(alignments({name: weights[0] for name, weights in maps.items()}, english, german))
