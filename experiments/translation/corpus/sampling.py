"""Random choices of a grammatical kind: modes, times, clauses, and relative clauses inside them.

All choices come from `random.Random(seed).random()`, the one method whose sequence Python promises
to keep. A relative clause with two readings is drawn again.
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
    """Times that go with the mode; in the present these may be future, and English says "will"."""
    wanted = {"modal" if mode.german else mode.name, "future" if mode is lex.PRESENT else ""}
    fitting = [time for time in lex.TIMES.values() if wanted & time.fits]
    return tuple(time for time in fitting if not negated or "negated" in time.fits)


@cache
def openings(sort: str) -> tuple[tuple[lex.Verb, str], ...]:
    """Verbs with a role for a noun of this sort: what a relative clause can say of it."""
    return tuple(
        (verb, r) for verb in (*lex.EVENTS, lex.BE) for r, s in verb.selects.items() if sort in s
    )


class Draw:
    """Random choices of a grammatical kind; `adjectives` is their share of the noun phrases."""

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
        given: Mapping[str, Phrase] = NOTHING,
        determiners: Mapping[str, tuple[lex.Determiner, ...]] = NOTHING,
        pronouns: bool = True,
        negated: bool = False,
        timed: float = 0.0,
    ) -> Clause:
        """A clause about different things, with the arguments `given` and the others drawn."""
        verb = self.pick(verbs)
        arguments = dict(given)
        for role in verb.selects:
            while role not in arguments:
                if role == "adj":
                    drawn = self.pick(predicates(arguments["nom"]))
                else:
                    allowed = determiners.get(
                        role, lex.DEFINITE if verb is lex.BE and negated else lex.ANY
                    )
                    drawn = self.argument(verb.selects[role], role, allowed, pronouns)
                others = [phrase.reference for phrase in arguments.values()]
                if drawn.reference is None or drawn.reference not in others:
                    arguments[role] = drawn
        time = None
        if verb is lex.BE:  # only plain tenses, and no particular time
            mode = lex.PRESENT if mode.german else mode
        elif self.chance(timed):
            time = self.pick(times(mode, negated))
            mode = lex.FUTURE if mode is lex.PRESENT and "future" in time.fits else mode
        clause = Clause(verb, arguments, mode, negated, time)
        if arguments["nom"] is SIE and reversible(clause) and syncretic(arguments["acc"].forms):
            arguments["nom"] = ER  # "weil sie die katze sieht" could be: because the cat sees her
        return clause

    def argument(
        self, sorts: str, role: str, determiners: tuple[lex.Determiner, ...], pronouns: bool
    ) -> Phrase:
        """A phrase of one of the sorts, possibly a pronoun if it may be a person."""
        if pronouns and "P" in sorts and lex.NO not in determiners and self.chance(0.25):
            return self.pick(PRONOUNS[role])
        return self.pick(phrases(sorts, determiners, self.chance(self.adjectives)))

    def negated(self, verbs: Sequence[lex.Verb], mode: lex.Mode, *, timed: float = 0.0) -> Clause:
        """A clause denied by "nicht", beside definite objects, or by "kein" at its last object."""
        verb = self.pick(verbs)
        determiners: dict[str, tuple[lex.Determiner, ...]] = dict.fromkeys(verb.slots, lex.DEFINITE)
        if verb.slots and self.chance(0.5):
            determiners[verb.slots[-1]] = (lex.NO,)
        return self.clause((verb,), mode, determiners=determiners, negated=True, timed=timed)

    def any_clause(self, mode: lex.Mode, *, timed: float = 0.0) -> Clause:
        """What stands in a subordinate clause: an event or a property, now and then denied."""
        if self.chance(0.15):
            return self.negated(lex.MAIN, mode, timed=timed)
        return self.clause(lex.MAIN, mode, timed=timed)

    def circumstance(self) -> tuple[Clause, str, Clause]:
        """A main clause, a conjunction, and a clause of reason, concession or condition."""
        word = self.pick(("weil", "obwohl", "wenn"))
        if word == "wenn":  # a condition: no past, and no future, which would not be "will" here
            inner = self.any_clause(self.pick((lex.PRESENT, lex.PRESENT, *lex.MODALS)))
        else:
            inner = self.any_clause(self.mode(), timed=0.2)
        mode = lex.PERFECT if inner.mode is lex.PERFECT and self.chance(0.5) else lex.PRESENT
        outer = inner
        while outer.verb is inner.verb:
            outer = self.clause(lex.SHORT, mode)
        return outer, word, inner

    def report(self) -> tuple[Clause, str]:
        """Somebody says or asks something, and the word that introduces it."""
        verb, word = self.pick(lex.REPORTS)
        return self.clause((verb,), negated=self.chance(0.2)), word

    def described(self, clause: Clause, role: str, *, nested: bool = False) -> Clause:
        """The clause with a relative clause at an argument, if `nested` with one more inside."""
        head = clause.arguments[role]
        while True:
            verb, gap = self.pick(openings(head.sort))
            inner = self.clause((verb,), self.mode(), given={gap: head}, pronouns=not nested)
            others = [other for other in inner.arguments if other not in (gap, "adj")]
            if not ambiguous(inner, gap) and (others or not nested):
                break
        if nested:
            inner = self.described(inner, self.pick(others))
        return clause._replace(arguments={**clause.arguments, role: with_relative(inner, gap)})
