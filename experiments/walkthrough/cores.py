"""Attention in parallel over the cores of a machine: loops in C++, compared with the library."""

import ctypes
import importlib.resources
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import KERNEL, LLMS
from experiments.walkthrough.recurrence import row, seconds
from experiments.walkthrough.step import Code, check, constants, draw, panels, same, step


LOOPS = importlib.resources.files("experiments.walkthrough").joinpath("loop.cc").read_text("utf-8")


def compiled(folder: Path) -> Callable[..., np.ndarray] | None:
    """Compiles the loops to a function of three [T, H] arrays; returns None if that fails."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""
    source, library = folder / "loop.cc", folder / "loop.so"
    source.write_text(LOOPS)
    options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", str(library)]
    try:
        command = [*compiler.split(), *options, str(source)]
        # No pipe: a process that the compiler leaves running would keep it open.
        nobody = subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=nobody, stderr=nobody, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    # Waiting threads should sleep, so that they do not take a core from a thread that works.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    attend = ctypes.CDLL(str(library)).attend

    def call(*arrays: np.ndarray) -> np.ndarray:
        out = np.empty_like(arrays[0])
        # The C++ gets the addresses of the arrays, and writes to the last.
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, out)]
        attend(*pointers, *out.shape)
        return out

    return call


def measured(lengths: list[int]) -> dict[str, list[float]]:
    """Returns the milliseconds of the loops and of the library for each number of words, and
    nothing if the loops cannot be compiled."""
    rng = np.random.default_rng(0)
    # In 32 bits, one head of 64 numbers.
    inputs = [list(rng.normal(size=(3, length, 64)).astype(np.float32)) for length in lengths]
    for_library = [[jnp.asarray(array) for array in arrays] for arrays in inputs]
    # Attention of the library for arrays without an axis of heads.
    attend = jax.jit(lambda *arrays: jattn.attention(*(x[:, None] for x in arrays))[:, 0])
    with tempfile.TemporaryDirectory() as folder:
        loops = compiled(Path(folder))
        if loops is None:
            return {}
        pairs = zip(inputs, for_library, strict=True)
        check(
            "loops and library agree, to 1e-5",
            [same(loops(*a), attend(*b), 1e-5) for a, b in pairs],
        )
        times = {"loops in C++": [1e3 * seconds(loops, *arrays) for arrays in inputs]}
    return {**times, "jattn": [1e3 * seconds(attend, *arrays) for arrays in for_library]}


def times_by_length(lengths: list[int], times: dict[str, list[float]]) -> Figure:
    """The times for each number of words, a line for each program."""
    figure, axis = panels(1, width=6.5, height=3.4)
    for (name, taken), style in zip(times.items(), ("o-", "s--"), strict=True):
        axis.plot(lengths, taken, style, label=name)
    axis.set(xscale="log", yscale="log", xlabel="words", title="milliseconds, one head of 64")
    axis.set_xticks(lengths, map(str, lengths))
    axis.minorticks_off()
    axis.legend()
    return figure


@step(
    KERNEL,
    LLMS,
    uses=(
        Code("loop.cc", "c++", LOOPS),
        constants(__file__, "LOOPS"),
        compiled,
        measured,
        times_by_length,
    ),
    misprints=(
        "Errors in the essay: in the product with the transposed matrix the inner index runs to "
        "the number of rows, `j < nr_b`, instead of the number of columns. That is right only if "
        "there are as many words as numbers in a word. The memory for scores, maxima and sums is "
        "never freed.",
    ),
)
def cores() -> None:
    """Attention over the cores of a machine.

    The vector that attention gives to a word depends on queries, keys and values. It does not
    depend on the vectors that other words get. So the rows can be computed in any order, and also
    at the same time. Each row needs its greatest score m, its sum of exponentials, and its mean:

        m_i = max_j s_ij
        y_i = (Σ_j e^(s_ij − m_i) v_j) / (Σ_j e^(s_ij − m_i))

    The essay shows this by loops in C++ with OpenMP, which deals the rows out to the cores. The
    loops below do the same. They use OpenMP a second time, with `simd`: a core then multiplies
    several numbers at once.

    In these loops each core holds one whole row of scores. On a CPU the library runs compiled C++
    as well. It computes tiles of scores that fit the cache of the processor, it multiplies whole
    vectors, and it has an exponential of its own. What each of these gains is not measured here.

    The times are the least of many calls on the machine that made this page. They include what
    every call costs, for example waking the threads. This matters most for short texts.
    """
    rng = np.random.default_rng(0)
    # Queries, keys and values of 9 words, with one head of 4 numbers.
    small = [jnp.asarray(array) for array in rng.normal(size=(3, 9, 1, 4))]
    order = rng.permutation(9)
    shuffled = jattn.attention(small[0][order], *small[1:])
    check("rows come out the same in any order", same(shuffled, jattn.attention(*small)[order]))

    lengths = [256, 512, 1024, 2048]
    times = measured(lengths)
    if times:
        print(f"milliseconds with {os.cpu_count()} cores")
        print(row("words", lengths, ""))
        for name, taken in times.items():
            print(row(name, taken, ".2f"))
        faster = times["jattn"][-1] < times["loops in C++"][-1]
        check("the library is faster at 2,048 words", faster)
        draw(times_by_length(lengths, times))
    else:
        print("there is no C++ compiler with OpenMP here to build the loops")
