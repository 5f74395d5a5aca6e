"""Reading parallel text: a folder of line-aligned files, or TSV.

What the reader promises:

- A file is bytes, decoded as strict UTF-8 whatever the platform's default is. A byte-order mark is
  removed. Invalid UTF-8 and NUL characters are errors that name file and line.
- A line ends at LF and nowhere else; one CR before the LF is dropped. U+2028, U+0085, VT, FS and a
  CR inside a line are ordinary white space, because splitting there would shift all pairs after it.
- Two files of unequal length are an error. A pair with an empty side is dropped as a pair.
- A TSV row is two columns, source TAB target, and a quote character in it has no meaning. A row
  with nothing in it is a pair of two empty sides; any other number of columns is an error.
- Sentences are in Unicode normal form C and have no white space around them.

Nothing is dropped without being counted in the `ReadReport`.
"""

import gzip
import hashlib
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.translation.corpus import Pair


LANGUAGES = ("de", "en")

_BLOCK = 100  # lines in a block of the report on lengths
_HELD_OUT_SHARE = 0.05
_HELD_OUT_MOST = 1000


@dataclass(frozen=True)
class ReadReport:
    """What became of the lines that were read.

    Attributes:
        name: the file or files.
        read: pairs of lines read.
        kept: pairs returned.
        empty: pairs dropped because one side or both were empty.
        unusual: pairs kept whose sides differ in length far more than the rest. Aligned text has
            few (2 of Multi30k's 29,000); the same text shifted by one line has 3,082.
        unusual_lines: the first of their line numbers, at most five.
        unusual_block: (first line, last line, count) of the block of 100 lines with most of them,
            which is where to look for a shift that later lines make up for; None without any.
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
            more = ", ..." if self.unusual > len(self.unusual_lines) else ""
            line += f" (lines {shown}{more}; most, {count}, in lines {first}-{last})"
        return line


class Dataset(NamedTuple):
    """The splits and, under the same names, what reading them met. `test` may be empty."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    reports: dict[str, ReadReport]


def read_dataset(path: str | Path, *, languages: Sequence[str] = LANGUAGES) -> Dataset:
    """Reads training, validation and, where there is one, test text.

    Args:
        path: a folder with `train`, `val` and perhaps `test`, each as `NAME.SOURCE` and
            `NAME.TARGET` (such as `train.de`, `train.en`) or as `NAME.tsv`, each plain or `.gz`;
            or one TSV file, of which up to a twentieth, at most 1,000 pairs, is held out for
            validation: by a hash of the source sentence, so that a sentence given twice is never
            on both sides.
        languages: the suffixes of source and target.

    Raises:
        FileNotFoundError: a file is missing; the message lists what was looked for.
        ValueError: the text breaks a rule of this module, or a split has no pairs.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data: expected a folder or a TSV file, found nothing at {path}")
    if not path.is_dir():
        return _read_single(path)
    train, train_report = read_split(path, "train", languages=languages)
    validation, validation_report = read_split(path, "val", languages=languages)
    reports = {"train": train_report, "validation": validation_report}
    test: list[Pair] = []
    if _has_split(path, "test", languages):
        test, reports["test"] = read_split(path, "test", languages=languages)
    return Dataset(train, validation, test, reports)


def read_split(
    folder: str | Path, name: str, *, languages: Sequence[str] = LANGUAGES
) -> tuple[list[Pair], ReadReport]:
    """Reads one split of a folder: `NAME.SOURCE` and `NAME.TARGET`, or `NAME.tsv`; plain or `.gz`.

    Raises:
        FileNotFoundError: neither form is there, or only one of the two languages.
        ValueError: more than one form is there, or the text breaks a rule of this module.
    """
    folder = Path(folder)
    source, target = _check_languages(languages)
    found = {suffix: _existing(folder, f"{name}.{suffix}") for suffix in (source, target, "tsv")}
    sides = found[source], found[target]
    table = found["tsv"]
    if table is not None:
        if any(sides):
            other = next(side for side in sides if side)
            raise ValueError(f"{table} and {other} both hold the split {name!r}: remove one")
        return read_tsv(table)
    if sides[0] is None or sides[1] is None:
        wanted = [f"{name}.{end}" for end, file in found.items() if file is None and end != "tsv"]
        or_tsv = "" if any(sides) else f", or {name}.tsv"
        raise FileNotFoundError(f"no {' and no '.join(wanted)} (plain or .gz){or_tsv}, in {folder}")
    return read_parallel(sides[0], sides[1])


def read_parallel(source: str | Path, target: str | Path) -> tuple[list[Pair], ReadReport]:
    """Reads two files of which line n of the one translates line n of the other.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: unequal numbers of lines, or a file that is not UTF-8 text.
    """
    source, target = Path(source), Path(target)
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise ValueError(
            f"source and target must have the same number of lines, "
            f"got {len(left)} in {source} and {len(right)} in {target}"
        )
    return _pair_up(f"{source} + {target.name}", zip(left, right, strict=True))


def read_tsv(path: str | Path) -> tuple[list[Pair], ReadReport]:
    """Reads rows of two columns, source TAB target, without a heading.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a row with another number of columns, or a file that is not UTF-8 text.
    """
    path = Path(path)
    return _pair_up(str(path), _columns(path))


def read_lines(path: str | Path) -> list[str]:
    """The lines of a plain or gzip file, by the rules at the head of this module.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: NUL, invalid UTF-8 or a damaged gzip file.
    """
    path = Path(path)
    return lines_of(_read_bytes(path), str(path))


def lines_of(data: bytes, name: str) -> list[str]:
    """The lines of a text that was read from somewhere, by the rules at the head of this module.

    Raises:
        ValueError: NUL or invalid UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise ValueError(
            f"{name}:{line}: expected UTF-8 text, got the byte 0x{byte:02x} ({error.reason})"
        ) from None
    nul = text.find("\0")
    if nul >= 0:
        line = text.count("\n", 0, nul) + 1
        raise ValueError(f"{name}:{line}: expected UTF-8 text, got a NUL character")
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()  # the end of the last line, not one more line
    return [line.removesuffix("\r") for line in lines]


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path, "rb") as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a gzip file, but {error}") from None


def _check_languages(languages: Sequence[str]) -> tuple[str, str]:
    if isinstance(languages, str) or len(languages) != 2 or languages[0] == languages[1]:
        raise ValueError(f"languages must be two different suffixes, got {languages!r}")
    return languages[0], languages[1]


def _existing(folder: Path, name: str) -> Path | None:
    found = [file for file in (folder / name, folder / f"{name}.gz") if file.is_file()]
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1]} both exist: remove one")
    return found[0] if found else None


def _has_split(folder: Path, name: str, languages: Sequence[str]) -> bool:
    return any(_existing(folder, f"{name}.{suffix}") for suffix in (*languages, "tsv"))


def _columns(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), start=1):
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
    """A sentence as it is trained on: in normal form C, without white space around it."""
    # A mark at the start of a later line is left there by files that were joined.
    return unicodedata.normalize("NFC", sentence.strip().lstrip("\ufeff").strip())


def _unusual_lines(pairs: Sequence[Pair], numbers: np.ndarray) -> np.ndarray:
    """Lines whose longer side has over twice the characters, with ten to spare, after scaling by
    the median ratio of the text. Characters tell more than words: German counts few, long ones."""
    lengths = np.array([(len(pair.source), len(pair.target)) for pair in pairs], np.float64)
    lengths[:, 0] *= np.median(lengths[:, 1] / lengths[:, 0])
    return numbers[lengths.max(1) > 2 * lengths.min(1) + 10]


def _densest_block(lines: np.ndarray, read: int) -> tuple[int, int, int] | None:
    if not len(lines):
        return None
    counts = np.bincount((lines - 1) // _BLOCK)
    block = int(counts.argmax())
    return block * _BLOCK + 1, min((block + 1) * _BLOCK, read), int(counts[block])


def _read_single(path: Path) -> Dataset:
    if not path.name.endswith((".tsv", ".tsv.gz")):
        raise ValueError(f"data must be a folder, a .tsv or a .tsv.gz file, got {path}")
    pairs, report = read_tsv(path)
    held_out = _held_out(pairs)
    train = [pair for pair in pairs if pair.source not in held_out]
    validation = [pair for pair in pairs if pair.source in held_out]
    if not train or not validation:
        raise ValueError(f"{path}: expected different source sentences, to hold some out, got one")
    return Dataset(train, validation, [], {"train": report})


def _held_out(pairs: Sequence[Pair]) -> set[str]:
    """Source sentences to hold out: a choice that other rows and their order do not change much."""
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.source] = counts.get(pair.source, 0) + 1
    most = max(1, min(_HELD_OUT_MOST, int(_HELD_OUT_SHARE * len(pairs))))
    chosen: set[str] = set()
    taken = 0
    for sentence in sorted(counts, key=lambda s: hashlib.sha256(s.encode("utf-8")).digest()):
        if chosen and taken + counts[sentence] > most:
            break
        chosen.add(sentence)
        taken += counts[sentence]
    return chosen
