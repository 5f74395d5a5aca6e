"""Noun phrases and clauses, independent of word order.

A `Clause` is a verb, its arguments by role (`nom`, `acc`, `dat`), a mode (present, perfect, a modal
verb), and optionally a negation and a time. `german` and `english` realise it in each language.
"""

from functools import cache
from typing import NamedTuple

from experiments.translation.corpus.lexicon import (
    ADJECTIVES,
    FIRST,
    NOUNS,
    PLURAL,
    PRESENT,
    THE,
    THIRD,
    Adjective,
    Determiner,
    Forms,
    Mode,
    Noun,
    Time,
    Verb,
    join,
    triple,
)


class Phrase(NamedTuple):
    """A noun phrase, pronoun or predicate, realised in both languages."""

    forms: Forms  # German, by case
    subject: str  # English
    object: str
    agreement: int = THIRD
    gender: str = ""
    sort: str = ""
    reference: Noun | str | None = None  # two phrases of a clause never share a reference
    determiner: Determiner | None = None  # None: a pronoun or a predicate


# A shared reference excludes two first-person phrases ("wir sehen uns"). The accusative "sie" is
# left out, because it could be "her" or "them".
ICH = Phrase(("ich", "mich", "mir"), "i", "me", FIRST, sort="P", reference="speaker")
ER = Phrase(("er", "ihn", "ihm"), "he", "him", THIRD, sort="P")
SIE = Phrase(("sie", "sie", "ihr"), "she", "her", THIRD, sort="P")
WIR = Phrase(("wir", "uns", "uns"), "we", "us", PLURAL, sort="P", reference="speaker")
PRONOUNS = {"nom": (ICH, ICH, ER, SIE, WIR), "acc": (ICH, ER, WIR), "dat": (ICH, ER, SIE, WIR)}


@cache
def phrase(
    noun: Noun,
    determiner: Determiner = THE,
    plural: bool = False,
    adjective: Adjective | None = None,
) -> Phrase:
    """Builds a noun phrase from determiner, adjective and noun in agreement, in all cases."""
    gender = "p" if plural else noun.gender
    nouns = noun.plural if plural else noun.singular
    articles, endings = determiner.german[gender], determiner.endings[gender]
    stem = adjective.german.removesuffix("e") if adjective else ""
    inflected = [stem + ending if stem else "" for ending in endings]
    english = join(adjective.english if adjective else "", noun.english[plural])

    def with_article(article: str) -> str:
        return join("an" if article == "a" and english[0] in "aeiou" else article, english)

    return Phrase(
        forms=triple([join(*words) for words in zip(articles, inflected, nouns, strict=True)]),
        subject=with_article(determiner.subject[plural]),
        object=with_article(determiner.object[plural]),
        agreement=PLURAL if plural else THIRD,
        gender=gender,
        sort=noun.sort,
        reference=noun,
        determiner=determiner,
    )


@cache
def phrases(sorts: str, determiners: tuple[Determiner, ...], described: bool) -> tuple[Phrase, ...]:
    """Returns all phrases about nouns of these sorts, with adjectives if `described`."""
    return tuple(
        phrase(noun, determiner, plural, adjective)
        for noun in NOUNS.values()
        if noun.sort in sorts
        for adjective in (ADJECTIVES.values() if described else (None,))
        if adjective is None or noun.sort in adjective.sorts
        for determiner in determiners
        for plural in (False, True)
    )


@cache
def predicates(subject: Phrase) -> tuple[Phrase, ...]:
    """Returns the adjectives that fit the subject and are not already part of it."""
    return tuple(
        Phrase(triple([adjective.german]), "", adjective.english)
        for adjective in ADJECTIVES.values()
        if subject.sort in adjective.sorts and adjective.english not in subject.subject.split()
    )


class Clause(NamedTuple):
    """A clause without word order: verb, arguments, mode, negation and time."""

    verb: Verb
    arguments: dict[str, Phrase]  # by role: nom, and the verb's slots
    mode: Mode = PRESENT
    negated: bool = False
    time: Time | None = None
