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
from experiments.walkthrough.step import check, constants, panels, step
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
    found = []
    words = list(WORDS)
    participles, adjectives, nouns = words[6:10], words[10:14], words[14:19]
    subjects = ("ich", "habe"), ("er", "hat"), ("wir", "haben")
    for (who, has), participle, one, two, noun in itertools.product(
        subjects, participles, adjectives, adjectives, nouns
    ):
        german = [who, has, "die", one, two, noun, participle]
        # In English the participle, the last word (6), comes third.
        found.append((german, [WORDS[german[i]] for i in (0, 1, 6, 2, 3, 4, 5)]))
    return found


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
    model: nnx.Module, source: jax.Array, before: jax.Array, target: jax.Array
) -> jax.Array:
    """Returns the mean of −log p, where p is the model's probability of the correct word."""
    # [B, T, words]: a number for each English word, at each place.
    logits = model(source, before)
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


@step(MECHANISMS, CODING, uses=(*PARTS, translators))
def alignment() -> Figure:
    """Alignments of two translators.

    A sentence cannot be translated word by word, because languages order words differently. In
    these German sentences the participle stands at the end; in English it stands third. A decoder
    that attends to the source can look at any German word while it writes. Its weights are called
    the alignment.

    Two small translators learn such sentences. RNNsearch, of 2014, is a recurrent network with
    additive attention. The other is a Transformer of one block. Both are tested on sentences that
    they have not seen. They guess each English word from the German sentence and the correct
    English words before it.

    Attention looks at the encoder's vectors, and these stand for more than one word each.
    RNNsearch's encoder reads the sentence in both directions, so its vector at a word also depends
    on the words before and after. In the picture, “we” need not look at “wir”. Only the participle
    is checked.

    The Transformer's encoder uses attention itself. It can bring the participle to another place,
    and then the decoder looks there. To follow both, multiply the decoder's weights by those of
    the encoder: row by row, this tells from which German words the vectors come. The product leaves
    out the residual connections.
    """
    sentences = pairs()
    np.random.default_rng(1).shuffle(sentences)
    source, target = arrays(sentences)
    seen, unseen = slice(0, 900), slice(900, None)
    models = translators(int(source.max()) + 1, int(target.max()) + 1)
    read = jnp.asarray(source[unseen]), jnp.asarray(shifted(target[unseen]))
    maps = {}
    for name, model in models.items():
        batches = lessons(source[seen], target[seen], steps=300)
        loss = learn(model, translation_loss, batches, rate=3e-3)[-1]
        correct = np.mean(np.argmax(model(*read), axis=-1) == target[unseen])
        print(f"{name}: loss {loss:.3f}, correct words in new sentences: {correct:.1%}")
        check(f"{name} guesses over 97 % of the next words", correct > 0.97)
        # The weights of every attention in the model, by its name.
        captured = jattn.nn.capture_weights(model, *read)
        # There is one head: [B, English, German].
        maps[name] = np.asarray(captured[CROSS[name]])[:, 0]
        # The participle is the third English word (2, counted from 0) and the last German word (6).
        found = np.mean(maps[name][:, 2].argmax(axis=-1) == 6)
        print(f"    the English participle looks most at the German one in {found:.0%}")
        if name == "RNNsearch":
            check("RNNsearch: this holds in more than half of the sentences", found > 0.5)
        else:
            encoder = np.asarray(captured["encoder/layers/0/self_attention"])[:, 0]
            through = np.mean((maps[name] @ encoder)[:, 2].argmax(axis=-1) == 6)
            print(f"    the product of the weights is greatest there in {through:.0%}")
    # The picture.
    german, english = sentences[900]
    figure, axes = panels(2, width=9.6, height=4.2)
    for axis, (name, weights) in zip(axes, maps.items(), strict=True):
        viz.heatmap(weights[0], english, german, title=name, axes=axis)
    return figure
