"""The built-in German-English corpus, generated from a synchronous grammar.

    pairs = generate(1000, seed=0)                   # list[Pair] with distinct sources
    parts = splits(train=50_000, validation=1000, test=1000, deeper=1000, seed=0)

A `Pair` is a German sentence, its only correct English translation and the name of the
construction. Text is lower-case and its tokens, punctuation included, are separated by single
spaces. The same seed gives the same pairs on every machine and Python version.

    lexicon         the words of both languages and their tables
    clauses         noun phrases and clauses, independent of the language
    german          German clauses, and their ambiguities
    english         English clauses
    sentences       both sides of a sentence
    sampling        random choices of clauses
    constructions   the kinds of sentences, and which of them are not in training

To give each sentence only one correct translation, the subject precedes the objects, unless the
fronted object shows its case. A relative clause whose pronoun could be subject or object ("die
frau , die das kind sieht") is drawn again, and so are sentences for which `doubtful` finds another
reading. `wenn` is "if", the perfect is the English past, the present with a future time is "will",
and `sie` is always "she".
"""

import random
from collections.abc import Sequence, Set
from typing import NamedTuple

from experiments.translation.corpus.constructions import CONSTRUCTIONS, DEEPER, NESTED, TRAINING
from experiments.translation.corpus.german import doubtful
from experiments.translation.corpus.sampling import Draw


__all__ = ["CONSTRUCTIONS", "DEEPER", "Pair", "Splits", "generate", "splits"]


class Pair(NamedTuple):
    """A German sentence, its English translation, and the name of its construction."""

    source: str
    target: str
    construction: str


class Splits(NamedTuple):
    """Pairs for training and for three kinds of evaluation; no source is in two splits."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    deeper: list[Pair]


def generate(
    count: int,
    *,
    seed: int,
    constructions: Sequence[str] = CONSTRUCTIONS,
    exclude: Set[str] = frozenset(),
) -> list[Pair]:
    """Generates `count` pairs with distinct sources, not in `exclude`, evenly from `constructions`.

    A smaller count gives the beginning of the same list. When a construction runs out of new
    sentences, the others replace it.

    Raises:
        ValueError: all constructions have run out of sentences, or an argument is invalid.
    """
    rules = TRAINING | NESTED
    if not constructions or not set(constructions) <= set(rules):
        raise ValueError(f"constructions: expected some of {tuple(rules)}, got {constructions!r}")
    if count < 0:
        raise ValueError(f"count: expected at least 0, got {count}")
    rng = random.Random(seed)
    draw, brief = Draw(rng), Draw(rng, adjectives=0.1)  # nested sentences test depth, not length
    pairs, seen, repeats = [], set(exclude), 0
    while len(pairs) < count:
        name = draw.pick(constructions)
        source, target = rules[name](brief if name in NESTED else draw)
        repeats += 1
        if source not in seen and not doubtful(source):
            seen.add(source)
            pairs.append(Pair(source, target, name))
            repeats = 0
        elif repeats > 10_000 + len(seen):
            limit = f"at most about {len(pairs)} for {constructions!r}"
            raise ValueError(f"count: expected {limit}, got {count}")
    return pairs


def splits(*, train: int, validation: int, test: int, deeper: int, seed: int) -> Splits:
    """Generates disjoint splits; only the training split depends on `train`."""
    held_out = validation + test
    pairs = generate(held_out + train, seed=seed)
    nested = generate(deeper, seed=seed, constructions=DEEPER, exclude={p.source for p in pairs})
    return Splits(pairs[held_out:], pairs[:validation], pairs[validation:held_out], nested)
