"""The constructions of training (`TRAINING`), and more deeply nested ones (`NESTED`).

To add one, write a function from `Draw` to a sentence and name it in `TRAINING` or `NESTED`.
"""

from collections.abc import Callable

from experiments.translation.corpus import lexicon as lex
from experiments.translation.corpus.clauses import Clause
from experiments.translation.corpus.english import english, english_question
from experiments.translation.corpus.german import verb_final, verb_second
from experiments.translation.corpus.sampling import NOTHING, Draw
from experiments.translation.corpus.sentences import Sentence, chain, sentence, statement


def subject_or_time(draw: Draw, clause: Clause) -> Sentence:
    """Builds a main clause that begins with its subject or, if it has one, equally often with its
    time."""
    return statement(clause, "time" if clause.time and draw.chance(0.5) else "nom")


def simple(draw: Draw) -> Sentence:
    return statement(draw.clause(lex.SIMPLE))


def separable(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(lex.SEPARABLE, timed=0.3))


def ditransitive(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(lex.DITRANSITIVE, draw.mode(), timed=0.2))


def time(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(timed=1.0))


def perfect(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(mode=lex.PERFECT, timed=0.4))


def modal(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(mode=draw.pick(lex.MODALS), timed=0.3))


def negation(draw: Draw) -> Sentence:
    """Draws a sentence with "no" at its subject or object, or with "not". A time comes first, so
    that it is outside the scope of "not"."""
    if draw.chance(0.2):
        return statement(draw.clause(mode=draw.mode(), determiners={"nom": (lex.NO,)}))
    clause = draw.negated(lex.EVENTS, draw.mode(), timed=0.2)
    return statement(clause, "time" if clause.time else "nom")


def fronted_object(draw: Draw) -> Sentence:
    """Draws a sentence that begins with an object, whose form or preposition shows that it is not
    the subject."""
    while True:
        clause = draw.clause(lex.TRANSITIVE, timed=0.2)
        prefix, front = draw.pick(clause.verb.german_frame)
        moved = clause.arguments[front]
        if moved.determiner and (prefix or moved.forms[lex.CASES[front]] != moved.forms[lex.NOM]):
            return statement(clause, front)


def predicate(draw: Draw) -> Sentence:
    no_subject = draw.chance(0.2)
    subjects = {"nom": (lex.NO,)} if no_subject else NOTHING
    denied = not no_subject and draw.chance(0.3)
    mode = draw.pick((lex.PRESENT, lex.PERFECT))
    return statement(draw.clause((lex.BE,), mode, determiners=subjects, negated=denied))


def question(draw: Draw) -> Sentence:
    clause = draw.clause(lex.MAIN, draw.mode(), timed=0.2)
    return sentence(verb_second(clause, ""), english_question(clause), "?")


def relative_after_subject(draw: Draw) -> Sentence:
    clause = draw.clause(lex.MAIN, draw.mode(), pronouns=False)
    return statement(draw.described(clause, "nom"))


def relative_after_object(draw: Draw) -> Sentence:
    """Draws a sentence with a relative clause after an object, which ends the main clause in both
    languages; a time comes first, so that it does not follow the relative clause."""
    clause = draw.clause(lex.OBJECT_LAST, pronouns=False, timed=0.2)
    front = "time" if clause.time else "nom"
    return statement(draw.described(clause, clause.verb.slots[0]), front)


def subordinate(draw: Draw) -> Sentence:
    outer, word, inner = draw.circumstance()
    return chain(outer, (word, inner))


def subordinate_first(draw: Draw) -> Sentence:
    outer, word, inner = draw.circumstance()
    return sentence(
        f"{word} {verb_final(inner)} , {verb_second(outer, '')}",
        f"{lex.SUBORDINATORS[word]} {english(inner)} , {english(outer)}",
    )


def complement(draw: Draw) -> Sentence:
    outer, word = draw.report()
    return chain(outer, (word, draw.any_clause(draw.mode(), timed=0.2)))


def two_relatives(draw: Draw) -> Sentence:
    clause = draw.clause(lex.OBJECT_LAST, pronouns=False)
    return statement(draw.described(draw.described(clause, "nom"), clause.verb.slots[0]))


def relative_in_relative(draw: Draw) -> Sentence:
    return statement(draw.described(draw.clause(lex.SHORT, pronouns=False), "nom", nested=True))


def relative_in_subordinate(draw: Draw) -> Sentence:
    inner = draw.described(draw.clause(lex.SHORT, draw.mode(), pronouns=False), "nom")
    return chain(draw.clause(lex.SHORT), (draw.pick(("weil", "obwohl")), inner))


def relative_in_complement(draw: Draw) -> Sentence:
    outer, word = draw.report()
    inner = draw.described(draw.clause(lex.SHORT, draw.mode(), pronouns=False), "nom")
    return chain(outer, (word, inner))


def complement_in_subordinate(draw: Draw) -> Sentence:
    middle, word = draw.report()
    inner = draw.clause(lex.SHORT, draw.mode())
    return chain(draw.clause(lex.SHORT), (draw.pick(("weil", "obwohl")), middle), (word, inner))


def complement_in_complement(draw: Draw) -> Sentence:
    (outer, first), (middle, second) = draw.report(), draw.report()
    return chain(outer, (first, middle), (second, draw.clause(lex.SHORT, draw.mode())))


def _table(*rules: Callable[[Draw], Sentence]) -> dict[str, Callable[[Draw], Sentence]]:
    return {rule.__name__.replace("_", "-"): rule for rule in rules}


TRAINING = _table(
    simple,
    separable,
    ditransitive,
    time,
    perfect,
    modal,
    negation,
    fronted_object,
    predicate,
    question,
    relative_after_subject,
    relative_after_object,
    subordinate,
    subordinate_first,
    complement,
)
NESTED = _table(
    two_relatives,
    relative_in_relative,
    relative_in_subordinate,
    relative_in_complement,
    complement_in_subordinate,
    complement_in_complement,
)
CONSTRUCTIONS = tuple(TRAINING)
DEEPER = tuple(NESTED)
