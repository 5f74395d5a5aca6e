"""Attention in parallel over the cores of a machine: three loops in C++ beside the library."""

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
from experiments.walkthrough.recurrence import seconds
from experiments.walkthrough.step import Code, check, panels, same, step


LOOPS = importlib.resources.files("experiments.walkthrough").joinpath("loop.cc").read_text("utf-8")


def compiled(folder: Path) -> Callable[..., np.ndarray] | None:
    """The loops above as a function of three [T, H] arrays; None where they do not compile."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""
    source, library = folder / "loop.cc", folder / "loop.so"
    source.write_text(LOOPS)
    options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", str(library)]
    try:
        subprocess.run([*compiler.split(), *options, str(source)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    attend = ctypes.CDLL(str(library)).attend

    def call(*arrays: np.ndarray) -> np.ndarray:
        out = np.empty_like(arrays[0])
        # The C++ gets the addresses of the arrays, and writes to the last.
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, out)]
        attend(*pointers, *out.shape)
        return out

    return call


@step(KERNEL, LLMS, uses=(Code("loops in C++", "c++", LOOPS), compiled))
def cores() -> Figure | None:
    """Attention over the cores of a machine.

    The vector of a word depends on queries, keys and values alone, and on no other word's result:
    rows can be computed in any order, and so at once. The essay shows it with loops in C++ and
    OpenMP, which deals the rows out to the cores; so do the loops here. Their second line for
    OpenMP, `simd`, lets a core multiply several numbers at once.

    The loops hold a whole row of scores on each core. The library works on tiles of scores that fit
    the processor's cache, with an exponential of its own for whole vectors.

    Misprint in the essay: the product with the transposed matrix runs its inner index to the number
    of rows, `j < nr_b`, instead of to the number of columns, so that it is right only for as many
    words as numbers in a word; and what it allocates for scores, maxima and sums is never freed.
    """
    rng = np.random.default_rng(0)
    small = [jnp.asarray(array) for array in rng.normal(size=(3, 9, 1, 4))]  # 9 words, one head
    order = rng.permutation(9)
    shuffled = jattn.attention(small[0][order], *small[1:])
    check("rows come out the same in any order", same(shuffled, jattn.attention(*small)[order]))

    attend = jax.jit(lambda *arrays: jattn.attention(*(x[:, None] for x in arrays))[:, 0])
    print(f"{os.cpu_count()} cores")
    lengths = [256, 512, 1024, 2048]
    times: dict[str, list[float]] = {"loops in C++": [], "jattn": []}
    with tempfile.TemporaryDirectory() as folder:
        loops = compiled(Path(folder))
        if loops is None:
            print("there is no C++ compiler with OpenMP here to build the loops")
            return None
        for length in lengths:
            arrays = list(rng.normal(size=(3, length, 64)).astype(np.float32))
            given = [jnp.asarray(array) for array in arrays]
            agree = same(loops(*arrays), attend(*given), 1e-5)
            check(f"loops and library agree on {length} words", agree)
            times["loops in C++"].append(seconds(loops, *arrays))
            times["jattn"].append(seconds(attend, *given))
    for name, taken in times.items():
        print(f"{name:14}" + "".join(f"{1e3 * t:9.2f} ms" for t in taken))
    check("at 2,048 words the library is faster", times["jattn"][-1] < times["loops in C++"][-1])
    # The picture.
    figure, axis = panels(1, width=6.5, height=3.4)
    for (name, taken), style in zip(times.items(), ("o-", "s--"), strict=True):
        axis.plot(lengths, taken, style, label=name)
    axis.set(xscale="log", yscale="log", xlabel="words", ylabel="seconds", title="one head of 64")
    axis.set_xticks(lengths, map(str, lengths))
    axis.legend()
    return figure
