"""Reads parallel text: a folder of line-aligned files, or TSV.

The rules of the reader:

- Files are decoded as strict UTF-8 whatever the platform's default is. A byte-order mark is
  removed. Invalid UTF-8 and NUL characters are errors that name file and line.
- A `.gz` file may hold at most `most_unpacked` bytes of text, by default a gibibyte, because a few
  megabytes can unpack to any size. It may hold one line for every 32 of these bytes, because empty
  lines take memory too, but at least 65,536 lines. A line has at most a mebibyte. The reader raises
  an error as soon as a file exceeds one of these limits.
- A line ends at LF and nowhere else; one CR before the LF is dropped. U+2028, U+0085, VT, FS and a
  CR inside a line are ordinary white space, because splitting there would misalign later pairs.
- Two files with unequal numbers of lines are an error. A pair with an empty side is dropped.
- A TSV row has two columns, source TAB target; quote characters are ordinary text. An empty row
  is a pair of two empty sides; any other number of columns is an error.
- Sentences are in Unicode normal form C and have no white space around them.

The `ReadReport` counts everything that is dropped.
"""

import gzip
import hashlib
import math
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from experiments.translation.corpus import Pair


LANGUAGES = ("de", "en")
MOST_UNPACKED = 2**30  # bytes of text in a .gz file

_BYTES_PER_LINE = 32
_LINES_IN_ANY_CASE = 2**16
_LONGEST_LINE = 2**20  # bytes, including the line's end

_UNSEEN = {"Cf", "Zs", "Zl", "Zp"}  # categories of invisible characters, such as zero-width spaces

_BLOCK = 100  # lines in a block of the report on lengths
_HELD_OUT_SHARE = 0.05
_HELD_OUT_MOST = 1000


@dataclass(frozen=True)
class ReadReport:
    """A report on reading one split: counts of pairs, and pairs that may be misaligned.

    Attributes:
        name: the file or files.
        read: pairs of lines read.
        kept: pairs returned.
        empty: pairs dropped because one side or both were empty.
        unusual: pairs returned whose sides differ in length far more than the others. Aligned text
            has few (2 of Multi30k's 29,000); the same text shifted by one line has 3,082.
        unusual_lines: the line numbers of the first unusual pairs, at most five.
        unusual_block: (first line, last line, count) of the block of 100 lines with the most
            unusual pairs, where a temporary shift of the lines would show; None without any.
    """

    name: str
    read: int
    kept: int
    empty: int
    unusual: int
    unusual_lines: tuple[int, ...] = ()
    unusual_block: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        line = (
            f"{self.name}: read {self.read} pairs, kept {self.kept}, "
            f"dropped {self.empty} with an empty side; {self.unusual} of unusual length ratio"
        )
        if self.unusual_block is not None:
            first, last, count = self.unusual_block
            shown = ", ".join(map(str, self.unusual_lines))
            ellipsis = ", ..." if self.unusual > len(self.unusual_lines) else ""
            line += f" (lines {shown}{ellipsis}; most, {count}, in lines {first}-{last})"
        return line


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


class Dataset(NamedTuple):
    """The splits of a dataset, and the report on each by its name. `test` may be empty."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    reports: dict[str, ReadReport]


def read_dataset(
    path: str | Path, *, languages: Sequence[str] = LANGUAGES, most_unpacked: int = MOST_UNPACKED
) -> Dataset:
    """Reads training, validation and, if there is one, test text.

    Args:
        path: a folder with `train`, `val` and perhaps `test`, each as `NAME.SOURCE` and
            `NAME.TARGET` (such as `train.de`, `train.en`) or as `NAME.tsv`, each plain or `.gz`;
            or one TSV file, of which up to a twentieth, at most 1,000 pairs, is held out for
            validation: by a hash of the source sentence, so that equal source sentences are in
            the same split.
        languages: the suffixes of source and target.
        most_unpacked: the greatest number of bytes of text that a `.gz` file may hold.

    Raises:
        FileNotFoundError: a file is missing; the message lists the names that were tried.
        ValueError: the text breaks a rule of this module, or a split has no pairs.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data: expected a folder or a TSV file, found nothing at {path}")
    if not path.is_dir():
        return _read_single(path, most_unpacked)
    options = {"languages": languages, "most_unpacked": most_unpacked}
    train, train_report = read_split(path, "train", **options)
    validation, validation_report = read_split(path, "val", **options)
    reports = {"train": train_report, "validation": validation_report}
    test: list[Pair] = []
    if _has_split(path, "test", languages):
        test, reports["test"] = read_split(path, "test", **options)
    return Dataset(train, validation, test, reports)


def read_split(
    folder: str | Path,
    name: str,
    *,
    languages: Sequence[str] = LANGUAGES,
    most_unpacked: int = MOST_UNPACKED,
) -> tuple[list[Pair], ReadReport]:
    """Reads one split of a folder: `NAME.SOURCE` and `NAME.TARGET`, or `NAME.tsv`; plain or `.gz`.

    Raises:
        FileNotFoundError: the folder has neither form, or only one of the two languages.
        ValueError: the folder has more than one form, or the text breaks a rule of this module.
    """
    folder = Path(folder)
    source, target = _check_languages(languages)
    files = {suffix: _existing(folder, f"{name}.{suffix}") for suffix in (source, target, "tsv")}
    sides = files[source], files[target]
    table = files["tsv"]
    if table is not None:
        if any(sides):
            other = next(side for side in sides if side)
            raise ValueError(f"{table} and {other} both hold the split {name!r}: remove one")
        return read_tsv(table, most_unpacked=most_unpacked)
    if sides[0] is None or sides[1] is None:
        missing = [f"{name}.{end}" for end, file in files.items() if file is None and end != "tsv"]
        or_tsv = "" if any(sides) else f", or {name}.tsv"
        raise FileNotFoundError(
            f"no {' and no '.join(missing)} (plain or .gz){or_tsv}, in {folder}"
        )
    return read_parallel(sides[0], sides[1], most_unpacked=most_unpacked)


def read_parallel(
    source: str | Path, target: str | Path, *, most_unpacked: int = MOST_UNPACKED
) -> tuple[list[Pair], ReadReport]:
    """Reads two files in which line n of one is the translation of line n of the other.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the numbers of lines differ, or a file is not UTF-8 text.
    """
    source, target = Path(source), Path(target)
    left, right = (read_lines(path, most_unpacked=most_unpacked) for path in (source, target))
    if len(left) != len(right):
        raise ValueError(
            f"source and target must have the same number of lines, "
            f"got {len(left)} in {source} and {len(right)} in {target}"
        )
    return _pair_up(f"{source} + {target.name}", zip(left, right, strict=True))


def read_tsv(
    path: str | Path, *, most_unpacked: int = MOST_UNPACKED
) -> tuple[list[Pair], ReadReport]:
    """Reads rows of two columns, source TAB target, without a heading.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a row has another number of columns, or the file is not UTF-8 text.
    """
    path = Path(path)
    return _pair_up(str(path), _columns(path, most_unpacked))


def read_lines(path: str | Path, *, most_unpacked: int = MOST_UNPACKED) -> list[str]:
    """Reads the lines of a plain or gzip file, by the rules of this module.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file has NUL or invalid UTF-8, is a damaged gzip file, or is too large.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.suffix != ".gz":
        with path.open("rb") as file:
            return lines_of(file, str(path))
    try:
        with gzip.open(path, "rb") as file:
            return lines_of(file, str(path), most=most_unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a gzip file, but {error}") from None


def lines_of(file: _Lines, name: str, *, most: float = math.inf) -> list[str]:
    """Reads the lines of an open file, by the rules of this module.

    Raises:
        ValueError: the text has NUL, invalid UTF-8, a line that is too long, more than `most`
            bytes, or more lines than that allows.
    """
    most_lines = max(most // _BYTES_PER_LINE, _LINES_IN_ANY_CASE)
    lines: list[str] = []
    read = 0
    while raw := file.readline(_LONGEST_LINE + 1):
        read += len(raw)
        if read > most:
            raise ValueError(
                f"{name}: it unpacks to more than the limit of {most:,} bytes; "
                "--max-unpacked BYTES raises it"
            )
        if len(lines) >= most_lines:
            raise ValueError(
                f"{name}: it unpacks to more than the limit of {most_lines:,} lines, one for "
                f"{_BYTES_PER_LINE} bytes; --max-unpacked BYTES raises it"
            )
        lines.append(_decoded(raw, name, len(lines) + 1))
    return lines


def _decoded(raw: bytes, name: str, number: int) -> str:
    """Decodes a line without its end and, if it is the first, without its byte-order mark."""
    if len(raw) > _LONGEST_LINE:
        wrong = f"a line of at most {_LONGEST_LINE:,} bytes, got a longer one"
    elif 0 in raw:
        wrong = "UTF-8 text, got a NUL character"
    else:
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            return text.removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            wrong = f"UTF-8 text, got the byte 0x{error.object[error.start]:02x} ({error.reason})"
    raise ValueError(f"{name}:{number}: expected {wrong}")


def _check_languages(languages: Sequence[str]) -> tuple[str, str]:
    if isinstance(languages, str) or len(languages) != 2 or languages[0] == languages[1]:
        raise ValueError(f"languages must be two different suffixes, got {languages!r}")
    return languages[0], languages[1]


def _existing(folder: Path, name: str) -> Path | None:
    files = [file for file in (folder / name, folder / f"{name}.gz") if file.is_file()]
    if len(files) > 1:
        raise ValueError(f"{files[0]} and {files[1]} both exist: remove one")
    return files[0] if files else None


def _has_split(folder: Path, name: str, languages: Sequence[str]) -> bool:
    return any(_existing(folder, f"{name}.{suffix}") for suffix in (*languages, "tsv"))


def _columns(path: Path, most_unpacked: int) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path, most_unpacked=most_unpacked), start=1):
        columns = line.split("\t") if line.strip() else ["", ""]
        if len(columns) != 2:
            raise ValueError(
                f"{path}:{number}: expected 2 columns (source TAB target), got {len(columns)}"
            )
        yield columns[0], columns[1]


def _pair_up(name: str, sides: Iterator[tuple[str, str]]) -> tuple[list[Pair], ReadReport]:
    pairs: list[Pair] = []
    numbers: list[int] = []
    read = 0
    for number, (source, target) in enumerate(sides, start=1):
        read = number
        pair = Pair(clean(source), clean(target), "")
        if pair.source and pair.target:
            pairs.append(pair)
            numbers.append(number)
    if not pairs:
        raise ValueError(f"{name}: expected at least one pair with two sides, got none of {read}")
    unusual = _unusual_lines(pairs, np.asarray(numbers))
    report = ReadReport(
        name=name,
        read=read,
        kept=len(pairs),
        empty=read - len(pairs),
        unusual=len(unusual),
        unusual_lines=tuple(int(line) for line in unusual[:5]),
        unusual_block=_densest_block(unusual, read),
    )
    return pairs, report


def clean(sentence: str) -> str:
    """Returns a sentence in normal form C without surrounding white space, or an empty string if no
    character is visible."""
    # Concatenated files leave byte-order marks at the start of later lines.
    stripped = sentence.strip().lstrip("\ufeff").strip()
    if all(unicodedata.category(character) in _UNSEEN for character in stripped):
        return ""
    return unicodedata.normalize("NFC", stripped)


def _unusual_lines(pairs: Sequence[Pair], numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of the lines whose longer side has more than 2n + 10 characters, if the
    shorter has n, after scaling by the text's median ratio. Characters compare better than words,
    because German has fewer and longer words."""
    lengths = np.array([(len(pair.source), len(pair.target)) for pair in pairs], np.float64)
    lengths[:, 0] *= np.median(lengths[:, 1] / lengths[:, 0])
    return numbers[lengths.max(1) > 2 * lengths.min(1) + 10]


def _densest_block(lines: np.ndarray, read: int) -> tuple[int, int, int] | None:
    if not len(lines):
        return None
    counts = np.bincount((lines - 1) // _BLOCK)
    block = int(counts.argmax())
    return block * _BLOCK + 1, min((block + 1) * _BLOCK, read), int(counts[block])


def _read_single(path: Path, most_unpacked: int) -> Dataset:
    if not path.name.endswith((".tsv", ".tsv.gz")):
        raise ValueError(f"data must be a folder, a .tsv or a .tsv.gz file, got {path}")
    pairs, report = read_tsv(path, most_unpacked=most_unpacked)
    held_out = _held_out(pairs)
    train = [pair for pair in pairs if pair.source not in held_out]
    validation = [pair for pair in pairs if pair.source in held_out]
    if not train or not validation:
        raise ValueError(f"{path}: expected different source sentences, to hold some out, got one")
    return Dataset(train, validation, [], {"train": report})


def _held_out(pairs: Sequence[Pair]) -> set[str]:
    """Chooses the source sentences to hold out, by hash, so that other rows and their order hardly
    change the choice."""
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.source] = counts.get(pair.source, 0) + 1
    max_pairs = max(1, min(_HELD_OUT_MOST, int(_HELD_OUT_SHARE * len(pairs))))
    chosen: set[str] = set()
    taken = 0
    for sentence in sorted(counts, key=lambda s: hashlib.sha256(s.encode("utf-8")).digest()):
        if chosen and taken + counts[sentence] > max_pairs:
            break
        chosen.add(sentence)
        taken += counts[sentence]
    return chosen
