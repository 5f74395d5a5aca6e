"""English clauses, with do-support for "not" and questions."""

from functools import cache

from experiments.translation.corpus.clauses import Clause
from experiments.translation.corpus.lexicon import BE, FIRST, PERFECT, PRESENT, Mode, Verb, join


@cache
def operator(verb: Verb, mode: Mode, agreement: int) -> tuple[str, str]:
    """Returns the auxiliary, which carries "not" and opens questions, and the rest of the verb."""
    if verb is BE:
        return affirmative(verb, mode, agreement), ""
    return mode.auxiliary[agreement], join(mode.link[FIRST] if mode.link else "", verb.base)


@cache
def affirmative(verb: Verb, mode: Mode, agreement: int) -> str:
    """Returns the English verb group of a statement without "not"."""
    if mode is PRESENT:
        return verb.english[agreement]
    if mode is PERFECT:
        return verb.past[agreement]
    return f"{(mode.link or mode.auxiliary)[agreement]} {verb.base}"


def english(clause: Clause, *, gap: str = "", time_first: bool = False) -> str:
    """Returns an English statement or clause without the argument `gap` and its preposition."""
    verb, mode, subject = clause.verb, clause.mode, clause.arguments["nom"]
    if clause.negated:
        auxiliary, rest = operator(verb, mode, subject.agreement)
        group = f"{auxiliary} not {rest}" if auxiliary != "can" else f"cannot {rest}"
    else:
        group = affirmative(verb, mode, subject.agreement)
    opening = "" if gap == "nom" else subject.subject
    if clause.time and time_first:
        opening = f"{clause.time.english} {opening}"
    return join(opening, group.rstrip(), *english_objects(clause, gap, not time_first))


def english_question(clause: Clause) -> str:
    """Returns an English yes-no question."""
    subject = clause.arguments["nom"]
    auxiliary, rest = operator(clause.verb, clause.mode, subject.agreement)
    return join(auxiliary, subject.subject, rest, *english_objects(clause))


def english_objects(clause: Clause, gap: str = "", timed: bool = True) -> list[str]:
    """Returns the words after the English verb, without the argument `gap` and its preposition."""
    words = []
    for prefix, role in clause.verb.english_frame:
        if not role or role != gap:
            words += [prefix, clause.arguments[role].object if role else ""]
    if clause.time and timed:
        words.append(clause.time.english)
    return words
