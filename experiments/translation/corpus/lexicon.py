"""The words of both languages, and the tables of German agreement.

A row of the lexicon pairs a German word with an English one. A verb has a frame in each language,
linked by the names of the roles: `geben: dat acc = acc to_dat`, `warten: auf_acc = for_acc`,
`ab|holen: acc = acc up_`.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass


Forms = tuple[str, str, str]  # by case (nominative, accusative, dative) or by agreement
Paradigm = dict[str, Forms]  # forms by gender: m, f, n, and p for the plural of all three
Frame = tuple[tuple[str, str], ...]  # (preposition or adverb, role) of each complement of a verb

NOM, ACC, DAT = range(3)
CASES = {"nom": NOM, "acc": ACC, "dat": DAT, "adj": NOM}  # the case of each role
FIRST, THIRD, PLURAL = range(3)  # agreement: ich, er, wir


def join(*words: str) -> str:
    """Joins the nonempty words with spaces."""
    return " ".join([word for word in words if word])


def triple(words: Sequence[str]) -> Forms:
    """Returns three forms; a single form is repeated."""
    first, second, third = words if len(words) > 1 else [*words] * 3
    return first, second, third


# ------------------------------------------------------------------------------ agreement tables


def paradigm(*rows: str) -> Paradigm:
    """Parses rows nominative, accusative and dative with columns m, f, n, p; "-" is no word."""
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
AFTER_EIN = paradigm("er e es e", "en e es e", "en en en en")  # the plural has no article
AFTER_KEIN = paradigm("er e es en", "en e es en", "en en en en")


@dataclass(frozen=True, eq=False)
class Determiner:
    """An article, the adjective endings after it, and its English forms in singular and plural."""

    german: Paradigm
    endings: Paradigm
    subject: tuple[str, str]
    object: tuple[str, str]


THE = Determiner(DER, AFTER_DER, ("the", "the"), ("the", "the"))
THIS = Determiner(DIESER, AFTER_DER, ("this", "these"), ("this", "these"))
A = Determiner(EIN, AFTER_EIN, ("a", ""), ("a", ""))
NO = Determiner(KEIN, AFTER_KEIN, ("no", "no"), ("a", "any"))  # "does not buy a book", "any books"
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
    """An adjective, and the sorts of nouns that it fits."""

    german: str
    english: str
    sorts: str


@dataclass(frozen=True, eq=False)
class Time:
    """A time expression, and the modes that it fits; with "negated", also negated clauses."""

    german: str
    english: str
    fits: Set[str]


@dataclass(frozen=True, eq=False)
class Mode:
    """A tense or modality: finite forms of the German modal, English auxiliary and link."""

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


# Columns are separated by two or more spaces; "-" is an empty cell.
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
    """Parses a frame: `for_acc` is a preposition and its role, `up_` an adverb, `acc` a role."""
    words = [word.rpartition("_") for word in cell.strip("- ").split()]
    return tuple((prefix, role) for prefix, _, role in words)


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


def preposition(frame: Frame, role: str) -> str:
    """Returns the preposition of a role in a frame, or an empty string."""
    return "".join([prefix for prefix, frame_role in frame if frame_role == role])


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
SUBORDINATORS = dict(weil="because", obwohl="although", wenn="if", dass="that", ob="whether")
REPORTS = tuple(
    (VERBS[name], word)
    for name, words in dict(sagen="dass", glauben="dass", wissen="dass ob", fragen="ob").items()
    for word in words.split()
)
