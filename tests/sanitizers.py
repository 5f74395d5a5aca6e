"""Builds the kernels in C++ with sanitizers and compares them with the formula on random calls.

    python -m tests.sanitizers                  all of it, some minutes
    python -m tests.sanitizers thread 1000      one sanitizer, 1,000 calls of each kernel

Memory runs short in some calls. The exit status is 1 after a finding or a wrong number.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jattn.kernels.cpu.compiler import compiler


SOURCES = Path(__file__).parent / "sanitized"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
TINY, USERS = "16, 8, 16", "64, 128, 1024"
PROGRAMS = [(name, x, TINY) for name in ("attention", "decoding", "linear") for x in (1, 0)]
PROGRAMS.append(("attention", 1, USERS))


def command(
    sanitizer: str, name: str, single: int, tiles: str, program: Path, level: str = "-O1"
) -> list[str]:
    macros = [f"-DJATTN_SINGLE={single}", f"-DJATTN_TILES={tiles}"]
    how = f"-std=c++17 {level} -g -march=native -ffp-contract=fast -pthread -fsanitize={sanitizer}"
    flags = [*how.split(), "-fno-sanitize-recover=all", *macros, f"-I{SOURCES}"]
    return [*compiler(), *flags, str(SOURCES / f"{name}.cc"), "-o", str(program)]


def runs(
    sanitizer: str, calls: int, programs: list | None = None, level: str = "-O1"
) -> Iterator[tuple[str, bool]]:
    """Yields what each program printed, and whether it succeeded."""
    with tempfile.TemporaryDirectory(prefix="jattn-sanitizers-") as folder:
        program = Path(folder) / "program"
        for name, single, tiles in programs or PROGRAMS:
            how = SANITIZERS[sanitizer], name, single, tiles, program, level
            subprocess.run(command(*how), check=True)
            # The tiles of users need larger calls, which take longer.
            count = calls if tiles == TINY else max(1, calls // 20)
            # `setarch -R` turns off address randomisation: the thread sanitizer may fail with it.
            ran = subprocess.run(
                ["setarch", "-R", program, str(count)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
            )
            label = f"{sanitizer}: {name}, {'float' if single else 'double'}, tiles of {tiles}"
            yield f"{label}: {(ran.stdout + ran.stderr).strip()}", ran.returncode == 0


def main() -> int:
    """Prints what the sanitizers find."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("sanitizer", nargs="?", choices=[*SANITIZERS, "all"], default="all")
    parser.add_argument("calls", nargs="?", type=int, default=300)
    arguments = parser.parse_args()
    well = True
    for sanitizer in SANITIZERS if arguments.sanitizer == "all" else [arguments.sanitizer]:
        for said, fine in runs(sanitizer, arguments.calls):
            print(said, flush=True)
            well &= fine
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
