"""Builds the CPU kernel's libraries ahead of time, for images and clusters.

    python -m jattn.build               for float32, which also serves float16 and bfloat16
    python -m jattn.build --float64     for float64 as well

The libraries are kept in `$XDG_CACHE_HOME/jattn`, by default `~/.cache/jattn`, for processes with
the same compiler, kind of processor and versions. The exit status is 0 if all work and are kept.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jattn.attention import attention
from jattn.cache import DenseCache
from jattn.kernels.cpu import library
from jattn.linear import linear_attention


def build(dtype: str) -> str | None:
    """Builds and tries the libraries for a dtype, prints their paths, and returns any problem."""
    for function in ("forward", "decode", "linear"):
        if reason := library.unavailable(function, dtype, wait=True):
            return f"cannot be built: {reason}"
        file = library.cached_path(function, dtype)
        if file is None:
            return "cannot be kept: the cache folder cannot be written, or others may replace it"
        print(f"{dtype}: {file}")
    return None if _works(dtype) else "gives other numbers than the formula"


def _works(dtype: str) -> bool:
    """Returns whether the results of the kernels agree with formulas in JAX."""
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(1, 70, 2, 24)), dtype) for _ in range(3))
        want = attention(q, k, v, implementation="reference")
        cache = DenseCache.of(k, v)
        results = [attention(q, k, v, implementation="native"), attention(q[:, -2:], cache)]
        close = 100 * float(np.finfo(dtype).eps)
        results.append(linear_attention(q, k, v))
        by_chunks = linear_attention(q, k, v, chunk=16)
        pairs = zip(results, (want, want[:, -2:], by_chunks), strict=True)
        return all(bool(np.allclose(x, y, rtol=0, atol=close)) for x, y in pairs)


def main() -> int:
    """Builds the libraries for the dtypes named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jattn.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--float64", action="store_true", help="for float64 as well")
    dtypes = ["float32", "float64"] if parser.parse_args().float64 else ["float32"]
    problems = {dtype: build(dtype) for dtype in dtypes}
    for dtype, problem in problems.items():
        if problem:
            print(f"{dtype}: {problem}", file=sys.stderr)
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
