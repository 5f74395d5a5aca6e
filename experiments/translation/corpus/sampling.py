"""Draws modes, times, clauses, and relative clauses inside them at random (`Draw`).

All choices come from `random.Random(seed).random()`, the only method whose sequence Python
guarantees. A relative clause with two readings is drawn again.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

from experiments.translation.corpus import lexicon as lex
from experiments.translation.corpus.clauses import (
    ER,
    PRONOUNS,
    SIE,
    Clause,
    Phrase,
    phrases,
    predicates,
)
from experiments.translation.corpus.german import ambiguous, reversible, syncretic
from experiments.translation.corpus.sentences import with_relative


Item = TypeVar("Item")

NOTHING: Mapping = {}


@cache
def times(mode: lex.Mode, negated: bool) -> tuple[lex.Time, ...]:
    """Returns the times that fit a mode; the present includes future times, with English "will"."""
    modes = {"modal" if mode.german else mode.name, "future" if mode is lex.PRESENT else ""}
    candidates = [time for time in lex.TIMES.values() if modes & time.fits]
    return tuple(time for time in candidates if not negated or "negated" in time.fits)


@cache
def openings(sort: str) -> tuple[tuple[lex.Verb, str], ...]:
    """Returns the verbs and roles that a relative clause about a noun of this sort can have."""
    return tuple(
        (verb, r) for verb in (*lex.EVENTS, lex.BE) for r, s in verb.selects.items() if sort in s
    )


class Draw:
    """A random source of clauses; `adjectives` is the share of noun phrases with an adjective."""

    def __init__(self, rng: random.Random, adjectives: float = 0.3):
        self.random = rng.random
        self.adjectives = adjectives

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.random() * len(items))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def mode(self) -> lex.Mode:
        return self.pick((lex.PRESENT, lex.PRESENT, lex.PERFECT, self.pick(lex.MODALS)))

    def clause(
        self,
        verbs: Sequence[lex.Verb] = lex.EVENTS,
        mode: lex.Mode = lex.PRESENT,
        *,
        fixed: Mapping[str, Phrase] = NOTHING,
        determiners: Mapping[str, tuple[lex.Determiner, ...]] = NOTHING,
        pronouns: bool = True,
        negated: bool = False,
        timed: float = 0.0,
    ) -> Clause:
        """Draws a clause with the arguments `fixed`; no two arguments refer to the same thing."""
        verb = self.pick(verbs)
        arguments = dict(fixed)
        for role in verb.selects:
            while role not in arguments:
                if role == "adj":
                    candidate = self.pick(predicates(arguments["nom"]))
                else:
                    allowed = determiners.get(
                        role, lex.DEFINITE if verb is lex.BE and negated else lex.ANY
                    )
                    candidate = self.argument(verb.selects[role], role, allowed, pronouns)
                references = [phrase.reference for phrase in arguments.values()]
                if candidate.reference is None or candidate.reference not in references:
                    arguments[role] = candidate
        time = None
        if verb is lex.BE:  # without modal verbs and time expressions
            mode = lex.PRESENT if mode.german else mode
        elif self.chance(timed):
            time = self.pick(times(mode, negated))
            mode = lex.FUTURE if mode is lex.PRESENT and "future" in time.fits else mode
        clause = Clause(verb, arguments, mode, negated, time)
        if arguments["nom"] is SIE and reversible(clause) and syncretic(arguments["acc"].forms):
            arguments["nom"] = ER  # "weil sie die katze sieht" could mean: because the cat sees her
        return clause

    def argument(
        self, sorts: str, role: str, determiners: tuple[lex.Determiner, ...], pronouns: bool
    ) -> Phrase:
        """Draws a phrase of one of the sorts, possibly a pronoun if it may be a person."""
        if pronouns and "P" in sorts and lex.NO not in determiners and self.chance(0.25):
            return self.pick(PRONOUNS[role])
        return self.pick(phrases(sorts, determiners, self.chance(self.adjectives)))

    def negated(self, verbs: Sequence[lex.Verb], mode: lex.Mode, *, timed: float = 0.0) -> Clause:
        """Draws a clause with definite objects and "nicht", or with "kein" at its last object."""
        verb = self.pick(verbs)
        determiners: dict[str, tuple[lex.Determiner, ...]] = dict.fromkeys(verb.slots, lex.DEFINITE)
        if verb.slots and self.chance(0.5):
            determiners[verb.slots[-1]] = (lex.NO,)
        return self.clause((verb,), mode, determiners=determiners, negated=True, timed=timed)

    def any_clause(self, mode: lex.Mode, *, timed: float = 0.0) -> Clause:
        """Draws a clause about an event or a property, sometimes negated, to be subordinate."""
        if self.chance(0.15):
            return self.negated(lex.MAIN, mode, timed=timed)
        return self.clause(lex.MAIN, mode, timed=timed)

    def circumstance(self) -> tuple[Clause, str, Clause]:
        """Draws a main clause, a conjunction, and a clause of reason, concession or condition."""
        word = self.pick(("weil", "obwohl", "wenn"))
        if word == "wenn":  # no past, and no future, which would not be "will" in a condition
            inner = self.any_clause(self.pick((lex.PRESENT, lex.PRESENT, *lex.MODALS)))
        else:
            inner = self.any_clause(self.mode(), timed=0.2)
        mode = lex.PERFECT if inner.mode is lex.PERFECT and self.chance(0.5) else lex.PRESENT
        outer = inner
        while outer.verb is inner.verb:
            outer = self.clause(lex.SHORT, mode)
        return outer, word, inner

    def report(self) -> tuple[Clause, str]:
        """Draws a clause in which somebody says or asks something, and the conjunction after it."""
        verb, word = self.pick(lex.REPORTS)
        return self.clause((verb,), negated=self.chance(0.2)), word

    def described(self, clause: Clause, role: str, *, nested: bool = False) -> Clause:
        """Adds a relative clause to an argument of a clause and, if `nested`, another inside it."""
        head = clause.arguments[role]
        while True:
            verb, gap = self.pick(openings(head.sort))
            inner = self.clause((verb,), self.mode(), fixed={gap: head}, pronouns=not nested)
            free_roles = [name for name in inner.arguments if name not in (gap, "adj")]
            if not ambiguous(inner, gap) and (free_roles or not nested):
                break
        if nested:
            inner = self.described(inner, self.pick(free_roles))
        return clause._replace(arguments={**clause.arguments, role: with_relative(inner, gap)})
