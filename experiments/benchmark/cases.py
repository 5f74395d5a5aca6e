"""The cases of the benchmark: sizes, masks and score functions.

A case defines its mask and score function as jattn's; `peers.py` translates them for each peer.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.runs.ending import UserError
from jattn import masks, scores


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """Self-attention of `B` sequences of `T` positions, with `N` heads, `K` key heads and head size
    `H`. With `S`, T queries attend to S other keys in a cache or, if `plain`, in arrays, as in
    decoding."""

    name: str
    B: int
    N: int
    T: int
    H: int
    K: int | None = None
    pattern: str = "full"  # full, causal, window, documents
    modifier: str | None = None  # alibi, softcap, t5
    window: int = 256
    documents: int = 8
    S: int | None = None
    plain: bool = False
    dtype: str = "float32"

    @property
    def key_heads(self) -> int:
        """The number of key heads, by default N."""
        return self.K or self.N

    def inputs(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws query `[B, T, N, H]`, key and value `[B, T or S, K, H]`, rounded to `dtype`."""
        rng = np.random.default_rng(seed)
        kv_shape = (self.B, self.S or self.T, self.key_heads, self.H)
        shapes = [(self.B, self.T, self.N, self.H), kv_shape, kv_shape]
        query, key, value = (
            rng.standard_normal(shape, np.float32).astype(jnp.dtype(self.dtype), copy=False)
            for shape in shapes
        )
        return query, key, value

    def ids(self) -> np.ndarray:
        """Returns the document of each position, int32 `[B, T]`."""
        of_position = np.arange(self.T, dtype=np.int32) * self.documents // self.T
        return np.broadcast_to(of_position, (self.B, self.T)).copy()

    def mask(self, ids: Any) -> masks.Mask | None:
        """Returns the jattn mask; `ids` is an argument of the compiled program."""
        match self.pattern:
            case "full":
                return None
            case "causal":
                return masks.Causal()
            case "window":
                return masks.Causal() & masks.Window(left=self.window)
            case "documents":
                return masks.Causal() & masks.Segments(ids)
        raise ValueError(f"unknown pattern {self.pattern!r}")

    def parameter(self) -> np.ndarray | None:
        """Returns the score function's parameter, whose gradient is computed too."""
        if self.modifier == "t5":
            rng = np.random.default_rng(1)
            return rng.standard_normal((32, self.N), np.float32)
        return None

    def score(self, parameter: Any) -> scores.ScoreFunction | None:
        """Returns the jattn score function."""
        match self.modifier:
            case None:
                return None
            case "alibi":
                return scores.Alibi(scores.alibi_slopes(self.N))
            case "softcap":
                return scores.SoftCap(30.0)
            case "t5":
                return scores.RelativeBias(parameter)
        raise ValueError(f"unknown modifier {self.modifier!r}")

    def allowed_pairs(self) -> int:
        """Returns the number of unmasked query-key pairs over batch and heads: the necessary
        work."""
        if self.S:
            return self.B * self.N * self.T * self.S
        mask = masks.as_mask(self.mask(jnp.asarray(self.ids())))
        block = min(self.T, 512)
        kinds = np.asarray(masks.tile_map(mask, self.T, self.T, block, block))
        pairs = int((kinds == masks.FULL).sum()) * block * block
        for i, j in np.argwhere(kinds == masks.MIXED):
            rows, columns = (np.arange(x * block, min((x + 1) * block, self.T)) for x in (i, j))
            pairs += int(np.asarray(mask(0, 0, rows, columns)).sum())
        return pairs * self.B * self.N

    def flops(self, backward: bool) -> int:
        """Returns the multiplications and additions in the products of the allowed pairs."""
        return self.allowed_pairs() * 2 * self.H * (2 + 5 * backward)

    def sizes(self) -> str:
        """Returns B, N, T, S, H and the pattern, as in tables."""
        pattern = "" if self.pattern == "full" else f" {self.pattern}"
        return f"{self.B}, {self.N}, {self.T}, {self.S or self.T}, {self.H}{pattern}"

    def bytes_held(self) -> int:
        """Returns the bytes of keys and values, which a step of decoding has to read once."""
        size = jnp.dtype(self.dtype).itemsize
        return 2 * size * self.B * (self.S or self.T) * self.key_heads * self.H


CASES = (
    BenchmarkCase("short", 32, 8, 32, 32, pattern="causal"),
    BenchmarkCase("sentence", 8, 8, 128, 64),
    BenchmarkCase("sentences", 32, 8, 128, 64, pattern="causal"),
    BenchmarkCase("page", 1, 8, 2048, 64),
    BenchmarkCase("page-causal", 1, 8, 2048, 64, pattern="causal"),
    BenchmarkCase("long-causal", 1, 8, 8192, 64, pattern="causal"),
    BenchmarkCase("long-window", 1, 8, 8192, 64, pattern="window"),
    BenchmarkCase("long-documents", 1, 8, 8192, 64, pattern="documents"),
    BenchmarkCase("grouped-causal", 1, 32, 2048, 64, K=8, pattern="causal"),
    BenchmarkCase("alibi", 1, 8, 4096, 64, pattern="causal", modifier="alibi"),
    BenchmarkCase("softcap", 1, 8, 4096, 64, pattern="causal", modifier="softcap"),
    BenchmarkCase("t5", 1, 8, 4096, 64, modifier="t5"),
    BenchmarkCase("decode", 8, 8, 1, 64, S=4096),
    BenchmarkCase("decode-grouped", 8, 8, 1, 64, K=1, S=4096),
    BenchmarkCase("query-arrays", 8, 8, 1, 64, S=4096, plain=True),
    BenchmarkCase("queries-arrays", 8, 8, 8, 64, S=4096, plain=True),
)

_STANDARD = {case.name: case for case in CASES}
# Cases for the engines of `engines.py`, which have full and causal attention only.
ENGINE_CASES = (
    _STANDARD["short"],
    _STANDARD["sentence"],
    BenchmarkCase("full-256", 8, 8, 256, 64),
    BenchmarkCase("causal-256", 8, 8, 256, 64, pattern="causal"),
    BenchmarkCase("full-512", 4, 8, 512, 64),
    BenchmarkCase("causal-512", 4, 8, 512, 64, pattern="causal"),
    BenchmarkCase("full-1024", 1, 8, 1024, 64),
    BenchmarkCase("causal-1024", 1, 8, 1024, 64, pattern="causal"),
    _STANDARD["page"],
    _STANDARD["page-causal"],
    BenchmarkCase("wide-causal", 1, 8, 2048, 128, pattern="causal"),
    _STANDARD["long-causal"],
    _STANDARD["decode"],
)
NAMED = {case.name: case for case in (*CASES, *ENGINE_CASES)}


def named(names: list[str] | None, default: tuple[BenchmarkCase, ...]) -> tuple[BenchmarkCase, ...]:
    """Returns the cases of these names, or without names the default ones."""
    return default if names is None else tuple(NAMED[name] for name in NAMED if name in names)


def with_passes(
    chosen: Iterable[BenchmarkCase], which: str | None
) -> list[tuple[BenchmarkCase, bool]]:
    """Returns each case with each pass of the option `--pass`: False is forward, True with
    gradients. Cases of decoding run forward only.

    Raises:
        UserError: no case has such a pass.
    """
    passes = {"forward": [False], "backward": [True]}.get(which or "both", [False, True])
    work = [(case, backward) for case in chosen for backward in passes if not (case.S and backward)]
    if not work:
        raise UserError("nothing to measure: cases of decoding run forward only")
    return work


def growing(lengths: tuple[int, ...]) -> tuple[BenchmarkCase, ...]:
    """Returns one causal case for each length, for the plots of time and memory over T."""
    return tuple(BenchmarkCase(f"causal-{T}", 1, 8, T, 64, pattern="causal") for T in lengths)
