"""The library of the kernel in C++: a process survives and computes right numbers however the
library is built, damaged or planted, and whatever the compiler and the disk do."""

import errno
import importlib.util
import io
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jattn
from jattn import build, tuning
from jattn.kernels.cpu import compiler, library
from tests import sanitizers
from tests import test_contract as contract
from tests.cases import CASES, inputs
from tests.commands import ROOT, full_after, run, script
from tests.test_contract import attend, on_device


COMPILER = os.environ.get("CXX", "c++")

CALL = """
import jax, jax.numpy as jnp, numpy as np, jattn
x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 8)), jnp.float32)
want = jattn.attention(x, x, x, implementation="reference")
assert np.allclose(jattn.attention(x, x, x), want, atol=1e-5, rtol=0)
print(jattn.explain(x, x, x)["native"])
"""
"""Checks the default implementation, and prints the reason for which the kernel is not it."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> str:
    """A compiler without optimisations, which writes its arguments into `log`, and compiles what it
    has compiled before by a copy."""
    folder = tmp_path_factory.mktemp("compiler")
    text = f"""\
echo "$*" >> {folder}/log
case "$*" in *-dM*) exec {COMPILER} "$@" -O0;; esac
for to; do :; done
from=${{to%/*}}
copy={folder}/$( (echo "$*" | sed "s|$from||g"; cat $from/*.cc) | cksum | tr ' ' -)
[ -e $copy ] || {{ {COMPILER} "$@" -O0 -o $copy.new && mv $copy.new $copy; }} && cp $copy $to
"""
    return script(folder / "c++", text)


def process(code: str, home: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with its cache folder and temporary files below `home`."""
    temporary = home / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(home), "TMPDIR": str(temporary), "CXX": compiler}
    environment["NPROC"] = "4"
    return run(sys.executable, "-c", code, env=environment, cwd=ROOT, timeout=240)


def said(code: str, home: Path, compiler: str) -> str:
    """Returns what a process printed, which has to end well and to leave no file behind."""
    done = process(code, home, compiler)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert list((home / "temporary").iterdir()) == []
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory, quick) -> Path:
    """A folder with the library that `CALL` needs."""
    home = tmp_path_factory.mktemp("built")
    assert said(CALL, home, quick) == "None"
    return home


def copied(built: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of that folder, and the library in it."""
    home = tmp_path / "home"
    shutil.copytree(built, home)
    (library,) = (home / "jattn").glob("*.so")
    return home, library


PLANTED = '#include <cstdio>\nstatic int run = (fclose(fopen("{mark}", "w")), 0);\n'


@pytest.mark.slow
def test_a_library_that_other_users_may_have_written_is_not_executed(built, quick, tmp_path):
    """It is built again, although the checksum is right."""
    (home, library), mark = copied(built, tmp_path), tmp_path / "mark"
    contents = compiled_to(tmp_path / "x.so", PLANTED.format(mark=mark)).read_bytes()
    library.write_bytes(contents + compiler._checksum(library.name, contents))
    library.parent.chmod(0o777)
    assert said(CALL, home, quick) == "None"
    assert not mark.exists()
    assert [x.name for x in library.parent.glob("*.so")] == [library.name]


def test_only_what_is_whole_and_safe_is_read(tmp_path):
    """Every byte and the name are checked; links and files that others may write are not read."""
    library, contents = tmp_path / "x.so", bytes(range(256))
    assert compiler._keep(library, contents) and compiler._read(library) == contents
    whole = library.read_bytes()
    assert whole.startswith(contents)
    for place in (0, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        library.write_bytes(changed)
        assert compiler._read(library) is None, place
    library.write_bytes(whole)
    assert compiler._read(library.rename(library.with_name("other.so"))) is None
    library.write_bytes(whole)
    assert compiler._read(library) == contents
    for mode in (0o666, 0o664, 0o646):
        library.chmod(mode)
        assert compiler._read(library) is None, mode
    library.chmod(0o644)
    moved = library.rename(tmp_path / "moved.so")
    library.symlink_to(moved)
    os.mkfifo(tmp_path / "pipe")
    for path in (library, tmp_path, tmp_path / "pipe"):
        assert compiler._read(path) is None
    moved.rename(library)
    assert compiler._read(library) == contents
    give_away(library)
    assert compiler._read(library) is None


@pytest.mark.parametrize("damage", ["empty", "writable by others", "link"])
def test_a_text_that_is_not_read_is_written_again(damage, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.cache_text("rule.txt", "text")
    path = tmp_path / "jattn" / "rule.txt"
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "link":
        path.symlink_to(path.rename(path.with_name("moved.txt")))
    else:
        path.chmod(0o664)
    assert compiler.cached_text("rule.txt") is None
    compiler.cache_text("rule.txt", "text")
    assert compiler.cached_text("rule.txt") == "text"


def compiled_to(path: Path, text: str) -> Path:
    path.with_suffix(".cc").write_text(text)
    words = [*COMPILER.split(), "-shared", "-fPIC", str(path.with_suffix(".cc")), "-o", str(path)]
    subprocess.run(words, check=True)
    return path


def test_temporary_files_lie_where_nobody_can_replace_them(monkeypatch, tmp_path):
    (private := tmp_path / "own").mkdir()
    (shared := tmp_path / "shared").mkdir()
    for mode, safe in ((0o777, False), (0o1777, True), (0o755, True)):
        shared.chmod(mode)
        monkeypatch.setattr(compiler.tempfile, "tempdir", str(shared))
        chosen = compiler._in_private_folder(lambda path: path.parent.parent, private)
        assert chosen == (shared if safe else private)
    shared.chmod(0o777)
    with pytest.raises(OSError, match="no folder for temporary files"):
        compiler._in_private_folder(lambda path: path, None)


ANOTHER = 65534  # a user


def folders(tmp_path: Path) -> Path:
    """Folders `top/middle/end` of this user."""
    end = tmp_path / "top" / "middle" / "end"
    end.mkdir(parents=True)
    return end


def give_away(path: Path, mode: int | None = None) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
    if mode is not None:
        path.chmod(mode)


@pytest.mark.parametrize("place", ["end", "middle", "top"])
@pytest.mark.parametrize(
    ("theirs", "mode"),
    [(True, x) for x in (0o755, 0o700, 0o1777, 0o777)]
    + [(False, x) for x in (0o775, 0o757, 0o777, 0o1777, 0o1775)],
)
def test_a_folder_that_others_may_replace_is_not_trusted_nor_what_is_in_it(
    tmp_path, place, theirs, mode
):
    """Others may write in a folder of this user if it is sticky."""
    end = folders(tmp_path)
    folder = next(x for x in (end, *end.parents) if x.name == place)
    folder.chmod(mode)
    if theirs:
        give_away(folder)
    if mode & 0o1000 and not theirs:
        assert compiler._trusted(end) == end
    else:
        with pytest.raises(PermissionError, match=f"others may replace .*{place}"):
            compiler._trusted(end)


def test_links_are_trusted_where_only_this_user_can_have_made_them(tmp_path):
    end = folders(tmp_path)
    (first := tmp_path / "first").symlink_to("second/../second/middle")
    (second := tmp_path / "second").symlink_to(tmp_path / "top")
    assert compiler._trusted(first / "end") == end
    assert compiler._trusted(tmp_path / "second" / ".." / "top") == tmp_path / "top"
    (circle := tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="too many links"):
        compiler._trusted(circle)
    (dangling := tmp_path / "dangling").symlink_to("made/by the way")
    assert compiler._trusted(dangling) == tmp_path / "made" / "by the way"
    (public := tmp_path / "public").mkdir()
    (public / "link").symlink_to(end)
    (long := tmp_path / "long").symlink_to(public / "link")
    assert compiler._trusted(long) == end
    public.chmod(0o777)
    with pytest.raises(PermissionError, match="public"):
        compiler._trusted(long)
    public.chmod(0o1777)
    assert compiler._trusted(long) == end
    give_away(public / "link")
    with pytest.raises(PermissionError, match="link"):
        compiler._trusted(long)
    give_away(second)
    with pytest.raises(PermissionError, match="second"):
        compiler._trusted(first)


@pytest.fixture
def no_umask() -> Iterator[None]:
    umask = os.umask(0)
    yield
    os.umask(umask)


@pytest.mark.usefixtures("no_umask")
def test_nothing_is_made_in_folders_of_others(tmp_path, monkeypatch):
    """New folders may be read by other users, whatever the umask, and written by none."""
    made = compiler._trusted(tmp_path / "a" / "b")
    assert [x.stat().st_mode & 0o777 for x in (made, made.parent)] == [0o755] * 2
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        compiler._trusted(tmp_path / "file" / "x")
    give_away(made, 0o1777)
    with pytest.raises(PermissionError):
        compiler._trusted(made / "c")
    assert list(made.iterdir()) == []
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(made))
        assert compiler._folder() is None
        monkeypatch.delenv(name)
    assert list(made.iterdir()) == []


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("mode", [0o1777, 0o755])
@pytest.mark.parametrize("is_below", [False, True])
def test_temporary_files_do_not_lie_in_folders_of_others(quick, tmp_path, mode, is_below):
    """Neither ours nor the compiler's files, because the folder's owner could replace them."""
    (theirs := tmp_path / "temporary").mkdir()
    ours = theirs / "ours"
    ours.mkdir()
    give_away(theirs, mode)
    log = tmp_path / "log"
    spy = script(tmp_path / "c++", f'echo "$TMPDIR $*" >> {log}\nexec {quick} "$@"')
    code = (
        f"import tempfile; tempfile.tempdir = {str(ours if is_below else theirs)!r}\n"
        "from jattn.kernels.cpu import library\n"
        "print(library.unavailable('decode', 'float32', wait=True))"
    )
    done = process(code, tmp_path, spy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
    assert str(theirs) not in log.read_text()
    assert list(theirs.iterdir()) == [ours] and list(ours.iterdir()) == []


@pytest.mark.usefixtures("no_umask")
def test_who_has_no_home_has_a_kernel(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home directory")))
    assert compiler._folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert compiler._folder() == tmp_path / "jattn"


def test_a_kept_file_is_on_the_disk_before_it_has_its_name(monkeypatch, tmp_path):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(list(tmp_path.glob("*.so"))))
    assert compiler._keep(tmp_path / "x.so", b"contents")
    assert synced == [[]]
    assert compiler._read(tmp_path / "x.so") == b"contents"

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    assert not compiler._keep(tmp_path / "y.so", b"contents")
    assert [x.name for x in tmp_path.iterdir()] == ["x.so"]


_sizes = itertools.count(2)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and no library that is loaded or built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # XLA keeps a function's name, which contains the sizes of tiles, until the process ends.
    monkeypatch.setattr(library, "_libraries", {})
    with tuning.using(cpu_tiles=f"16, 8, {16 * next(_sizes)}"):
        yield tmp_path / "jattn"


def reason() -> Any:
    """The reason for which the kernel does not run; None if it runs."""
    x = on_device(inputs(CASES["causal"], "float32"))
    return jattn.explain(x.q, x.k, x.v)["native"]


def attend_causally(implementation: Any) -> Any:
    return attend(implementation, CASES["causal"], on_device(inputs(CASES["causal"], "float32")))


def check_that_blockwise_runs() -> None:
    contract.assert_same(attend_causally(None), attend_causally("blockwise"))


ANSWERS = 'case "$*" in *-dM*) exit 0;; esac\n'
FAILING = {
    "no such": ("/no/such compiler", "there is no C++ compiler: /no/such not found"),
    "odd words": ("'", "No closing quotation"),
    "of the machine": (ANSWERS + "echo 'x: error: no' >&2; exit 3", "failed: x: error: no"),
    "of few words": (ANSWERS + "echo no >&2; exit 3", "failed: no"),
    "silent": (ANSWERS + "exit 3", "failed: exit status 3"),
    "killed": (ANSWERS + "kill -9 $$", "failed: exit status -9"),
    "not UTF-8": (ANSWERS + r"printf 'error: \374\n' >&2; exit 1", "failed: error: �"),
    "writes nothing": ("exit 0", "wrote no library"),
    "writes anything": (ANSWERS + 'for to; do :; done; echo anything > "$to"', "cannot be loaded"),
}
ENDING = "#include <cstdlib>\n__attribute__((constructor)) static void end() { exit(0); }\n"
LACKING = {
    "without one function": 'extern "C" void jattn_forward() {}',
    "without its functions": "",
    "that ends the process": ENDING,
    "that ends the process at once": ENDING.replace("exit(0)", "_Exit(0)"),
    "cut short": "extern const int numbers[100000] = {1};",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [*LACKING, *FAILING])
def test_a_compiler_that_fails_says_why(fresh, monkeypatch, tmp_path, kind):
    """The compiler is called once in a process; blockwise runs, and the named kernel raises.

    Another process has to find all functions in a library before this process loads it.
    """
    if kind in FAILING:
        text, expected = FAILING[kind]
    else:
        lacking = compiled_to(tmp_path / "x.so", LACKING[kind])
        if kind == "cut short":  # which would kill the process
            lacking.write_bytes(lacking.read_bytes()[:30_000])
        text = ANSWERS + f'for to; do :; done; cp {lacking} "$to"'
        expected = "cannot be loaded"
    (count := tmp_path / "count").touch()
    if "no such" not in kind and "odd" not in kind:
        text = script(tmp_path / "compiler", f"echo >> {count}\n{text}")
    monkeypatch.setenv("CXX", text)
    assert expected in reason()
    calls = count.read_text()
    with pytest.raises(NotImplementedError, match="'native': "):
        attend_causally("native")
    check_that_blockwise_runs()
    assert reason()
    assert count.read_text() == calls
    assert list(fresh.glob("*")) == []


@pytest.mark.slow
def test_on_a_full_disk_blockwise_runs(fresh, monkeypatch, quick):
    monkeypatch.setenv("CXX", quick)
    with full_after(20_000):
        assert reason()
    check_that_blockwise_runs()
    assert list(fresh.glob("*")) == []


def test_a_machine_without_a_compiler_is_told_once(fresh, monkeypatch, tmp_path, caplog):
    """The message, which is not given on import, says what it costs and how to get a compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiler._tell_once.cache_clear()
    library.load_cached()
    assert not caplog.messages
    for _ in range(2):
        assert "there is no C++ compiler: c++ and g++ and clang++ not found" in reason()
        library._libraries.clear()
    (message,) = caplog.messages
    assert "1.7 times as long" in message and 'pip install "jattn[compiler]"' in message


def test_the_compiler_of_a_package_is_found(fresh, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    package = types.SimpleNamespace(origin=str(tmp_path / "ziglang" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"ziglang": package}.get)
    assert compiler.compiler() == [str(tmp_path / "ziglang" / "zig"), "c++"]
    monkeypatch.setenv("PATH", path)
    assert Path(compiler.compiler()[0]).name == "c++"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), ValueError()], ids=repr)
@pytest.mark.parametrize("function", ["load", "start"])
def test_whatever_else_goes_wrong_is_a_reason(fresh, monkeypatch, error, function):
    owner = compiler if function == "load" else library.threading.Thread
    monkeypatch.setattr(owner, function, mock.Mock(side_effect=error))
    assert reason() == (str(error) or repr(error))


def test_a_compiler_may_be_several_words(monkeypatch, tmp_path, quick):
    """Compilers that differ build libraries that differ."""
    wrapper, names = script(tmp_path / "my cache", 'exec "$@"'), set()
    for words in (quick, f"{quick} -O1", f"env {quick}", f"'{wrapper}' {quick} -g0"):
        monkeypatch.setenv("CXX", words)
        command = compiler.compiler()
        assert Path(command[0]).is_absolute()
        assert "2" in compiler._run([*command, "-dM", "-E", "-x", "c++", os.devnull])
        flags = compiler._flags("float32", tuning.current().cpu_tiles)
        names.add(compiler._digest([*command, *flags], ["text"]))
    assert len(names) == 4


def test_a_compiler_that_hangs_is_ended(fresh, monkeypatch, tmp_path):
    """The processes that it has started are ended too."""
    pid = tmp_path / "pid"
    hanging = script(tmp_path / "compiler", f"sleep 1000 & echo $! > {pid}; wait")
    monkeypatch.setenv("CXX", hanging)
    monkeypatch.setattr(compiler, "LIMIT", 0.5)
    assert reason() == f"{hanging} did not end within 0.5 s"
    check_that_blockwise_runs()
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or " Z " in state.read_text()


@pytest.mark.parametrize("how", ["", "setsid "])
def test_what_a_compiler_leaves_behind_is_not_waited_for(monkeypatch, tmp_path, how):
    """A server, for example, that keeps the compiler's output open."""
    pid = tmp_path / "pid"
    busy = script(tmp_path / "c++", f"{how}sleep 1000 & echo $! > {pid}\necho said; echo x >&2")
    began = time.monotonic()
    try:
        assert compiler._run([busy]) == "said\n"
        assert time.monotonic() - began < 10
    finally:
        subprocess.run(["kill", "-9", pid.read_text().strip()], capture_output=True, check=False)


FORKED = """
import os, sys, threading, time
from pathlib import Path
from jattn.kernels.cpu import compiler, library
home = Path(os.environ["XDG_CACHE_HOME"])
def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
"""

FORK_WHILE_A_LIBRARY_IS_BUILT = """
library._library("decode", "float32")
wait_for(home / "began")
read, write = os.pipe()
if os.fork():
    os.close(write)
    END
    said = os.read(read, 1000).decode()
    print(said, os.wait()[1], library.unavailable("decode", "float32", wait=True) is None)
else:
    (home / "go").touch()
    print(library.unavailable("decode", "float32"), file=os.fdopen(write, "w"), end="")
    sys.exit()
"""


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_forked_process_loads_what_its_parent_has_not(tmp_path, quick, has_cache, goes_on):
    """This holds whether or not the parent's compiler is ended meanwhile. The end of the forked
    process neither ends a compiler of the parent nor removes its files."""
    if not has_cache:
        (tmp_path / "jattn").touch()
    slow = waits_to_go(tmp_path, quick, "decode.cc")
    ends = "" if goes_on else "compiler.stop()"
    code = FORKED + FORK_WHILE_A_LIBRARY_IS_BUILT.replace("END", ends)
    assert said(code, tmp_path, slow) == f"None 0 {goes_on}"


FORK_WHILE_A_RULE_IS_BUILT = """
text = 'extern "C" void jattn_rule_forward() {}'
threading.Thread(target=library.add_rule, args=(text, "float32", False, False)).start()
wait_for(home / "began")
if os.fork():
    print(os.wait()[1])
else:
    (home / "go").touch()
    library.add_rule(text + text.replace("forward", "backward"), "float32", True, False)
    sys.exit()
"""


@pytest.mark.exhaustive
def test_a_forked_process_builds_rules(built, tmp_path, quick):
    home, _ = copied(built, tmp_path)
    slow = waits_to_go(home, quick, "rule.cc")
    assert said(FORKED + FORK_WHILE_A_RULE_IS_BUILT, home, slow) == "0"


INTERRUPTED = """
import signal, jax.numpy as jnp, jattn
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    wait_for(home / "began")
    os.kill(os.getpid(), signal.SIGINT)
    wait_for(home / "interrupted")
    time.sleep(0.2)
    (home / "go").touch()
threading.Thread(target=interrupt).start()
x = jnp.ones((1, 8, 2, 4))
try:
    jattn.attention(x, x, x)
except KeyboardInterrupt:
    (home / "interrupted").touch()
    jattn.attention(x, x, x, implementation="native")
    print(jattn.explain(x, x, x)["native"])
"""


@pytest.mark.slow
def test_after_an_interrupt_calls_wait_for_a_library_as_before(tmp_path, quick):
    slow = waits_to_go(tmp_path, quick, "attention.cc")
    assert said(FORKED + INTERRUPTED, tmp_path, slow) == "None"


def waits_to_go(home: Path, compiler: str, source: str) -> str:
    """A compiler that writes a file `began` and waits for `go` before it compiles a source."""
    wait = f"touch {home}/began; while [ ! -e {home}/go ]; do sleep 0.05; done"
    return script(home / "c++", f'case "$*" in *{source}*) {wait};; esac\nexec {compiler} "$@"')


@pytest.mark.slow
def test_a_process_that_ends_does_not_wait_for_a_compiler(tmp_path):
    """It leaves neither the compiler nor its files behind."""
    pid = tmp_path / "pid"
    hanging = script(
        tmp_path / "c++",
        ANSWERS + f"for to; do :; done; echo > $to; echo $$ > {pid}; exec sleep 1000",
    )
    code = "from jattn.kernels.cpu import library\nlibrary.PATIENCE = 1.0\n" + CALL
    began = time.monotonic()
    assert "still being built" in said(code, tmp_path, hanging)
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.mark.exhaustive
def test_programs_wait_for_a_library_as_long_as_suits(fresh, monkeypatch, tmp_path, quick):
    """Programs that do not name the kernel run without it after a while, and keep doing so."""
    go = tmp_path / "go"
    slow = script(tmp_path / "slow", f'while [ ! -e {go} ]; do sleep 0.05; done; exec {quick} "$@"')
    monkeypatch.setenv("CXX", slow)
    monkeypatch.setattr(library, "PATIENCE", 0.3)
    x = on_device(inputs(CASES["causal"], "float32"))
    early = jax.jit(lambda q, k, v: jattn.attention(q, k, v, mask=jattn.masks.Causal()))
    assert "jattn_forward" not in early.lower(x.q, x.k, x.v).as_text()
    first = early(x.q, x.k, x.v)
    assert "still being built" in reason()
    go.touch()
    named = attend_causally("native")
    assert reason() is None
    np.testing.assert_array_equal(early(x.q, x.k, x.v), first)
    jax.clear_caches()
    contract.assert_same(attend_causally(None), named)
    assert "jattn_forward" in early.lower(x.q, x.k, x.v).as_text()


@pytest.mark.exhaustive
def test_one_message_says_that_a_library_is_built(fresh, monkeypatch, caplog, quick):
    """It is logged, or written on a terminal where no logger shows it."""
    monkeypatch.setenv("CXX", quick)
    with caplog.at_level(logging.INFO, logger="jattn"):
        assert reason() is None
        assert reason() is None
        (line,) = (record.getMessage() for record in caplog.records if record.name == "jattn")
        assert line.startswith("jattn: building attention.cc for float32")
        monkeypatch.setattr(library, "_libraries", {})
        monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
        assert reason() is None  # found
        assert len([record for record in caplog.records if record.name == "jattn"]) == 1

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    compiler._tell("one line")
    assert terminal.getvalue() == "one line\n"
    with caplog.at_level(logging.INFO, logger="jattn"):
        compiler._tell("another")
    assert terminal.getvalue() == "one line\n"


def test_threads_that_build_at_the_same_time_build_one_library(monkeypatch, tmp_path):
    """So they do after a failure, where a lock is left behind or cannot be made, and where the
    library is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (source := tmp_path / "one.c").write_text("int one() { return 1; }")
    ends: list[BaseException | None] = [compiler.BuildError("it fails"), None]
    began = []

    def compiled(command: list[str], path: Path) -> bytes:
        began.append(path)
        time.sleep(0.3)
        if ends and (end := ends.pop(0)):
            raise end
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", path], check=True)
        return path.read_bytes()

    def load(_: int) -> Any:
        try:
            library, saved = compiler._load("one", [], [], compiled, None)
        except compiler.BuildError as error:
            return str(error)
        assert saved is not None and saved.exists()
        return library.one()

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(load, range(4)), key=str) == [1, 1, 1, "it fails"]
    assert len(began) == 2
    for leave in (Path.touch, Path.mkdir):  # a lock of a process that was killed, and no lock
        (saved,) = (tmp_path / "jattn").glob("*.so")
        saved.unlink()
        leave(saved.with_suffix(".lock"))
        assert load(0) == 1
    whole = saved.read_bytes()
    for damaged in (whole[: len(whole) // 2], bytes(len(whole)), b""):
        saved.write_bytes(damaged)
        assert load(0) == 1 and len(saved.read_bytes()) == len(whole)
    assert len(began) == 4 + 3


BUILD_TWICE = """
import sys, jax.numpy as jnp
from jattn import build
sys.argv = ["build"]
assert build.main() == 0
build.attention = lambda q, *x, **_: jnp.full(q.shape, len(x))
print(build.main(), file=sys.stderr)
"""


@pytest.mark.slow
def test_the_command_builds_ahead(quick, tmp_path):
    """It prints the paths, and whether the libraries work."""
    done = process(BUILD_TWICE, tmp_path, quick)
    paths = {line.partition(": ")[2] for line in done.stdout.splitlines()}
    assert len(paths) == 3
    assert paths == set(map(str, (tmp_path / "jattn").glob("*.so")))
    assert "other numbers" in done.stderr and done.stderr.splitlines()[-1] == "1"


def test_the_command_fails_where_nothing_works(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["build", "--float64"])
    monkeypatch.setattr(library, "_libraries", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 1
    assert "float64: cannot be built: there is no C++ compiler" in capsys.readouterr().err


WITH_LITTLE_MEMORY = """
import resource, jax, jax.numpy as jnp, numpy as np, jattn
wide = jnp.ones((1, 1, 8, 200_000))
small = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 8)), jnp.float32)
def grads(x, **how):
    return jax.grad(lambda x: jattn.attention(x, x, x, **how).sum())(x)
calls = [lambda **how: jattn.attention(wide, wide, wide, **how), lambda **how: grads(wide, **how)]
named = [dict(implementation="native"), dict(implementation="blockwise")]
for call in calls:
    jax.block_until_ready(call(**named[1]))
for call in (jattn.attention, grads):
    call(*[small] * (1 if call is grads else 3), **named[0])
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 290_000_000,) * 2)
for call in calls:
    jax.block_until_ready(call(**named[1]))
    try:
        jax.block_until_ready(call(**named[0]))
    except jax.errors.JaxRuntimeError as error:
        print(str(error))
want = jattn.attention(small, small, small, implementation="blockwise")
got = jattn.attention(small, small, small, **named[0])
assert np.allclose(got, want, atol=1e-5, rtol=0)
"""


@pytest.mark.slow
def test_a_call_without_memory_is_an_error_and_no_end(built, quick, tmp_path):
    """The tiles of wide heads do not fit, blockwise does. Later calls run. The process takes the
    library that another has built."""
    home, library = copied(built, tmp_path)
    stat, log = library.stat(), Path(quick).with_name("log")
    calls = log.read_text()
    first, second = said(WITH_LITTLE_MEMORY, home, quick).splitlines()
    assert "jattn: no memory for the tiles" in first
    assert "jattn: no memory for the tiles" in second
    assert log.read_text() == calls
    now = library.stat()
    assert (now.st_mtime_ns, now.st_ino) == (stat.st_mtime_ns, stat.st_ino)


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("sanitizer", sanitizers.SANITIZERS)
@pytest.mark.parametrize("program", sanitizers.PROGRAMS, ids=str)
def test_sanitizers_find_nothing(program, sanitizer):
    """Sanitizers of memory, arithmetic and threads check some calls without optimisations, whose
    numbers are compared too. The command makes more calls, with optimisations."""
    ((said, well),) = sanitizers.runs(sanitizer, 20, [program], "-O0")
    assert well, said


WRITE = """
import pathlib, pickle
from jax.experimental.serialize_executable import serialize
import jax, jax.numpy as jnp, numpy as np, jattn
x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, 2, 8)), jnp.float32)
pasted = {"mask": lambda b, h, i, j: i * j % 3 != 1, "score": lambda s, b, h, i, j: jnp.sin(s)}
kept = []
for options in ({}, pasted):
    def total(x):
        return jnp.sum(jattn.attention(x, x, x, implementation="native", **options) ** 2)
    program = jax.jit(jax.value_and_grad(total)).lower(x).compile()
    kept.append((serialize(program), jax.tree.map(np.asarray, program(x))))
pathlib.Path("{path}").write_bytes(pickle.dumps((np.asarray(x), kept)))
"""

READ = """
import pathlib, pickle
from jax.experimental.serialize_executable import deserialize_and_load
import jax, jattn
import numpy as np
path = pathlib.Path("{path}")
x, kept = pickle.loads(path.read_bytes())
runs = [deserialize_and_load(*program, execution_devices=jax.devices()[:1]) for program, _ in kept]
rules = {rule: rule.read_bytes() for rule in path.parent.glob("jattn/rule-*.txt")}
for rule, contents in rules.items():
    rule.write_bytes(contents[:-1])  # what is damaged is not read
try:
    jax.block_until_ready(runs[1](x))
except jax.errors.JaxRuntimeError as error:
    print(error)
for rule, contents in rules.items():
    rule.write_bytes(contents)
for run, (_, want) in zip(runs, kept):
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(run(x)), want)
"""


@pytest.fixture(scope="module")
def serialized(quick, tmp_path_factory) -> tuple[Path, Path]:
    """A file with compiled programs, and a folder with what they call."""
    home = tmp_path_factory.mktemp("serialized")
    said(WRITE.replace("{path}", str(home / "programs")), home, quick)
    return home / "programs", home


def test_a_compiled_program_runs_where_nothing_but_the_package_is_imported(
    serialized, quick, tmp_path
):
    """Without its functions or without its library it says what to do."""
    path, home = serialized
    log = Path(quick).with_name("log")
    calls = log.read_text()
    read = READ.replace("{path}", str(path))
    assert "call jattn.attention with them once before" in said(read, home, quick)
    assert log.read_text() == calls, "its libraries are found without the compiler"
    assert "(run python -m jattn.build)" in process(read, tmp_path, quick).stderr
    assert not list((tmp_path / "jattn").iterdir())


CUT = """
import collections, jax, jax.numpy as jnp, numpy as np
from jax._src import monitoring
from jax.sharding import NamedSharding, PartitionSpec as P
import jattn
events = collections.Counter()
monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
jax.config.update("jax_compilation_cache_dir", "{path}")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = np.random.default_rng(0).normal(size=(2, 80, 2, 8)).astype(np.float32)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
y = jax.device_put(x, NamedSharding(mesh, P("d")))
for step in range(2):  # functions that differ have programs that differ
    mask = lambda b, h, i, j: i * j % 3 != step
    for name in ("native", "blockwise"):
        how = {"mask": mask, "implementation": name}
        want = jattn.attention(*[jnp.asarray(x)] * 3, mask=mask, implementation="reference")
        events.clear()
        found = jax.jit(lambda x: jattn.attention(x, x, x, **how))(y)
        print(events["cache_hits"], events["cache_misses"])
        assert found.sharding.spec == P("d"), found.sharding
        assert np.allclose(found, want, atol=1e-5)
"""


@pytest.mark.exhaustive
def test_programs_for_several_devices_are_found_on_the_disk(serialized, quick, tmp_path):
    code = CUT.replace("{path}", str(tmp_path))
    home = serialized[1]
    assert said(code, home, quick).splitlines() == ["0 1"] * 4
    assert said(code, home, quick).splitlines() == ["1 0"] * 4
