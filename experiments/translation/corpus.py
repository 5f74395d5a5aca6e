"""The built-in German-English corpus, generated from a synchronous grammar.

    pairs = generate(1000, seed=0)                   # list[Pair], no source twice
    parts = splits(train=50_000, validation=1000, test=1000, deeper=1000, seed=0)

A `Pair` is a German sentence, its one right English translation and the name of the construction.
Text is lower-case and its tokens are separated by single spaces, punctuation included. The same
seed gives the same pairs on every machine and Python version: all choices come from
`random.Random(seed).random()`, the one method whose sequence Python promises to keep.

How it works. A `Clause` is a verb, its arguments by role (`nom`, `acc`, `dat`), a mode (present,
perfect, a modal verb), perhaps a negation and a time. Both languages are read off it:

- German by its topological fields. The finite verb and what closes the clause (particle,
  participle, infinitive) form a bracket around the middle field. `verb_second` puts the finite
  verb after one fronted phrase, or first; `verb_final` puts it behind everything.
- English by its auxiliaries: `english` has do-support where "not" or a question calls for it.

The lexicon pairs a German frame with an English one, linked by the names of the roles:
`geben: dat acc = acc to_dat`, `warten: auf_acc = for_acc`, `ab|holen: acc = acc up_`.

One right answer. The subject precedes the objects, unless the fronted object shows its case. A
relative clause whose pronoun could be subject or object ("die frau , die das kind sieht") is drawn
again, and so are sentences for which `doubtful` finds another reading. `wenn` is "if", the perfect
is the English past, the present with a future time is "will", and `sie` is always "she".

To add a construction, write a function from `Draw` to a sentence and name it in `TRAINING` or
`NESTED`; `DEEPER` are the constructions kept out of training: clauses nested deeper.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar


Item = TypeVar("Item")
Forms = tuple[str, str, str]  # by case (nominative, accusative, dative) or by agreement
Paradigm = dict[str, Forms]  # forms by gender: m, f, n, and p for the plural of all three
Frame = tuple[tuple[str, str], ...]  # what a verb governs, in order: preposition, role

NOM, ACC, DAT = range(3)
CASES = {"nom": NOM, "acc": ACC, "dat": DAT, "adj": NOM}  # the case of each role
FIRST, THIRD, PLURAL = range(3)  # agreement: ich, er, wir


def join(*words: str) -> str:
    """The words that are not empty, with spaces between."""
    return " ".join([word for word in words if word])


def triple(words: Sequence[str]) -> Forms:
    """Three forms; a single one stands for all three."""
    first, second, third = words if len(words) > 1 else [*words] * 3
    return first, second, third


# ------------------------------------------------------------------------------ agreement tables


def paradigm(*rows: str) -> Paradigm:
    """A table with rows nominative, accusative, dative and columns m, f, n, p; "-" is no word."""
    cells = [["" if cell == "-" else cell for cell in row.split()] for row in rows]
    return {gender: triple(forms) for gender, *forms in zip("mfnp", *cells, strict=True)}


RELATIVE = paradigm("der die das die", "den die das die", "dem der dem denen")
DER = paradigm("der die das die", "den die das die", "dem der dem den")
EIN = paradigm("ein eine ein -", "einen eine ein -", "einem einer einem -")
KEIN = paradigm("kein keine kein keine", "keinen keine kein keine", "keinem keiner keinem keinen")
DIESER = paradigm(
    "dieser diese dieses diese", "diesen diese dieses diese", "diesem dieser diesem diesen"
)
AFTER_DER = paradigm("e e e en", "en e e en", "en en en en")  # endings of adjectives
AFTER_EIN = paradigm("er e es e", "en e es e", "en en en en")  # in the plural after no article
AFTER_KEIN = paradigm("er e es en", "en e es en", "en en en en")


@dataclass(frozen=True, eq=False)
class Determiner:
    """An article, the adjective endings after it, and its English for singular and plural."""

    german: Paradigm
    endings: Paradigm
    subject: tuple[str, str]
    object: tuple[str, str]


THE = Determiner(DER, AFTER_DER, ("the", "the"), ("the", "the"))
THIS = Determiner(DIESER, AFTER_DER, ("this", "these"), ("this", "these"))
A = Determiner(EIN, AFTER_EIN, ("a", ""), ("a", ""))
NO = Determiner(KEIN, AFTER_KEIN, ("no", "no"), ("a", "any"))  # does not buy a book, any books
DEFINITE = (THE, THIS)
ANY = (THE, THE, A, THIS)


# --------------------------------------------------------------------------------------- lexicon


@dataclass(frozen=True, eq=False)
class Noun:
    """A noun: German forms by case, English singular and plural, and its sort."""

    gender: str
    singular: Forms
    plural: Forms
    english: tuple[str, str]
    sort: str


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective and the sorts of noun that it fits."""

    german: str
    english: str
    sorts: str


@dataclass(frozen=True, eq=False)
class Time:
    """A time expression and what it goes with: modes, and "negated" clauses."""

    german: str
    english: str
    fits: Set[str]


@dataclass(frozen=True, eq=False)
class Mode:
    """Tense or modality: finite forms of the German modal, English auxiliary and link."""

    name: str
    german: Forms | None  # None: the verb or its own auxiliary is finite
    auxiliary: Forms  # carries "not" and precedes the subject in questions
    link: Forms | None  # "has to": finite in statements, bare after "do"


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb with its two frames; `infinitive` and `participle` are joined with the particle."""

    particle: str
    present: Forms
    infinitive: str
    participle: str
    auxiliary: Forms
    german_frame: Frame
    english_frame: Frame
    slots: tuple[str, ...]  # the roles of the objects, in German order
    selects: dict[str, str]  # the sorts of noun in each role, the subject's first
    base: str
    english: Forms
    past: Forms


# Columns are two or more spaces apart; "-" is an empty cell.
# Sorts: P person, A animal, R readable, E eatable, O openable, T other thing.

# singular (nachbar/n: its other cases), plural, gender, English, sort
_NOUNS = """
mann       männer      m   man        men         P
lehrer     lehrer      m   teacher    teachers    P
nachbar/n  nachbarn    m   neighbor   neighbors   P
frau       frauen      f   woman      women       P
ärztin     ärztinnen   f   doctor     doctors     P
schwester  schwestern  f   sister     sisters     P
kind       kinder      n   child      children    P
mädchen    mädchen     n   girl       girls       P
hund       hunde       m   dog        dogs        A
katze      katzen      f   cat        cats        A
pferd      pferde      n   horse      horses      A
brief      briefe      m   letter     letters     R
zeitung    zeitungen   f   newspaper  newspapers  R
buch       bücher      n   book       books       R
apfel      äpfel       m   apple      apples      E
birne      birnen      f   pear       pears       E
ei         eier        n   egg        eggs        E
koffer     koffer      m   suitcase   suitcases   O
tür        türen       f   door       doors       O
fenster    fenster     n   window     windows     O
stuhl      stühle      m   chair      chairs      T
tasche     taschen     f   bag        bags        T
bild       bilder      n   picture    pictures    T
"""

_ADJECTIVES = """
alt          old        PAREOT
klein        small      PAREOT
groß         big        PAREOT
schön        beautiful  AROT
jung         young      PA
müde         tired      PA
freundlich   friendly   PA
neu          new        ROT
rot          red        EOT
"""

_TIMES = """
heute         today           present perfect modal negated
am abend      in the evening  present perfect modal negated
am montag     on monday       present perfect modal negated
jeden tag     every day       present modal
manchmal      sometimes       present
gestern       yesterday       perfect negated
letzte woche  last week       perfect negated
morgen        tomorrow        future modal negated
nächste woche  next week      future modal negated
"""

_MODES = """
present                      -     do,does,do      -
perfect                      -     did             -
future                       -     will            -
müssen  muss,muss,müssen           do,does,do      have_to,has_to,have_to
wollen  will,will,wollen           do,does,do      want_to,wants_to,want_to
können  kann,kann,können           can             -
sollen  soll,soll,sollen           should          -
dürfen  darf,darf,dürfen           may             -
"""

# infinitive, present (er, or ich,er,wir), participle, auxiliary, German frame = English frame,
# sorts of the subject and of each object, English base, present and past
_EVENTS = """
lesen       liest      gelesen      haben  acc = acc             P   R       read reads read
kaufen      kauft      gekauft      haben  acc = acc             P   RETA    buy buys bought
essen       isst       gegessen     haben  acc = acc             P   E       eat eats ate
tragen      trägt      getragen     haben  acc = acc             P   RT      carry carries carried
holen       holt       geholt       haben  acc = acc             P   RET     fetch fetches fetched
sehen       sieht      gesehen      haben  acc = acc             PA  PAREOT  see sees saw
suchen      sucht      gesucht      haben  acc = for_acc         PA  PAREOT  look looks looked
hören       hört       gehört       haben  acc = acc             PA  PA      hear hears heard
helfen      hilft      geholfen     haben  dat = dat             P   PA      help helps helped
danken      dankt      gedankt      haben  dat = dat             P   P       thank thanks thanked
antworten   antwortet  geantwortet  haben  dat = dat             P   P       answer answers answered
folgen      folgt      gefolgt      sein   dat = dat             PA  PA      follow follows followed
geben       gibt       gegeben      haben  dat acc = acc to_dat  P   P RET   give gives gave
zeigen      zeigt      gezeigt      haben  dat acc = acc to_dat  P   P RATO  show shows showed
bringen     bringt     gebracht     haben  dat acc = acc to_dat  P   P RET   bring brings brought
warten      wartet     gewartet     haben  auf_acc = for_acc     PA  PA      wait waits waited
spielen     spielt     gespielt     haben  mit_dat = with_dat    PA  PA      play plays played
sprechen    spricht    gesprochen   haben  mit_dat = to_dat      P   P       talk talks talked
schlafen    schläft    geschlafen   haben  - = -                 PA  -       sleep sleeps slept
lachen      lacht      gelacht      haben  - = -                 P   -       laugh laughs laughed
arbeiten    arbeitet   gearbeitet   haben  - = -                 P   -       work works worked
kommen      kommt      gekommen     sein   - = -                 PA  -       come comes came
auf|machen  macht      gemacht      haben  acc = acc             P   O       open opens opened
zu|machen   macht      gemacht      haben  acc = acc             P   O       close closes closed
an|sehen    sieht      gesehen      haben  acc = at_acc          P   PART    look looks looked
aus|suchen  sucht      gesucht      haben  acc = acc             P   RET     choose chooses chose
ab|holen    holt       geholt       haben  acc = acc up_         P   PA      pick picks picked
an|rufen    ruft       gerufen      haben  acc = acc             P   P       call calls called
ein|laden   lädt       geladen      haben  acc = acc             P   P       invite invites invited
mit|bringen  bringt    gebracht     haben  acc = acc along_      P   RET     bring brings brought
weg|werfen  wirft      geworfen     haben  acc = acc away_       P   RET     throw throws threw
zu|hören    hört       gehört       haben  dat = to_dat          P   P       listen listens listened
auf|stehen  steht      gestanden    sein   - = up_               PA  -       get gets got
ein|schlafen  schläft  geschlafen   sein   - = asleep_           PA  -       fall falls fell
an|kommen   kommt      gekommen     sein   - = -                 P   -       arrive arrives arrived
"""

_OTHERS = """
sagen       sagt            gesagt      haben  - = -  P  -  say says said
wissen      weiß,weiß,wissen  gewusst   haben  - = -  P  -  know knows knew
glauben     glaubt          geglaubt    haben  - = -  P  -  believe believes believed
fragen      fragt           gefragt     haben  - = -  P  -  ask asks asked
sein        bin,ist,sind    -  war,war,waren  adj = adj  PAREOT  *  be am,is,are was,was,were
"""


def _rows(text: str) -> list[list[str]]:
    lines = [re.split(r" {2,}", line) for line in text.strip().splitlines()]
    return [["" if cell == "-" else cell for cell in line] for line in lines]


def _forms(cell: str) -> Forms:
    return triple(cell.replace("_", " ").split(","))


def _noun(row: list[str]) -> tuple[str, Noun]:
    name, plural, gender, singular_english, plural_english, sort = row
    name, _, weak = name.partition("/")
    dative = plural if plural.endswith("n") else plural + "n"
    singular = (name, name + weak, name + weak)
    english = (singular_english, plural_english)
    return name, Noun(gender, singular, (plural, plural, dative), english, sort)


def _mode(row: list[str]) -> tuple[str, Mode]:
    name, german, auxiliary, link = row
    finite, linked = _forms(german) if german else None, _forms(link) if link else None
    return name, Mode(name, finite, _forms(auxiliary), linked)


def _frame(cell: str) -> Frame:
    """`for_acc` is a preposition and its role, `up_` an adverb, `acc` a role."""
    words = [word.rpartition("_") for word in cell.strip("- ").split()]
    return tuple((before, role) for before, _, role in words)


def _verb(row: list[str]) -> tuple[str, Verb]:
    name, present, participle, auxiliary, frames, subjects, objects, english = row
    particle, _, infinitive = name.rpartition("|")
    base, third, past = english.split()
    german_frame, english_frame = map(_frame, frames.split("="))
    slots = tuple(role for _, role in german_frame)
    sorts = [subjects, *objects.split()]
    verb = Verb(
        particle=particle,
        present=_forms(present if "," in present else f"{infinitive[:-1]},{present},{infinitive}"),
        infinitive=particle + infinitive,
        participle=particle + participle,
        auxiliary=_forms(AUXILIARIES.get(auxiliary, auxiliary)),
        german_frame=german_frame,
        english_frame=english_frame,
        slots=slots,
        selects=dict(zip(("nom", *slots), sorts, strict=True)),
        base=base,
        english=_forms(third if "," in third else f"{base},{third},{base}"),
        past=_forms(past),
    )
    return name, verb


AUXILIARIES = {"haben": "habe,hat,haben", "sein": "bin,ist,sind"}
NOUNS = dict(map(_noun, _rows(_NOUNS)))
ADJECTIVES = {row[0]: Adjective(*row) for row in _rows(_ADJECTIVES)}
TIMES = {row[0]: Time(row[0], row[1], frozenset(row[2].split())) for row in _rows(_TIMES)}
MODES = dict(map(_mode, _rows(_MODES)))
VERBS = dict(map(_verb, _rows(_EVENTS + _OTHERS.strip())))

PRESENT, PERFECT, FUTURE = MODES["present"], MODES["perfect"], MODES["future"]
MODALS = tuple(mode for mode in MODES.values() if mode.german)
BE = VERBS["sein"]
EVENTS = tuple(VERBS[row[0]] for row in _rows(_EVENTS))
MAIN = (*EVENTS, BE, BE, BE)
SHORT = tuple(verb for verb in MAIN if len(verb.slots) < 2)
SIMPLE = tuple(verb for verb in EVENTS if not verb.particle)
SEPARABLE = tuple(verb for verb in EVENTS if verb.particle)
TRANSITIVE = tuple(verb for verb in EVENTS if verb.slots)
DITRANSITIVE = tuple(verb for verb in EVENTS if len(verb.slots) == 2)
OBJECT_LAST = tuple(verb for verb in SIMPLE if len(verb.slots) == 1)

NOTHING: Mapping = {}
SUBORDINATORS = dict(weil="because", obwohl="although", wenn="if", dass="that", ob="whether")
REPORTS = tuple(
    (VERBS[name], word)
    for name, words in dict(sagen="dass", glauben="dass", wissen="dass ob", fragen="ob").items()
    for word in words.split()
)


# ---------------------------------------------------------------------------------- noun phrases


class Phrase(NamedTuple):
    """A noun phrase, pronoun or predicate, realised in both languages."""

    forms: Forms  # German, by case
    subject: str  # English
    object: str
    agreement: int = THIRD
    gender: str = ""
    sort: str = ""
    reference: Noun | str | None = None  # two phrases of one clause never share it
    determiner: Determiner | None = None  # None: a pronoun or a predicate


# The speaker is not named twice ("wir sehen uns"). The accusative "sie" would be "her" or "them".
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
    """Determiner, adjective and noun in agreement, in all cases."""
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
    """All phrases about nouns of these sorts, with an adjective or without."""
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
    """What an adjective can say of the subject, if the subject does not say it already."""
    return tuple(
        Phrase(triple([adjective.german]), "", adjective.english)
        for adjective in ADJECTIVES.values()
        if subject.sort in adjective.sorts and adjective.english not in subject.subject.split()
    )


# --------------------------------------------------------------------------------------- clauses


class Clause(NamedTuple):
    """Who does what, how and when; word order is the business of the realisation."""

    verb: Verb
    arguments: dict[str, Phrase]  # by role: nom, and the verb's slots
    mode: Mode = PRESENT
    negated: bool = False
    time: Time | None = None


@cache
def bracket(verb: Verb, mode: Mode, agreement: int) -> Forms:
    """The finite verb, what closes its clause, and the cluster of both at the end of a clause."""
    if mode.german:
        finite, rest = mode.german[agreement], verb.infinitive
    elif mode is PERFECT:
        finite, rest = verb.auxiliary[agreement], verb.participle
    else:
        finite = verb.present[agreement]
        return finite, verb.particle, verb.particle + finite
    return finite, rest, join(rest, finite)


def preposition(frame: Frame, role: str) -> str:
    """The preposition of a role in a frame, if any."""
    return "".join([before for before, other in frame if other == role])


def middle_field(clause: Clause, moved: str = "") -> list[str]:
    """Pronouns, time, objects, "nicht", and last a predicate or an object with a preposition."""
    pronouns, nouns, close = [], [], []
    denied = clause.negated
    for before, role in clause.verb.german_frame:
        phrase = clause.arguments[role]
        denied = denied and phrase.determiner is not NO
        if role == moved:
            continue
        place = close if before or role == "adj" else nouns if phrase.determiner else pronouns
        place += [before, phrase.forms[CASES[role]]]
    time = clause.time.german if clause.time and moved != "time" else ""
    return [*pronouns, time, *nouns, "nicht" if denied else "", *close]


def verb_second(clause: Clause, front: str = "nom") -> str:
    """German main clause that begins with `front`: a role, "time", or "" for the finite verb."""
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
    """German subordinate clause without its first word; the argument `gap` is left out."""
    subject = clause.arguments["nom"]
    _, _, cluster = bracket(clause.verb, clause.mode, subject.agreement)
    return join("" if gap == "nom" else subject.forms[NOM], *middle_field(clause, gap), cluster)


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


def reversible(clause: Clause) -> bool:
    """Whether subject and accusative object could by number and sort change places."""
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
    """Whether a relative clause has two readings: "die frau , die das kind sieht"."""
    if gap == "dat" or not reversible(clause):
        return False
    head = clause.arguments[gap]
    rest = clause.arguments["acc" if gap == "nom" else "nom"]
    return syncretic(RELATIVE[head.gender]) and syncretic(rest.forms)


def syncretic(forms: Forms) -> bool:
    """Whether nominative and accusative look the same."""
    return forms[NOM] == forms[ACC]


def with_relative(clause: Clause, gap: str) -> Phrase:
    """The argument `gap` of the clause, with the clause as its relative clause."""
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


# --------------------------------------------------------------------------------------- drawing


@cache
def times(mode: Mode, negated: bool) -> tuple[Time, ...]:
    """Times that go with the mode; in the present these may be future, and English says "will"."""
    wanted = {"modal" if mode.german else mode.name, "future" if mode is PRESENT else ""}
    fitting = [time for time in TIMES.values() if wanted & time.fits]
    return tuple(time for time in fitting if not negated or "negated" in time.fits)


@cache
def openings(sort: str) -> tuple[tuple[Verb, str], ...]:
    """Verbs with a role for a noun of this sort: what a relative clause can say of it."""
    return tuple((verb, r) for verb in (*EVENTS, BE) for r, s in verb.selects.items() if sort in s)


class Draw:
    """Random choices of a grammatical kind; `adjectives` is their share of the noun phrases."""

    def __init__(self, rng: random.Random, adjectives: float = 0.3):
        self.random = rng.random
        self.adjectives = adjectives

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.random() * len(items))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def mode(self) -> Mode:
        return self.pick((PRESENT, PRESENT, PERFECT, self.pick(MODALS)))

    def clause(
        self,
        verbs: Sequence[Verb] = EVENTS,
        mode: Mode = PRESENT,
        *,
        given: Mapping[str, Phrase] = NOTHING,
        determiners: Mapping[str, tuple[Determiner, ...]] = NOTHING,
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
                    allowed = determiners.get(role, DEFINITE if verb is BE and negated else ANY)
                    drawn = self.argument(verb.selects[role], role, allowed, pronouns)
                others = [phrase.reference for phrase in arguments.values()]
                if drawn.reference is None or drawn.reference not in others:
                    arguments[role] = drawn
        time = None
        if verb is BE:  # only plain tenses, and no particular time
            mode = PRESENT if mode.german else mode
        elif self.chance(timed):
            time = self.pick(times(mode, negated))
            mode = FUTURE if mode is PRESENT and "future" in time.fits else mode
        clause = Clause(verb, arguments, mode, negated, time)
        if arguments["nom"] is SIE and reversible(clause) and syncretic(arguments["acc"].forms):
            arguments["nom"] = ER  # "weil sie die katze sieht" could be: because the cat sees her
        return clause

    def argument(
        self, sorts: str, role: str, determiners: tuple[Determiner, ...], pronouns: bool
    ) -> Phrase:
        """A phrase of one of the sorts, possibly a pronoun if it may be a person."""
        if pronouns and "P" in sorts and NO not in determiners and self.chance(0.25):
            return self.pick(PRONOUNS[role])
        return self.pick(phrases(sorts, determiners, self.chance(self.adjectives)))

    def negated(self, verbs: Sequence[Verb], mode: Mode, *, timed: float = 0.0) -> Clause:
        """A clause denied by "nicht", beside definite objects, or by "kein" at its last object."""
        verb = self.pick(verbs)
        determiners: dict[str, tuple[Determiner, ...]] = dict.fromkeys(verb.slots, DEFINITE)
        if verb.slots and self.chance(0.5):
            determiners[verb.slots[-1]] = (NO,)
        return self.clause((verb,), mode, determiners=determiners, negated=True, timed=timed)

    def any_clause(self, mode: Mode, *, timed: float = 0.0) -> Clause:
        """What stands in a subordinate clause: an event or a property, now and then denied."""
        if self.chance(0.15):
            return self.negated(MAIN, mode, timed=timed)
        return self.clause(MAIN, mode, timed=timed)

    def circumstance(self) -> tuple[Clause, str, Clause]:
        """A main clause, a conjunction, and a clause of reason, concession or condition."""
        word = self.pick(("weil", "obwohl", "wenn"))
        if word == "wenn":  # a condition: no past, and no future, which would not be "will" here
            inner = self.any_clause(self.pick((PRESENT, PRESENT, *MODALS)))
        else:
            inner = self.any_clause(self.mode(), timed=0.2)
        mode = PERFECT if inner.mode is PERFECT and self.chance(0.5) else PRESENT
        outer = inner
        while outer.verb is inner.verb:
            outer = self.clause(SHORT, mode)
        return outer, word, inner

    def report(self) -> tuple[Clause, str]:
        """Somebody says or asks something, and the word that introduces it."""
        verb, word = self.pick(REPORTS)
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


# --------------------------------------------------------------------------------- constructions

Sentence = tuple[str, str]  # German, English


def sentence(german: str, gloss: str, mark: str = ".") -> Sentence:
    """Both sides with their last mark; of two marks in a row the first falls."""
    return f"{german} {mark}".replace(", ,", ",").replace(f", {mark}", mark), f"{gloss} {mark}"


def statement(clause: Clause, front: str = "nom") -> Sentence:
    """A main clause with `front` in the first place."""
    return sentence(verb_second(clause, front), english(clause, time_first=front == "time"))


def subject_or_time(draw: Draw, clause: Clause) -> Sentence:
    """A main clause that begins with its subject, or as often with its time if it has one."""
    return statement(clause, "time" if clause.time and draw.chance(0.5) else "nom")


def chain(outer: Clause, *links: tuple[str, Clause]) -> Sentence:
    """A main clause and the subordinate clauses behind it, each with the word that opens it."""
    german, gloss = verb_second(outer), english(outer)
    for word, clause in links:
        german += f" , {word} {verb_final(clause)}"
        gloss += f" {SUBORDINATORS[word]} {english(clause)}"
    return sentence(german, gloss)


def simple(draw: Draw) -> Sentence:
    return statement(draw.clause(SIMPLE))


def separable(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(SEPARABLE, timed=0.3))


def ditransitive(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(DITRANSITIVE, draw.mode(), timed=0.2))


def time(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(timed=1.0))


def perfect(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(mode=PERFECT, timed=0.4))


def modal(draw: Draw) -> Sentence:
    return subject_or_time(draw, draw.clause(mode=draw.pick(MODALS), timed=0.3))


def negation(draw: Draw) -> Sentence:
    """No subject, no object, or not; a time comes first, where "not" is not said of it."""
    if draw.chance(0.2):
        return statement(draw.clause(mode=draw.mode(), determiners={"nom": (NO,)}))
    clause = draw.negated(EVENTS, draw.mode(), timed=0.2)
    return statement(clause, "time" if clause.time else "nom")


def fronted_object(draw: Draw) -> Sentence:
    """An object first, where its form or a preposition shows that it is not the subject."""
    while True:
        clause = draw.clause(TRANSITIVE, timed=0.2)
        before, front = draw.pick(clause.verb.german_frame)
        moved = clause.arguments[front]
        if moved.determiner and (before or moved.forms[CASES[front]] != moved.forms[NOM]):
            return statement(clause, front)


def predicate(draw: Draw) -> Sentence:
    no_subject = draw.chance(0.2)
    subjects = {"nom": (NO,)} if no_subject else NOTHING
    denied = not no_subject and draw.chance(0.3)
    mode = draw.pick((PRESENT, PERFECT))
    return statement(draw.clause((BE,), mode, determiners=subjects, negated=denied))


def question(draw: Draw) -> Sentence:
    clause = draw.clause(MAIN, draw.mode(), timed=0.2)
    return sentence(verb_second(clause, ""), english_question(clause), "?")


def relative_after_subject(draw: Draw) -> Sentence:
    clause = draw.clause(MAIN, draw.mode(), pronouns=False)
    return statement(draw.described(clause, "nom"))


def relative_after_object(draw: Draw) -> Sentence:
    """The object ends the clause in both languages, and no time follows its relative clause."""
    clause = draw.clause(OBJECT_LAST, pronouns=False, timed=0.2)
    front = "time" if clause.time else "nom"
    return statement(draw.described(clause, clause.verb.slots[0]), front)


def subordinate(draw: Draw) -> Sentence:
    outer, word, inner = draw.circumstance()
    return chain(outer, (word, inner))


def subordinate_first(draw: Draw) -> Sentence:
    outer, word, inner = draw.circumstance()
    return sentence(
        f"{word} {verb_final(inner)} , {verb_second(outer, '')}",
        f"{SUBORDINATORS[word]} {english(inner)} , {english(outer)}",
    )


def complement(draw: Draw) -> Sentence:
    outer, word = draw.report()
    return chain(outer, (word, draw.any_clause(draw.mode(), timed=0.2)))


def two_relatives(draw: Draw) -> Sentence:
    clause = draw.clause(OBJECT_LAST, pronouns=False)
    return statement(draw.described(draw.described(clause, "nom"), clause.verb.slots[0]))


def relative_in_relative(draw: Draw) -> Sentence:
    return statement(draw.described(draw.clause(SHORT, pronouns=False), "nom", nested=True))


def relative_in_subordinate(draw: Draw) -> Sentence:
    inner = draw.described(draw.clause(SHORT, draw.mode(), pronouns=False), "nom")
    return chain(draw.clause(SHORT), (draw.pick(("weil", "obwohl")), inner))


def relative_in_complement(draw: Draw) -> Sentence:
    outer, word = draw.report()
    inner = draw.described(draw.clause(SHORT, draw.mode(), pronouns=False), "nom")
    return chain(outer, (word, inner))


def complement_in_subordinate(draw: Draw) -> Sentence:
    middle, word = draw.report()
    inner = draw.clause(SHORT, draw.mode())
    return chain(draw.clause(SHORT), (draw.pick(("weil", "obwohl")), middle), (word, inner))


def complement_in_complement(draw: Draw) -> Sentence:
    (outer, first), (middle, second) = draw.report(), draw.report()
    return chain(outer, (first, middle), (second, draw.clause(SHORT, draw.mode())))


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

# ------------------------------------------------------------------------------- second readings


def _singulars(genders: str, sorts: str) -> frozenset[str]:
    return frozenset(
        n.singular[NOM] for n in NOUNS.values() if n.gender in genders and n.sort in sorts
    )


NOUN_FORMS = frozenset(form for noun in NOUNS.values() for form in noun.singular + noun.plural)
FEMININE_DATIVE = re.compile(
    rf" (?:der|dieser|einer|keiner) (?:\w+en )?(?:{'|'.join(sorted(_singulars('f', 'PA')))}) "
)
REFERENTS = {  # what besides a person a pronoun in another clause could mean
    "er": _singulars("m", "AREOT"),
    "ihn": _singulars("m", "AREOT"),
    "ihm": _singulars("m", "AREOT") | _singulars("n", "PAREOT"),
    "sie": _singulars("f", "AREOT"),
    "ihr": _singulars("f", "AREOT"),
}


def doubtful(german: str) -> bool:
    """Whether a sentence could be read otherwise than the grammar means it.

    A feminine dative right behind a noun looks like a genitive ("hilft der mann der frau"), "ihr
    fenster" like "her window", and a pronoun could stand for a thing named in another clause.
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


# ---------------------------------------------------------------------------------------- corpus


class Pair(NamedTuple):
    """A German sentence, its English translation, and the construction it shows."""

    source: str
    target: str
    construction: str


class Splits(NamedTuple):
    """Pairs for training and for three kinds of examination; no source is in two of them."""

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
    """`count` pairs with distinct sources, none of them in `exclude`, evenly from `constructions`.

    A smaller count gives the beginning of the same list. A construction with few sentences gives
    way to the others as it is used up; `ValueError` if all of them are.
    """
    rules = TRAINING | NESTED
    if not constructions or not set(constructions) <= set(rules):
        raise ValueError(f"constructions: expected some of {tuple(rules)}, got {constructions!r}")
    if count < 0:
        raise ValueError(f"count: expected at least 0, got {count}")
    rng = random.Random(seed)
    draw, brief = Draw(rng), Draw(rng, adjectives=0.1)  # examine depth, not length
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
    """Disjoint splits; validation, test and deeper do not depend on how much is trained on."""
    held_out = validation + test
    pairs = generate(held_out + train, seed=seed)
    nested = generate(deeper, seed=seed, constructions=DEEPER, exclude={p.source for p in pairs})
    return Splits(pairs[held_out:], pairs[:validation], pairs[validation:held_out], nested)
