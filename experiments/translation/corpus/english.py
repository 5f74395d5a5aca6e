"""English sentences by auxiliaries, with do-support where "not" or a question calls for it."""

from functools import cache

from experiments.translation.corpus.clauses import Clause
from experiments.translation.corpus.lexicon import BE, FIRST, PERFECT, PRESENT, Mode, Verb, join


@cache
def operator(verb: Verb, mode: Mode, agreement: int) -> tuple[str, str]:
    """The English auxiliary that carries "not" and opens a question, and what follows it."""
    if verb is BE:
        return affirmative(verb, mode, agreement), ""
    return mode.auxiliary[agreement], join(mode.link[FIRST] if mode.link else "", verb.base)


@cache
def affirmative(verb: Verb, mode: Mode, agreement: int) -> str:
    """The English verb group of a statement without "not"."""
    if mode is PRESENT:
        return verb.english[agreement]
    if mode is PERFECT:
        return verb.past[agreement]
    return f"{(mode.link or mode.auxiliary)[agreement]} {verb.base}"


def english(clause: Clause, *, gap: str = "", time_first: bool = False) -> str:
    """English statement or clause; the argument `gap` and its preposition are left out."""
    verb, mode, subject = clause.verb, clause.mode, clause.arguments["nom"]
    if clause.negated:
        auxiliary, rest = operator(verb, mode, subject.agreement)
        group = f"{auxiliary} not {rest}" if auxiliary != "can" else f"cannot {rest}"
    else:
        group = affirmative(verb, mode, subject.agreement)
    before = "" if gap == "nom" else subject.subject
    if clause.time and time_first:
        before = f"{clause.time.english} {before}"
    return join(before, group.rstrip(), *english_objects(clause, gap, not time_first))


def english_question(clause: Clause) -> str:
    """English question to be answered with yes or no."""
    subject = clause.arguments["nom"]
    auxiliary, rest = operator(clause.verb, clause.mode, subject.agreement)
    return join(auxiliary, subject.subject, rest, *english_objects(clause))


def english_objects(clause: Clause, gap: str = "", timed: bool = True) -> list[str]:
    """What follows the English verb."""
    words = []
    for before, role in clause.verb.english_frame:
        if not role or role != gap:
            words += [before, clause.arguments[role].object if role else ""]
    if clause.time and timed:
        words.append(clause.time.english)
    return words
