"""The German-English corpus: golden sentences, pinned pairs, second readings, reproducibility."""

import hashlib
import itertools
import random
import re
from collections import Counter

import pytest

from experiments.translation import corpus
from experiments.translation.corpus import DEEPER, constructions, generate, lexicon, splits
from experiments.translation.corpus.clauses import ER, ICH, SIE, WIR, Clause, phrase, predicates
from experiments.translation.corpus.english import english_question
from experiments.translation.corpus.german import ambiguous, doubtful, verb_second
from experiments.translation.corpus.lexicon import FUTURE, MODES, NO, PERFECT, PRESENT, THE, THIS, A
from experiments.translation.corpus.sampling import Draw
from experiments.translation.corpus.sentences import chain, sentence, statement, with_relative


@pytest.fixture(scope="module")
def pairs():
    return generate(12_000, seed=11)


@pytest.fixture(scope="module")
def nested():
    return generate(1_600, seed=11, constructions=DEEPER)


def np(noun, determiner=THE, adjective="", *, plural=False):
    return phrase(lexicon.NOUNS[noun], determiner, plural, lexicon.ADJECTIVES.get(adjective))


def clause(verb, nom, mode=PRESENT, *, negated=False, time="", **objects):
    return Clause(
        lexicon.VERBS[verb], {"nom": nom, **objects}, mode, negated, lexicon.TIMES.get(time)
    )


def is_(nom, adjective, mode=PRESENT, *, negated=False):
    [said] = [p for p in predicates(nom) if p.forms[0] == adjective]
    return clause("sein", nom, mode, negated=negated, adj=said)


def asks(question):
    return sentence(verb_second(question, ""), english_question(question), "?")


MANN, FRAU, KIND, HUND, BUCH = np("mann"), np("frau"), np("kind"), np("hund"), np("buch")
DOOR = np("tür")
MUST, MAY = MODES["müssen"], MODES["dürfen"]

# Each German sentence stands above its translation.
GOLDEN = """\
eine frau kauft einen roten apfel .
a woman buys a red apple .
ein großes kind hilft diesem nachbarn .
a big child helps this neighbor .
die katzen folgen den kleinen kindern .
the cats follow the small children .
die schwester gibt einer frau ein schönes bild .
the sister gives a beautiful picture to a woman .
dieses müde kind schläft nicht ein .
this tired child does not fall asleep .
ich rufe morgen den nachbarn an .
i will call the neighbor tomorrow .
gestern hat die frau die kinder eingeladen .
yesterday the woman invited the children .
der mann hat keinen neuen stuhl weggeworfen .
the man did not throw a new chair away .
der mann kauft keine birnen .
the man does not buy any pears .
wir müssen nicht aufstehen .
we do not have to get up .
den kleinen hund sieht die frau .
the woman sees the small dog .
dürfen die hunde den apfel essen ?
may the dogs eat the apple ?
ich helfe der frau , die der hund sucht .
i help the woman for whom the dog looks .
die kinder , denen der mann das buch gebracht hat , kommen .
the children to whom the man brought the book come .
das kind , auf das der mann wartet , lacht .
the child for whom the man waits laughs .
der mann lacht , weil sie die tür aufmacht .
the man laughs because she opens the door .
ich weiß nicht , ob er morgen das bild aussuchen muss .
i do not know whether he has to choose the picture tomorrow .
die frau glaubt , dass die nachbarn sagen , dass die bücher alt sind .
the woman believes that the neighbors say that the books are old .
"""
MADE = [
    statement(clause("kaufen", np("frau", A), acc=np("apfel", A, "rot"))),
    statement(clause("helfen", np("kind", A, "groß"), dat=np("nachbar", THIS))),
    statement(
        clause("folgen", np("katze", plural=True), dat=np("kind", THE, "klein", plural=True))
    ),
    statement(clause("geben", np("schwester"), dat=np("frau", A), acc=np("bild", A, "schön"))),
    statement(clause("ein|schlafen", np("kind", THIS, "müde"), negated=True)),
    statement(clause("an|rufen", ICH, FUTURE, acc=np("nachbar"), time="morgen")),
    statement(
        clause("ein|laden", FRAU, PERFECT, acc=np("kind", plural=True), time="gestern"), "time"
    ),
    statement(clause("weg|werfen", MANN, PERFECT, negated=True, acc=np("stuhl", NO, "neu"))),
    statement(clause("kaufen", MANN, negated=True, acc=np("birne", NO, plural=True))),
    statement(clause("auf|stehen", WIR, MUST, negated=True)),
    statement(clause("sehen", FRAU, acc=np("hund", THE, "klein")), "acc"),
    asks(clause("essen", np("hund", plural=True), MAY, acc=np("apfel"))),
    statement(clause("helfen", ICH, dat=with_relative(clause("suchen", HUND, acc=FRAU), "acc"))),
    statement(
        clause(
            "kommen",
            with_relative(
                clause("bringen", MANN, PERFECT, dat=np("kind", plural=True), acc=BUCH), "dat"
            ),
        )
    ),
    statement(clause("lachen", with_relative(clause("warten", MANN, acc=KIND), "acc"))),
    chain(clause("lachen", MANN), ("weil", clause("auf|machen", SIE, acc=DOOR))),
    chain(
        clause("wissen", ICH, negated=True),
        ("ob", clause("aus|suchen", ER, MUST, acc=np("bild"), time="morgen")),
    ),
    chain(
        clause("glauben", FRAU),
        ("dass", clause("sagen", np("nachbar", plural=True))),
        ("dass", is_(np("buch", plural=True), "alt")),
    ),
]


def test_golden_sentences():
    assert [text for pair in MADE for text in pair] == GOLDEN.splitlines()


def test_relative_clauses_with_two_readings_are_recognised():
    for made, gap, expected in (
        (clause("sehen", FRAU, acc=KIND), "nom", True),  # die frau , die das kind sieht
        (clause("sehen", KIND, acc=FRAU), "acc", True),  # the same words
        (clause("sehen", FRAU, acc=HUND), "nom", False),  # den hund
        (clause("sehen", FRAU, acc=np("kind", plural=True)), "nom", False),  # sieht: singular
        (clause("sehen", FRAU, acc=np("tür")), "nom", False),  # doors do not see
        (clause("sehen", HUND, acc=FRAU), "acc", False),  # der hund
        (clause("warten", FRAU, acc=KIND), "acc", False),  # auf das
        (clause("helfen", FRAU, dat=KIND), "nom", False),  # dem kind
    ):
        assert ambiguous(made, gap) is expected, made


def test_second_readings_are_recognised():
    for german, expected in (
        ("heute hilft der mann der frau .", True),  # of the woman
        ("weil die kinder dieser jungen katze folgen , lache ich .", True),
        ("der mann hilft der frau .", False),
        ("heute hilft er der frau .", False),
        ("heute hilft der mann dem kind .", False),
        ("er zeigt ihr fenster .", True),  # windows to her, her window
        ("er zeigt ihr neue fenster .", False),
        ("der hund schläft , weil er müde ist .", True),  # it
        ("der mann schläft , weil er müde ist .", False),
        ("das kind lacht , weil ich ihm helfe .", True),
        ("die katze kommt , wenn sie schläft .", True),
        ("er sieht den hund .", False),
    ):
        assert doubtful(german) is expected, german


def test_no_pair_has_a_second_reading(pairs, nested):
    assert not any(doubtful(pair.source) for pair in pairs + nested)
    draw = Draw(random.Random(4))
    drawn = [constructions.TRAINING["subordinate"](draw)[0] for _ in range(1000)]
    assert any(doubtful(german) for german in drawn)


@pytest.mark.slow
def test_every_german_sentence_has_one_english_answer():
    draw, answers, repeats = Draw(random.Random(5)), {}, 0
    rules = [*constructions.TRAINING.values(), *constructions.NESTED.values()]
    for _ in range(100_000):
        german, english = draw.pick(rules)(draw)
        repeats += german in answers
        assert answers.setdefault(german, english) == english, german
    assert repeats > 2000


def test_there_are_millions_of_sentences():
    """There are about 4000² / 2 / repeats of one construction, by the birthday rule, or more."""
    draw = Draw(random.Random(6))
    drawn = {constructions.TRAINING["subordinate"](draw)[0] for _ in range(4000)}
    assert len(drawn) > 3995


def test_the_pairs_are_pinned():
    """Python hashes text differently in each process, so the pairs do not depend on it."""
    parts = splits(train=2000, validation=500, test=500, deeper=1000, seed=1)
    lines = ("\t".join(pair) for part in parts for pair in part)
    expected = "73dbe60c9ec93d669a7ba5c4368eada1026f984ccab8543337d3f9d43716c2d1"
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == expected


def test_generate_gives_distinct_sources_and_honours_exclude(pairs):
    assert len({pair.source for pair in pairs}) == len(pairs) == 12_000
    assert generate(100, seed=11) == pairs[:100]
    taken = {pair.source for pair in pairs[:2000]}
    assert not taken & {pair.source for pair in generate(2000, seed=11, exclude=taken)}
    assert generate(0, seed=1) == []


def test_every_construction_occurs_often(pairs, nested):
    for some, names, least in ((pairs, corpus.CONSTRUCTIONS, 400), (nested, DEEPER, 200)):
        counts = Counter(pair.construction for pair in some)
        assert set(counts) == set(names) and min(counts.values()) > least
    assert not set(corpus.CONSTRUCTIONS) & set(DEEPER)


def clauses(german):
    """Counts the subordinate clauses that begin in the sentence, or a few more."""
    words = [",", *german.split()]
    openers = set("weil obwohl wenn dass ob der die das den dem denen auf mit".split())
    return sum(
        previous == "," and word in openers for previous, word in itertools.pairwise(words)
    ) - (words[1] in openers - {"weil", "obwohl", "wenn"})


def test_clauses_tokens_lengths_and_vocabulary(pairs, nested):
    """Deeper sentences have more clauses than any seen in training, of words that are seen."""
    assert max(clauses(pair.source) for pair in pairs) == 1
    assert min(clauses(pair.source) for pair in nested) == 2
    german = {token for pair in pairs for token in pair.source.split()}
    english = {token for pair in pairs for token in pair.target.split()}
    assert 250 < len(german) < 350 and 150 < len(english) < 250
    for pair in pairs + nested:
        for text in (pair.source, pair.target):
            assert re.fullmatch(r"([a-zäöüß]+ |, )+[.?]", text), pair
    for pair in nested:
        assert set(pair.source.split()) <= german and set(pair.target.split()) <= english
    lengths = sorted(len(pair.source.split()) for pair in pairs)
    assert lengths[-1] <= 24 and 8 <= sum(lengths) / len(lengths) <= 12
    assert max(len(pair.target.split()) for pair in pairs) <= 26
    assert max(len(text.split()) for pair in nested for text in pair[:2]) <= 32


def test_splits_are_disjoint_and_held_out_ones_do_not_depend_on_the_training_size():
    small = splits(train=500, validation=200, test=300, deeper=400, seed=3)
    assert [len(part) for part in small] == [500, 200, 300, 400]
    sources = [pair.source for part in small for pair in part]
    assert len(set(sources)) == len(sources)
    assert {pair.construction for pair in small.train} == set(corpus.CONSTRUCTIONS)
    assert {pair.construction for pair in small.deeper} == set(DEEPER)
    large = splits(train=2000, validation=200, test=300, deeper=400, seed=3)
    assert large[1:] == small[1:] and large.train[:500] == small.train


def test_arguments_are_checked():
    for wrong in ((), ("main", "simple")):
        with pytest.raises(ValueError, match=r"constructions: expected some of .*'simple'.* got"):
            generate(1, seed=0, constructions=wrong)
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        generate(-1, seed=0)


def test_a_construction_that_runs_out_says_so(monkeypatch):
    monkeypatch.setitem(constructions.TRAINING, "yes", lambda draw: ("ja .", "yes ."))
    assert [pair.target for pair in generate(1, seed=0, constructions=("yes",))] == ["yes ."]
    with pytest.raises(ValueError, match=r"count: expected at most about 1 for \('yes',\), got 2"):
        generate(2, seed=0, constructions=("yes",))
