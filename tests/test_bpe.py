"""Byte-pair encoding: round trips, unknown characters, deterministic merges, checks of the file."""

import dataclasses
import functools
import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.translation import text
from experiments.translation.corpus import Pair, splits
from experiments.translation.presets import PRESETS
from experiments.translation.runs import fingerprint
from experiments.translation.vocabulary import EOS, SPECIALS, UNK, Vocabulary, learn_vocabularies


TRAINING = (
    "der alte hund schläft, der alte hund bellt.",
    "die alte katze schläft und der hund bellt nicht!",
    "wann schläft der alte hund? um 11:27.",
)
SEEN = sorted(set("".join(TRAINING)))


@functools.cache
def learned(size: int = 80, **options) -> Vocabulary:
    return Vocabulary.learn_bpe(TRAINING, size=size, **options)


@given(st.text(SEEN))
@example("")
def test_text_of_characters_that_were_seen_comes_back(sentence):
    vocabulary = learned()
    ids = vocabulary.encode(sentence)
    assert ids[-1] == EOS and (len(ids) > 1) == (sentence != "")
    assert UNK not in ids and vocabulary.unknown(sentence) == []
    assert vocabulary.decode(ids) == vocabulary.normalize(sentence) == sentence


@given(st.text())
def test_joined_tokens_of_any_text_are_the_text(sentence):
    vocabulary = learned(64, lower=False)
    tokens = vocabulary.split(sentence)
    assert all(tokens)
    assert vocabulary.join(tokens) == unicodedata.normalize("NFC", sentence)
    assert vocabulary.split(unicodedata.normalize("NFD", sentence)) == tokens


def test_case_is_kept_only_on_request():
    sentences = ["Der Hund BELLT", "Äpfel"]
    cased = Vocabulary.learn_bpe(sentences, size=40, lower=False)
    assert cased.decode(cased.encode("Der Hund")) == "Der Hund"
    lowered = Vocabulary.learn_bpe(sentences, size=40)
    assert lowered.decode(lowered.encode("DER HUND")) == lowered.normalize("Der Hund") == "der hund"
    assert not any(word != word.lower() for word in lowered.words)


def test_frequent_words_are_one_token_and_rare_ones_several():
    vocabulary = learned(120, minimum_count=2)
    pieces = vocabulary.tokens(vocabulary.encode("der alte wann"))
    assert pieces[:2] == [" der", " alte"] and len(pieces) > 4
    assert "".join(pieces[2:-1]) == " wann"


def test_merges_cross_neither_spaces_nor_marks():
    for word in Vocabulary.learn_bpe(["der hund, der hund, 10 10"] * 9, size=60).words:
        inner = word.removeprefix(" ")
        assert " " not in inner
        assert inner == "" or inner.isalpha() or inner.isdecimal() or inner == ","


def test_unknown_characters_are_the_unknown_token_and_are_named():
    vocabulary = learned()
    ids = vocabulary.encode("der ☃☃ hund 😀")
    assert ids.count(UNK) == 3
    assert vocabulary.unknown("der ☃☃ hund 😀") == ["☃", "☃", "😀"]
    assert vocabulary.decode(ids) == "der <unk><unk> hund <unk>"
    assert vocabulary.normalize("der ☃ hund") == "der ☃ hund"
    _, report = text.encode_pairs([Pair("der ☃", "hund", "")], vocabulary, vocabulary)
    assert (report.source_unknown, report.target_unknown) == (1, 0)


def test_text_cannot_spell_a_special():
    for special in SPECIALS:
        vocabulary = Vocabulary.learn_bpe([f"a {special} b {special}{special}"] * 50, size=60)
        assert not set(SPECIALS) & set(vocabulary.words)
        ids = vocabulary.encode(f"b {special} a")
        assert [token for token in ids if token < len(SPECIALS)] == [EOS]
        assert vocabulary.decode(ids) == f"b {special} a"


def test_a_vocabulary_has_every_character_and_at_most_size_tokens():
    for size in (40, 60, 500):
        vocabulary = learned(size)
        assert len(vocabulary) <= size
        assert {" ", *SEEN} <= set(vocabulary.words)
    assert len(learned(40)) == 40 and len(learned(500)) < 200
    characters = len({" ", *SEEN})
    with pytest.raises(ValueError, match=f"at least {characters + 4}, for {characters} .* got 12"):
        learned(12)
    assert len(learned(500, minimum_count=2)) < len(learned(500))  # rare pairs are not merged


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("words", "780ce1946336d1784f2f1a630ccd6e27ffecaba1b71b7a560ee30918f00ae7c9"),
        ("bpe", "a59251615290a366a2d8ac7f39332ca01f1e3b8b044fb94b7841a04f3aba2be4"),
    ],
)
def test_the_ids_of_a_text_are_pinned(kind, expected):
    """Runs of earlier versions of the library can be resumed. The ids do not depend on Python's
    hashes of text either, which differ in each process."""
    pairs = [
        Pair(f"{source.capitalize()} Don't!", f"The girl's «t-shirt»: 10,000 → {target}", "")
        for source, target, _ in splits(train=2000, validation=1, test=1, deeper=1, seed=0).train
    ]
    config = dataclasses.replace(
        PRESETS["tiny"], tokenizer=kind, vocabulary_size=400, joint_vocabulary=kind == "bpe"
    )
    encoded, _ = text.encode_pairs(pairs, *learn_vocabularies(config, pairs))
    assert fingerprint(encoded) == expected


def test_vocabularies_by_configuration():
    pairs = [Pair("der hund", "the dog", ""), Pair("das boot", "the boat", "")]

    def learn(pairs: list[Pair] = pairs, **changes: Any) -> tuple[Vocabulary, Vocabulary]:
        return learn_vocabularies(dataclasses.replace(PRESETS["tiny"], **changes), pairs)

    sentences = ["der hund", "das boot"], ["the dog", "the boat"]
    assert learn() == tuple(map(Vocabulary.build, sentences))
    assert learn(vocabulary_size=6)[1].words == ("the", "boat")
    assert learn([Pair("Der", "The", "")], lower=False)[0].words == ("Der",)
    for kind in ("words", "bpe"):
        source, target = learn(tokenizer=kind, vocabulary_size=40)
        assert source != target
        source, target = learn(tokenizer=kind, vocabulary_size=40, joint_vocabulary=True)
        assert source == target and not source.unknown("der dog")
    source, _ = learn(tokenizer="bpe", vocabulary_size=40, minimum_count=2)
    assert source.merges == ((" ", "d"),)


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_round_trip_through_json(kind):
    sentences = ['Ein "Wort", ja: ü', *TRAINING]
    vocabulary = Vocabulary.build(sentences) if kind == "words" else learned(lower=False)
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again == vocabulary
    assert again.encode("der hund bellt") == vocabulary.encode("der hund bellt")
    assert vocabulary.to_json().isascii()


SPECIAL_IDS = {special: place for place, special in enumerate(SPECIALS)}
WORDS, MERGES = (" ", "a", "b", "ab", " ab"), (("a", "b"), (" ", "ab"))
OTHERS = "expected the words that its merges make"
UNKNOWN = "expected two tokens known before it"


def test_an_invalid_vocabulary_is_refused_in_one_line():
    assert len(Vocabulary(WORDS, MERGES)) == 9
    for words, merges, says in (
        ((" ", "a", "b", "ab"), MERGES, OTHERS),
        ((" ", "a", "b", " ab", "ab"), MERGES, OTHERS),
        ((*WORDS, "x"), MERGES, OTHERS),
        ((*WORDS, "ba"), MERGES, OTHERS),
        (WORDS, (("a", "x"),), f"merge 1: {UNKNOWN}, got ['a', 'x']"),
        (WORDS, (("a", "b"), ("ba", "a")), f"merge 2: {UNKNOWN}"),
        (WORDS, (("a",),), f"merge 1: {UNKNOWN}"),
        (WORDS, (("a", 3),), f"merge 1: {UNKNOWN}"),
        (WORDS, ((["a"], "b"),), f"merge 1: {UNKNOWN}"),
        ((" ", "a") * 40, tuple(("a" * 2**n,) * 2 for n in range(8)), "expected different words"),
        (("a", "b", "ab"), MERGES, "expected a space among the characters"),
        ((" ", "a", "b", "a"), MERGES, "expected different words, got 'a' twice"),
        ((" ", "a", "\ud800"), MERGES, "words must be Unicode text"),
        (("a", "b", "a"), (), "expected different words, got 'a' twice"),
        (("<pad>",), (), "'<pad>' cannot be a word"),
        (("",), (), "'' cannot be a word"),
        (("a", 3), (), "3 cannot be a word"),
    ):
        assert_refused(says, Vocabulary, words, merges)


def assert_refused(says: str, make: Any, *arguments: Any) -> None:
    with pytest.raises(ValueError, match=f"^vocabulary: .*{re.escape(says)}") as error:
        make(*arguments)
    assert "\n" not in str(error.value)


def changed(good: Vocabulary, model: dict[str, Any], **parts: Any) -> str:
    """The file of a vocabulary with other fields of its model, and other parts."""
    content = json.loads(good.to_json())
    return json.dumps(content | {"model": content["model"] | model} | parts)


WITH_MERGES, ONE_WORD = Vocabulary(WORDS, MERGES), Vocabulary(("a",))
MODELS_WITH_MERGES = [
    *({"merges": [["a", "b"], *more]} for more in ([], [["ab", " "]], [" ab"], [[["a"], "b"]])),
    *({"merges": wrong} for wrong in ([3], 3, None, {})),
    {"vocab": SPECIAL_IDS | {" ": 4}},
    *({"type": kind} for kind in ("Unigram", "WordLevel")),
    {"dropout": 0.5},
    {"unk_token": " "},
    {"ignore_merges": True},
]
MODELS_OF_WORDS = [
    *({"vocab": SPECIAL_IDS | words} for words in ({"a": 5}, {"a": 4, "b": 4})),
    *({"vocab": vocab} for vocab in ({"a": 0}, {}, [])),
    {"unk_token": "a"},
    {"type": "os.system"},
]
PARTS = ("pre_tokenizer", "normalizer", "post_processor")


def test_a_damaged_file_is_refused_in_one_line():
    for good in (WITH_MERGES, ONE_WORD):
        assert Vocabulary.from_json(changed(good, {})) == good
    for content, says in (
        *((changed(WITH_MERGES, model), "") for model in MODELS_WITH_MERGES),
        *((changed(ONE_WORD, model), "what training writes") for model in MODELS_OF_WORDS),
        *((changed(ONE_WORD, {}, **{part: None}), "what training writes") for part in PARTS),
        *((content, "expected") for content in ("", "{", "[]", "3", "[" * 100_000)),
    ):
        assert_refused(says, Vocabulary.from_json, content)
