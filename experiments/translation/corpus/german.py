"""German clauses by topological fields, and tests for ambiguities.

The finite verb and the closing words (particle, participle, infinitive) form a bracket around the
middle field. `verb_second` puts the finite verb after one fronted phrase, or first; `verb_final`
puts it last. `ambiguous` tests a relative clause for a second reading, `doubtful` a sentence.
"""

import re
from functools import cache

from experiments.translation.corpus.clauses import Clause
from experiments.translation.corpus.lexicon import (
    ACC,
    CASES,
    NO,
    NOM,
    NOUNS,
    PERFECT,
    RELATIVE,
    Forms,
    Mode,
    Verb,
    join,
    preposition,
)


@cache
def bracket(verb: Verb, mode: Mode, agreement: int) -> Forms:
    """Returns the finite verb, the words that close its clause, and the cluster of both at the end
    of a subordinate clause."""
    if mode.german:
        finite, rest = mode.german[agreement], verb.infinitive
    elif mode is PERFECT:
        finite, rest = verb.auxiliary[agreement], verb.participle
    else:
        finite = verb.present[agreement]
        return finite, verb.particle, verb.particle + finite
    return finite, rest, join(rest, finite)


def middle_field(clause: Clause, moved: str = "") -> list[str]:
    """Returns pronouns, time, objects, "nicht", and a predicate or an object with a preposition, in
    this order, without the argument `moved`."""
    pronouns, nouns, close = [], [], []
    denied = clause.negated
    for prefix, role in clause.verb.german_frame:
        phrase = clause.arguments[role]
        denied = denied and phrase.determiner is not NO
        if role == moved:
            continue
        field = close if prefix or role == "adj" else nouns if phrase.determiner else pronouns
        field += [prefix, phrase.forms[CASES[role]]]
    time = clause.time.german if clause.time and moved != "time" else ""
    return [*pronouns, time, *nouns, "nicht" if denied else "", *close]


def verb_second(clause: Clause, front: str = "nom") -> str:
    """Returns a German main clause that begins with `front`: a role, "time", or "" for the finite
    verb."""
    subject = clause.arguments["nom"]
    finite, closing, _ = bracket(clause.verb, clause.mode, subject.agreement)
    opening = [finite, subject.forms[NOM]]
    if front == "nom":
        opening.reverse()
    elif front == "time" and clause.time:
        opening.insert(0, clause.time.german)
    elif front:
        form = clause.arguments[front].forms[CASES[front]]
        opening = [preposition(clause.verb.german_frame, front), form, *opening]
    return join(*opening, *middle_field(clause, front), closing)


def verb_final(clause: Clause, gap: str = "") -> str:
    """Returns a German subordinate clause without its first word and the argument `gap`."""
    subject = clause.arguments["nom"]
    _, _, cluster = bracket(clause.verb, clause.mode, subject.agreement)
    return join("" if gap == "nom" else subject.forms[NOM], *middle_field(clause, gap), cluster)


def reversible(clause: Clause) -> bool:
    """Returns whether subject and accusative object could be exchanged, by number and sort."""
    subject, other = clause.arguments["nom"], clause.arguments.get("acc")
    selects = clause.verb.selects
    return (
        other is not None
        and not preposition(clause.verb.german_frame, "acc")
        and subject.agreement == other.agreement
        and subject.sort in selects["acc"]
        and other.sort in selects["nom"]
    )


def ambiguous(clause: Clause, gap: str) -> bool:
    """Returns whether a relative clause has two readings, as in "die frau , die das kind sieht"."""
    if gap == "dat" or not reversible(clause):
        return False
    head = clause.arguments[gap]
    rest = clause.arguments["acc" if gap == "nom" else "nom"]
    return syncretic(RELATIVE[head.gender]) and syncretic(rest.forms)


def syncretic(forms: Forms) -> bool:
    """Returns whether nominative and accusative are equal."""
    return forms[NOM] == forms[ACC]


# ------------------------------------------------------------------------------- second readings


def _singulars(genders: str, sorts: str) -> frozenset[str]:
    return frozenset(
        n.singular[NOM] for n in NOUNS.values() if n.gender in genders and n.sort in sorts
    )


NOUN_FORMS = frozenset(form for noun in NOUNS.values() for form in noun.singular + noun.plural)
FEMININE_DATIVE = re.compile(
    rf" (?:der|dieser|einer|keiner) (?:\w+en )?(?:{'|'.join(sorted(_singulars('f', 'PA')))}) "
)
REFERENTS = {  # the nouns, other than persons, that a pronoun in another clause could refer to
    "er": _singulars("m", "AREOT"),
    "ihn": _singulars("m", "AREOT"),
    "ihm": _singulars("m", "AREOT") | _singulars("n", "PAREOT"),
    "sie": _singulars("f", "AREOT"),
    "ihr": _singulars("f", "AREOT"),
}


def doubtful(german: str) -> bool:
    """Returns whether a sentence has a reading other than the intended one.

    A feminine dative right after a noun looks like a genitive ("hilft der mann der frau"), "ihr
    fenster" like "her window", and a pronoun could refer to a thing named in another clause.
    """
    for match in FEMININE_DATIVE.finditer(german):
        if german[: match.start()].rpartition(" ")[2] in NOUN_FORMS:
            return True
    if " ihr fenster" in german:
        return True
    if "," not in german:
        return False
    words = set(german.split())
    return any(pronoun in words and words & nouns for pronoun, nouns in REFERENTS.items())
