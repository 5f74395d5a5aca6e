"""How the process of a training reuses memory that it has freed, tested in separate processes."""

import platform
from pathlib import Path

import pytest

from tests.commands import run_python


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PROGRAM = """
import ctypes, re, resource
from experiments.runs.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert keep_freed_memory()
for _ in range(2):
    before = faults()
    block = ctypes.create_string_buffer(b"x" * 2**27)
    taken = faults() - before
    large = re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1]
    del block
print(taken, int(large) * 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's memory")
def test_freed_memory_is_kept_in_large_pages():
    taken, large = map(int, run_python("-c", _PROGRAM, check=True).stdout.split())
    assert taken < 1000  # the second block is where the first was; 2**27 bytes are 32,768 pages
    if _SETTING.exists() and "[never]" not in _SETTING.read_text():
        assert large > 0
