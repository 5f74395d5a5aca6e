"""Builds sentences in both languages from clauses."""

from experiments.translation.corpus.clauses import Clause, Phrase
from experiments.translation.corpus.english import english
from experiments.translation.corpus.german import verb_final, verb_second
from experiments.translation.corpus.lexicon import (
    CASES,
    RELATIVE,
    SUBORDINATORS,
    join,
    preposition,
    triple,
)


Sentence = tuple[str, str]  # German, English


def sentence(german: str, gloss: str, mark: str = ".") -> Sentence:
    """Returns both sides with their final mark; of two marks in a row the first is removed."""
    return f"{german} {mark}".replace(", ,", ",").replace(f", {mark}", mark), f"{gloss} {mark}"


def statement(clause: Clause, front: str = "nom") -> Sentence:
    """Returns a main clause that begins with `front`."""
    return sentence(verb_second(clause, front), english(clause, time_first=front == "time"))


def chain(outer: Clause, *links: tuple[str, Clause]) -> Sentence:
    """Returns a main clause and the subordinate clauses after it, each with its conjunction."""
    german, gloss = verb_second(outer), english(outer)
    for word, clause in links:
        german += f" , {word} {verb_final(clause)}"
        gloss += f" {SUBORDINATORS[word]} {english(clause)}"
    return sentence(german, gloss)


def with_relative(clause: Clause, gap: str) -> Phrase:
    """Returns the argument `gap` of a clause, with the clause as a relative clause about it."""
    verb, head = clause.verb, clause.arguments[gap]
    which = "which" if head.sort != "P" else "who" if gap == "nom" else "whom"
    pronoun = RELATIVE[head.gender][CASES[gap]]
    german = f", {join(preposition(verb.german_frame, gap), pronoun)} {verb_final(clause, gap)} ,"
    gloss = f"{join(preposition(verb.english_frame, gap), which)} {english(clause, gap=gap)}"
    return head._replace(
        forms=triple([f"{form} {german}" for form in head.forms]),
        subject=f"{head.subject} {gloss}",
        object=f"{head.object} {gloss}",
    )
