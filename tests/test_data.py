"""Reading, encoding and batching of parallel text: every rule, and that nothing is lost."""

import dataclasses
import functools
import gzip
import io
import itertools
import re
import tracemalloc
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.translation import batches, data, text, words
from experiments.translation.corpus import Pair
from experiments.translation.vocabulary import BOS, EOS, PAD, SPECIALS, UNK, Vocabulary, check_ids
from tests.conftest import expect


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_all(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        write(folder / name, content)


def split(source: str | bytes, target: str | bytes, name: str = "train") -> dict[str, Any]:
    """The files of a split, by their names."""
    return {f"{name}.de": source, f"{name}.en": target}


def read(folder: Path, files: dict[str, Any]) -> tuple[list[tuple[str, str]], data.ReadReport]:
    """The pairs of the training split that these files hold."""
    write_all(folder, files)
    pairs, report = data.read_split(folder, "train")
    return sides(pairs), report


def sides(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


def pairs_of(*sentences: tuple[str, str]) -> list[Pair]:
    return [Pair(source, target, "") for source, target in sentences]


def test_folder_of_parallel_files_with_and_without_gzip(tmp_path):
    write_all(tmp_path, split("ein hund\nzwei\n", "a dog\ntwo\n"))
    write_all(tmp_path, {"val.de.gz": "drei\n", "val.en.gz": "three\n"})
    dataset = data.read_dataset(tmp_path)
    splits = [sides(x) for x in (dataset.train, dataset.validation, dataset.test)]
    assert splits == [[("ein hund", "a dog"), ("zwei", "two")], [("drei", "three")], []]
    assert set(dataset.reports) == {"train", "validation"}
    write(tmp_path / "test.tsv.gz", "vier\tfour\n")
    assert sides(data.read_dataset(tmp_path).test) == [("vier", "four")]

    write(tmp_path / "train.fr", "un\nzwo\n")
    pairs, _ = data.read_split(tmp_path, "train", languages=("en", "fr"))
    assert sides(pairs) == [("a dog", "un"), ("two", "zwo")]
    with pytest.raises(ValueError, match="languages must be two different suffixes"):
        data.read_split(tmp_path, "train", languages=("en", "en"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"^no train\.de and no train\.en .*train\.tsv, in"),
        ({"train.de": "ein\n"}, r"^no train\.en \(plain or \.gz\), in"),
        (split("ein\n", "one\n"), r"^no val\.de and no val\.en"),
        (split("1\n", "1\n") | {"train.de.gz": "2\n"}, r"train\.de and .*train\.de\.gz both exist"),
        (split("1\n", "1\n") | {"train.tsv": "2\t2\n"}, r"train\.tsv and .*train\.de both hold"),
        (split("1\n2\n3\n4\n5\n", "1\n2\n3\n"), r"got 5 in .*train\.de and 3 in .*train\.en"),
        (split("\n\n", "\nB\n"), "expected at least one pair with two sides, got none of 2"),
        (split(b"gut\nsch\xf6n\n", "a\nb\n"), r"train\.de:2: expected UTF-8 .* the byte 0xf6"),
        (split("1\n2\n3\n", "1\n2\na\0b\n"), r"train\.en:3: expected UTF-8 text, got a NUL"),
        *(
            (
                {"train.tsv": f"a\tA\n{row}\nc\tC\n"},
                rf"train\.tsv:2: expected 2 columns \(source TAB target\), got {columns}",
            )
            for row, columns in (("nur eine", 1), ("a\tb\tc", 3), ("a\tb\t", 3))
        ),
    ],
)
def test_files_that_are_missing_ambiguous_or_damaged_are_refused(tmp_path, files, message):
    write_all(tmp_path, files)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.read_dataset(tmp_path)


def test_paths_that_lead_to_no_text_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nowhere"))):
        data.read_dataset(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"other\.de"):
        data.read_parallel(tmp_path / "other.de", tmp_path / "train.en")
    message = r"must be a folder, a \.tsv or a \.tsv\.gz file, got .*csv"
    with pytest.raises(ValueError, match=message):
        data.read_dataset(write(tmp_path / "all.csv", "a,b\n"))


def test_only_a_newline_ends_a_line(tmp_path):
    """Marks of the byte order and carriage returns before it go; text gets the normal form C."""
    for source, target, expected, lines in (
        ("a\nb", "A\nB\n", [("a", "A"), ("b", "B")], 2),
        (b"\xef\xbb\xbfein\nzwei\n", "one\n\ufefftwo\n", [("ein", "one"), ("zwei", "two")], 2),
        ("a b\r\nc\rd\r\ne\r\r\n\r", "A\nC\nE\nF", [("a b", "A"), ("c\rd", "C"), ("e", "E")], 4),
        ("a\tb\n", "A\n", [("a\tb", "A")], 1),
        ("scho\u0308n\n", "½\n", [("sch\xf6n", "½")], 1),
        *(
            (f"a{mark}b\nc\n", "A\nC\n", [(f"a{mark}b", "A"), ("c", "C")], 2)
            for mark in "\u2028\u2029\u0085\x0b\x0c\x1c\x1e"
        ),
    ):
        pairs, report = read(tmp_path, split(source, target))
        assert (pairs, report.read) == (expected, lines)
        for sentence, _ in pairs:
            assert Vocabulary(()).split(sentence) == re.findall("[a-zö]+", sentence)


def test_pairs_with_an_empty_side_are_dropped_as_pairs_and_counted(tmp_path):
    files = split("a\n\nc\n \t\ne\n\n", "A\nB\n\nD\nE\n\u3000\n")
    pairs, report = read(tmp_path, files)
    assert pairs == [("a", "A"), ("e", "E")]
    assert (report.read, report.kept, report.empty) == (6, 2, 4)
    assert "read 6 pairs, kept 2, dropped 4 with an empty side" in str(report)
    assert "\n" not in str(report)


def test_damaged_gzip_and_more_text_than_the_limit_which_can_be_raised_are_refused(tmp_path):
    path, whole = tmp_path / "all.tsv.gz", gzip.compress(b"ein\tone\n" * 50)
    for damaged in (whole[:-9], b"text" + whole):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"all\.tsv\.gz: expected a gzip file, but"):
            data.read_tsv(path)
    write_all(tmp_path, split("eins\n", "one\n", "val"))
    files = {"train.de.gz": "ein hund\n" * 100, "train.en": "the same dog again\n" * 100}
    write_all(tmp_path, files)
    message = r"train\.de\.gz: it unpacks to more than the limit of 899 bytes; --max-unpacked BYTES"
    with pytest.raises(ValueError, match=message):
        data.read_dataset(tmp_path, most_unpacked=899)
    assert len(data.read_dataset(tmp_path, most_unpacked=900).train) == 100
    write(path, "".join(f"{n}\t{n}\n" for n in range(100)))
    with pytest.raises(ValueError, match=r"all\.tsv\.gz: .* more than the limit of 100 bytes"):
        data.read_dataset(path, most_unpacked=100)


def test_a_gzip_bomb_is_refused_in_little_memory(tmp_path):
    """It has long lines, one line, or empty lines."""
    path = tmp_path / "bomb.gz"
    for content, times, most, memory, says in (
        (b"hund " * 200_000 + b"\n", 200, 2**22, 2**24, "more than the limit of 4,194,304 bytes"),
        (b"hund " * 200_000, 200, 2**30, 2**24, ":1: expected a line of at most 1,048,576 bytes"),
        (
            *(b"\n" * 2**22, 8, 2**22, 2**23),
            "more than the limit of 131,072 lines, one for 32 bytes; --max-unpacked BYTES raises",
        ),
    ):
        path.write_bytes(gzip.compress(content) * times)
        assert path.stat().st_size < 2**21
        tracemalloc.start()
        expect(ValueError, says, data.read_lines, path, most_unpacked=most)
        assert tracemalloc.get_traced_memory()[1] < memory
        tracemalloc.stop()


def test_a_line_without_end_is_refused_wherever_it_comes_from(tmp_path):
    few = write(tmp_path / "few.gz", b"\n" * 50_000)
    assert len(data.read_lines(few, most_unpacked=50_000)) == 50_000  # which is no bomb
    most = 2**20
    good = b"a\n" + b"b" * (most - 1) + b"\n"
    assert len(data.read_lines(write(tmp_path / "good", good))[1]) == most - 1
    for name in ("text", "text.gz"):
        path = write(tmp_path / name, good + b"c" * (most + 1))
        with pytest.raises(ValueError, match=rf"{name}:3: expected a line of at most 1,048,576"):
            data.read_lines(path)
    with pytest.raises(ValueError, match=r"stdin:1: expected a line of at most 1,048,576"):
        data.lines_of(io.BytesIO(b"c" * (most + 1)), "stdin")


def test_quotes_in_tsv_have_no_meaning(tmp_path):
    path = write(tmp_path / "train.tsv", '"a\tA\n\nb\tB"\n\tC\nd "\t"D"\n')
    pairs, report = data.read_tsv(path)
    assert sides(pairs) == [('"a', "A"), ("b", 'B"'), ('d "', '"D"')]
    assert (report.read, report.kept, report.empty) == (5, 3, 2)


def test_one_tsv_file_holds_sentences_out_without_leaking(tmp_path):
    rows = [f"satz {n % 150}\tsentence {n}" for n in range(400)]
    path = write(tmp_path / "all.tsv", "\n".join(rows) + "\n")
    dataset = data.read_dataset(path)
    train, validation = sides(dataset.train), sides(dataset.validation)
    assert sorted(train + validation) == sorted(tuple(row.split("\t")) for row in rows)
    assert 1 <= len(validation) <= 20
    assert {source for source, _ in train}.isdisjoint(source for source, _ in validation)
    assert dataset == data.read_dataset(path)
    write(path, "immer\talways\nimmer\tever\n")
    with pytest.raises(ValueError, match="expected different source sentences"):
        data.read_dataset(path)


def test_report_points_at_a_shift_that_later_lines_make_up_for(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 30, 1000).tolist()

    def report_of(source: list[int], target: list[int]) -> data.ReadReport:
        texts = (["wort " * n for n in source], ["word  " * n for n in target])
        return read(tmp_path, split(*map("\n".join, texts)))[1]

    report = report_of(lengths, lengths)
    assert (report.unusual, report.unusual_block) == (0, None)
    report = report_of(lengths, [*lengths[:410], *lengths[411:480], lengths[410], *lengths[480:]])
    assert report.kept == 1000 and report.unusual > 10
    assert report.unusual_block == (401, 500, report.unusual)
    assert all(411 <= line <= 480 for line in report.unusual_lines)
    assert "in lines 401-500" in str(report)
    # Blocks begin at line 1 and end with the file.
    even = [10] * 250
    report = report_of(even, [1 if line in (99, 248, 249) else 10 for line in range(250)])
    assert report.unusual_lines == (100, 249, 250) and report.unusual_block == (201, 250, 2)
    report = report_of(even, [1 if line == 99 else 10 for line in range(250)])
    assert report.unusual_block == (1, 100, 1)


def test_words_and_punctuation():
    split = Vocabulary(()).split
    for sentence, tokens in (
        ("Zwei Männer bei den Büschen.", "zwei männer bei den büschen ."),
        ("Doesn't the man's t-shirt fit?", "does n't the man 's t-shirt fit ?"),
        ("L'homme d’Arras", "l' homme d’ arras"),
        ("Er sagt: „Nein“ (z.B. um 11:27)...", "er sagt : „ nein “ ( z.b. um 11:27 ) ..."),
        ('"Hi," she said -- 10,000 times', '" hi , " she said -- 10,000 times'),
        ("“Hi,” it's 50%; $5 and/or «un»", "“ hi , ” it 's 50 % ; $ 5 and / or « un »"),
        ("Obst- und Gemüse, Messer und -gabel!", "obst- und gemüse , messer und -gabel !"),
        ("हिन्दी में।", "हिन्दी में ।"),
        ("Ende\u2028neu", "ende neu"),
    ):
        assert split(sentence) == tokens.split()
        assert words.join(tokens.split()) == sentence.lower().replace("\u2028", " ")
        # Text that is cut already stays the same, except for an ending that was cut off a word.
        if not {"'", "’"} & set(tokens):
            assert split(tokens) == tokens.split()


@given(st.text())
def test_tokens_keep_every_character_but_white_space_in_any_normal_form(sentence):
    split = Vocabulary((), lower=False).split
    tokens = split(sentence)
    assert "".join(tokens) == "".join(unicodedata.normalize("NFC", sentence).split())
    assert all(tokens) and split(unicodedata.normalize("NFD", sentence)) == tokens


def test_normal_forms_of_umlauts_give_the_same_ids_and_compatible_ones_do_not():
    decomposed = unicodedata.normalize("NFD", "Schöne Grüße")
    assert Vocabulary.build(["schöne Grüße"]).encode(decomposed) == [5, 4, EOS]
    assert Vocabulary((), lower=False).split(decomposed) == ["Schöne", "Grüße"]
    assert Vocabulary(()).split("½ ﬁ") == ["½", "ﬁ"]


def test_vocabulary_is_sorted_by_count_then_spelling():
    vocabulary = Vocabulary.build(["b b c a", "d c a b", "e"], minimum_count=2)
    assert vocabulary.words == ("b", "a", "c")
    assert vocabulary.tokens(range(len(vocabulary))) == "<pad> <unk> <bos> <eos> b a c".split()
    assert vocabulary.encode("c B e a") == [6, 4, UNK, 5, EOS]
    assert vocabulary.unknown("c B e a d") == ["e", "d"]
    with pytest.raises(ValueError, match="minimum_count must be at least 1, got 0"):
        Vocabulary.build([], minimum_count=0)


def test_text_cannot_spell_a_special():
    vocabulary = Vocabulary.build(["a <eos> b <pad>", "<eos> <eos>", "a", "b b a"])
    assert not set(SPECIALS) & set(vocabulary.words)
    ids = vocabulary.encode("a <eos> b")
    assert ids.count(EOS) == 1 and vocabulary.tokens(ids) == "a < eos > b <eos>".split()
    assert Vocabulary(("a", "b")).encode("a <eos> b") == [4, UNK, UNK, UNK, 5, EOS]
    with pytest.raises(ValueError, match="'<eos>' cannot be a word"):
        Vocabulary(("a", "<eos>"))


def test_decode_stops_at_eos_and_leaves_out_padding():
    vocabulary = Vocabulary.build(["b b b a a ."])
    assert vocabulary.decode([BOS, 4, 5, UNK, 6, EOS, 4, PAD]) == "b a <unk>."
    assert vocabulary.decode(np.array([4, PAD, 5], np.int32)) == "b a"
    assert vocabulary.decode([]) == ""
    assert vocabulary.decode(vocabulary.encode("A b.")) == vocabulary.normalize("A  b.") == "a b."


def test_ids_outside_the_vocabulary_are_refused_on_the_host():
    decode = Vocabulary.build(["a b c"]).decode
    for wrong in (-1, -100, 7, 2**31):
        expect(ValueError, f"ids must be in 0..6, got {wrong}", decode, [4, wrong, 5])
        says = f"logits must be in 0..6, got {wrong}"
        expect(ValueError, says, check_ids, np.array([[6, wrong]]), 7, name="logits")
    expect(TypeError, "ids must be integers, got float64", decode, [4.0])
    expect(ValueError, "ids must have the shape [T], got [1, 2]", decode, [[4, 5]])


def test_encoded_pairs_are_checked():
    good = [[4, 3], [3]]
    for source, target, message in (
        *(([[x, 3], [3]], good, r"source ids must be in 0\.\.6") for x in (-1, 7)),
        *((good, [[x, 3], [3]], r"target ids must be in 0\.\.7") for x in (-1, 8)),
        (good, [[3]], r"equally many rows, got \(2, 1, 2\)"),
        (good, [[3], []], "target row 1 is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            text.EncodedPairs(text.Ragged.of(source), text.Ragged.of(target), np.arange(2), 7, 8)


def test_ragged_rows_come_back():
    rows = [[5, 6, 3], [], [3], [7, 3]]
    ragged = text.Ragged.of(rows)
    assert [ragged[place].tolist() for place in range(-4, 4)] == rows + rows
    assert ragged.lengths.tolist() == [3, 0, 1, 2]
    assert ragged.values.dtype == np.int32
    with pytest.raises(IndexError):
        ragged[4]


def test_one_sentence_longer_than_the_maximum():
    encode: Any = functools.partial(Vocabulary.build(["a a a b b c"]).encode, "a b c")
    assert encode(max_length=4) == [4, 5, 6, EOS]
    assert encode(max_length=3, too_long="truncate") == [4, 5, EOS]
    expect(ValueError, "at most 3 tokens | got 4 in 'a b c'", encode, max_length=3)
    expect(ValueError, "max_length must be at least 2, got 1", encode, max_length=1)
    says = "too_long must be 'error' or 'truncate', got 'drop'"
    expect(ValueError, says, encode, too_long="drop")


LONG = pairs_of(("a", "x"), ("a b c", "x"), ("b", "x y z y"), ("c b", "z y"))


def encode(pairs: Any = LONG, words: Any = ("a b c", "x y z"), **options: Any) -> Any:
    return text.encode_pairs(pairs, *(Vocabulary.build([side]) for side in words), **options)


def test_too_long_pairs_are_dropped_as_pairs_and_counted_or_truncated_with_eos():
    counted = ("dropped", "truncated_source", "truncated_target", "source_tokens", "target_tokens")
    for rule, origin, place, ids, counts in (
        ("drop", [0, 3], 1, [6, 5, 3], [2, 0, 0, 5, 5]),
        ("truncate", [0, 1, 2, 3], 2, [4, 5, EOS], [0, 1, 1, 10, 10]),
    ):
        encoded, report = encode(max_length=3, too_long=rule)
        assert encoded.origin.tolist() == origin
        assert encoded.source[1].tolist() == encoded.target[place].tolist() == ids
        assert [getattr(report, name) for name in counted] == counts
        assert (report.pairs, report.kept) == (4, len(origin))
    assert "0 too long and dropped, 1 source and 1 target sides truncated" in str(report)

    for options, message in (
        ({"max_length": 3}, r"pair 1: expected at most 3 tokens .* got 4 in 'a b c'"),
        ({"max_length": 4}, r"pair 2: expected at most 4 tokens .* got 5 in 'x y z y'"),
        ({"too_long": "cut"}, "too_long must be 'drop', 'truncate' or 'error'"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(**{"too_long": "error"} | options)


def test_unknown_words_are_counted_on_each_side():
    encoded, report = encode(pairs_of(("a q b", "x y z")), ("a b", "x"))
    assert encoded.source[0].tolist() == [4, UNK, 5, EOS]
    assert (report.source_unknown, report.source_tokens) == (1, 4)
    assert (report.target_unknown, report.target_tokens) == (2, 4)
    assert "1 of 4 source and 2 of 4 target tokens" in str(report)


def random_pairs(count: int, longest: int, *, seed: int = 0) -> text.EncodedPairs:
    """Pairs whose tokens say pair, side and index; `origin` is not `arange`."""
    random = np.random.default_rng(seed)
    rows = []
    for first in range(4, 4 + 2 * count * longest, longest):
        rows.append([*range(first, first + int(random.integers(0, longest))), EOS])
    size = 4 + 2 * count * longest
    sides = text.Ragged.of(rows[::2]), text.Ragged.of(rows[1::2])
    return text.EncodedPairs(*sides, 10 + 3 * np.arange(count), size, size)


def rows_of(batch: batches.Batch) -> list[tuple[list[int], list[int]]]:
    """Reads the pairs of a batch by loops, and checks lengths, shift and padding."""
    rows = []
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}
    lengths = zip(batch.source_lengths.tolist(), batch.target_lengths.tolist(), strict=True)
    for row, (source, target) in enumerate(lengths):
        assert (source == 0) == (target == 0)
        ends = (batch.source, source), (batch.target_in, target), (batch.target_out, target)
        assert not any(array[row, end:].any() for array, end in ends)
        if source:
            out = batch.target_out[row, :target].tolist()
            assert batch.target_in[row, :target].tolist() == [BOS, *out[:-1]]
            rows.append((batch.source[row, :source].tolist(), out))
    return rows


def expected_rows(pairs: text.EncodedPairs) -> list[tuple[list[int], list[int]]]:
    return [(pairs.source[n].tolist(), pairs.target[n].tolist()) for n in range(len(pairs))]


OPTIONS = [
    {"tokens_per_batch": 200},
    {"tokens_per_batch": 500, "row_multiple": 4},
    {"rows_per_batch": 7},
    {"tokens_per_batch": 10, "max_shapes": 2},
    {"rows_per_batch": 5, "max_shapes": 1, "multiple": 3},
    {"tokens_per_batch": 100_000, "row_multiple": 3},
]


@pytest.mark.parametrize("count", [157, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_no_pair_is_lost_or_shifted_and_shapes_are_few_and_as_promised(options, count):
    pairs = random_pairs(count, 41)
    made = batches.Batches(pairs, **options)
    held_out = list(made.in_order())
    for every in (list(made.epoch(0)), list(made.epoch(1)), [batch for batch, _ in held_out]):
        assert sorted(itertools.chain(*map(rows_of, every))) == sorted(expected_rows(pairs))
        assert len(every) == len(made)
        assert {(*b.source.shape, b.target_in.shape[1]) for b in every} <= {*made.shapes}
    by_origin = {}
    for batch, places in held_out:
        assert ((places == -1) == (batch.source_lengths == 0)).all()
        by_origin |= zip(places[places >= 0].tolist(), rows_of(batch), strict=True)
    assert [by_origin[place] for place in pairs.origin.tolist()] == expected_rows(pairs)
    assert len(made.shapes) <= options.get("max_shapes", 4)
    devices = options.get("row_multiple", 1)
    for shape in made.shapes:
        assert not any(width % options.get("multiple", 8) for width in shape[1:])
        assert shape.rows % devices == 0
        places = shape.rows * max(shape[1:])
        if "tokens_per_batch" in options and shape.rows > devices:
            assert places <= options["tokens_per_batch"]
            whole = shape.rows == -(-count // devices) * devices
            assert whole or (shape.rows + devices) * max(shape[1:]) > options["tokens_per_batch"]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_widths_waste_the_fewest_places(most, seed):
    random = np.random.default_rng(seed)
    lengths = random.choice([3, 7, 8, 9, 16, 17, 31, 32, 33, 40, 55, 64], random.integers(1, 40))
    *candidates, last = range(8, int(lengths.max()) + 8, 8)

    def places(widths):
        return sum(min(w for w in widths if w >= length) for length in lengths.tolist())

    chosen = batches._choose_widths(lengths, 8, most).tolist()
    assert len(chosen) <= most
    others = (itertools.combinations(candidates, count) for count in range(most))
    assert places(chosen) == min(places((*some, last)) for some in itertools.chain(*others))


def test_a_shape_holds_rows_that_narrower_shapes_leave():
    source = text.Ragged.of([[4] * 15 + [3]] * 3 + [[4, 3]] * 2)
    target = text.Ragged.of([[5, 3]] * 3 + [[5] * 22 + [3]] * 2)
    pairs = text.EncodedPairs(source, target, np.arange(5), 6, 6)
    made = batches.Batches(pairs, rows_per_batch=2)
    assert made.shapes == ((2, 16, 8), (2, 16, 24))
    rows = [row for batch in made.epoch(0) for row in rows_of(batch)]
    assert sorted(rows) == sorted(expected_rows(pairs))


def test_batches_of_all_widths_are_mixed_and_at_most_one_has_empty_rows():
    made = batches.Batches(random_pairs(500, 41), tokens_per_batch=300, row_multiple=2)
    assert len(made.shapes) == 4
    epoch = list(made.epoch(0))
    assert sum((batch.source_lengths == 0).any() for batch in epoch) <= 1
    widths = [batch.source.shape[1] for batch in epoch]
    assert sum(a != b for a, b in itertools.pairwise(widths)) > len(made) // 3


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(batches.Batches, tokens_per_batch=200),
        functools.partial(batches.PackedBatches, width=64, rows_per_batch=4),
    ],
)
def test_batches_depend_on_seed_epoch_and_step_alone(make):
    def contents(every: Iterable[Any]) -> list[Any]:
        return [[array.tolist() for array in batch] for batch in every]

    pairs = random_pairs(157, 41)
    made, again = (make(pairs, seed=3) for _ in range(2))
    whole, n = contents(batch for epoch in range(3) for batch in made.epoch(epoch)), len(made)
    for start in (0, 1, n - 1, n):
        assert contents(again.epoch(0, start)) == whole[start:n]
    for done in (0, 5, n, 2 * n + 3):
        rest = itertools.islice(again.from_step(done), len(whole) - done)
        assert contents(rest) == whole[done:]
    firsts = [
        contents([next(make(pairs, seed=seed).epoch(epoch))])
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 7))
    ]
    assert not any(a == b for a, b in itertools.combinations(firsts, 2))


def test_the_order_is_pinned():
    """If it changes, a run that continues from an old checkpoint sees some pairs twice."""
    pairs = random_pairs(12, 5)
    (batch,) = batches.Batches(pairs, rows_per_batch=12, seed=1).epoch(2)
    order = [expected_rows(pairs).index(row) for row in rows_of(batch)]
    assert order == [5, 6, 9, 3, 2, 1, 0, 10, 8, 4, 7, 11]


def test_options_steps_and_pairs_are_checked():
    pairs = random_pairs(3, 4)
    for options, message in (
        ({}, "exactly one of tokens_per_batch and rows_per_batch, got None and None"),
        ({"tokens_per_batch": 9, "rows_per_batch": 9}, "exactly one of tokens_per_batch"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1, got 0"),
        ({"rows_per_batch": 6, "row_multiple": 4}, "positive multiple of 4, got 6"),
        ({"rows_per_batch": 0}, "positive multiple of 1, got 0"),
        ({"rows_per_batch": 1, "row_multiple": 0}, "row_multiple must be at least 1, got 0"),
        ({"rows_per_batch": 1, "max_shapes": 0}, "max_shapes must be at least 1, got 0"),
        ({"rows_per_batch": 1, "multiple": -8}, "multiple must be at least 1, got -8"),
        ({"rows_per_batch": 1, "seed": -1}, "seed must not be negative, got -1"),
        ({"width": 3, "rows_per_batch": 4}, "at least 4, the longest sentence, got 3"),
        ({"width": 4}, "expected exactly one of tokens_per_batch and rows_per_b"),
        ({"width": 0, "rows_per_batch": 4}, "width must be at least 1, got 0"),
    ):
        kind: Any = batches.PackedBatches if "width" in options else batches.Batches
        expect(ValueError, message, kind, pairs, **options)
    made = batches.Batches(pairs, rows_per_batch=1)
    for wrong in ((-1, 0), (0, -1), (0, 4)):
        expect(ValueError, "epoch >= 0 and start in 0..3", made.epoch, *wrong)
    expect(ValueError, "step must not be negative, got -1", made.from_step, -1)
    says, none = "expected at least one pair to batch, got none", random_pairs(0, 4)
    expect(ValueError, says, batches.Batches, none, rows_per_batch=1)


def pairs_in(batch: batches.Packed) -> list[tuple[list[int], list[int]]]:
    """Reads the pairs of a packed batch by their ids, and checks positions and padding."""
    rows = []
    sources, targets = batch.source_segment_ids, batch.target_segment_ids
    places = batch.source_positions, batch.target_positions
    for row in range(len(batch.source)):
        for number in range(max(sources[row].max(), targets[row].max()) + 1):
            (source,), (target,) = (np.nonzero(ids[row] == number) for ids in (sources, targets))
            for side, positions in zip((source, target), places, strict=True):
                np.testing.assert_array_equal(side, np.arange(side[0], side[-1] + 1))
                assert positions[row][side].tolist() == list(range(len(side)))
            said = batch.target_out[row][target].tolist()
            assert batch.target_in[row][target].tolist() == [BOS, *said[:-1]]
            rows.append((batch.source[row][source].tolist(), said))
    assert (batch.source[sources < 0] == PAD).all()
    assert (batch.target_out[targets < 0] == PAD).all()
    assert (batch.target_in[targets < 0] == PAD).all()
    return rows


@pytest.mark.parametrize(
    "options",
    [{"rows_per_batch": 4}, {"tokens_per_batch": 200, "row_multiple": 2}, {"rows_per_batch": 1000}],
)
def test_packed_rows_hold_every_pair_once(options):
    pairs = random_pairs(157, 41)
    made = batches.PackedBatches(pairs, width=50, **options)
    assert made.shapes[0].rows % options.get("row_multiple", 1) == 0
    for epoch in range(2):
        every = list(made.epoch(epoch))
        assert len(every) == len(made)
        assert {(*b.source.shape, b.target_in.shape[1]) for b in every} == set(made.shapes)
        assert sorted(itertools.chain(*map(pairs_in, every))) == sorted(expected_rows(pairs))
        total = sum(int(batches.loss_mask(batch).sum()) for batch in every)
        assert total == len(pairs.target.values)


def test_packed_rows_are_nearly_full():
    drawn = random_pairs(2000, 21)
    pairs = dataclasses.replace(drawn, target=drawn.source)
    rows = len(batches.PackedBatches(pairs, width=64, rows_per_batch=1))
    assert rows * 64 < 1.02 * len(pairs.source.values)
