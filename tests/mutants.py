"""Mutants: mistakes of attention libraries, each of which the quick suite has to notice.

    python -m tests.mutants            # all of them
    python -m tests.mutants tile key-reuse

Each mistake is made in a temporary copy of the project. The tests in the files named for it run
first, the rest of the quick suite only if these pass. Prints the first test that fails for each
mutant, and exits with 1 if no test notices a mutant.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parent.parent
COPIED = ("jattn", "experiments", "tests", ".github", "pyproject.toml", "README.md")


class Change(NamedTuple):
    """A text that occurs once in a file, with `⟦old⇒new⟧` where it changes."""

    file: str
    text: str

    @property
    def old(self) -> str:
        return re.sub("⟦(.*?)⇒.*?⟧", r"\1", self.text, flags=re.DOTALL)

    @property
    def new(self) -> str:
        return re.sub("⟦.*?⇒(.*?)⟧", r"\1", self.text, flags=re.DOTALL)


class Mutant(NamedTuple):
    """Changes, and the files of the tests that should notice them."""

    changes: tuple[Change, ...]
    noticed_by: tuple[str, ...]


def mutant(file: str, text: str, *noticed_by: str) -> Mutant:
    """One change; tests are named without `test_`."""
    return Mutant((Change(file, text),), noticed_by)


CALL, TILE, SOFTMAX = "jattn/call.py", "jattn/tile.py", "jattn/softmax.py"
DROPOUT, NORMALIZERS = "jattn/dropout.py", "jattn/normalizers.py"
MASKS, POSITIONS, CACHE = "jattn/masks.py", "jattn/positions.py", "jattn/cache/dense.py"
BLOCKWISE = "jattn/kernels/xla/blockwise.py"
DERIVATIVES, C = "jattn/kernels/common/derivatives.py", "jattn/kernels/cpu/src"
BUILT_IN = "jattn/kernels/cpu/built_in.py"
LOSSES, TRAINING = "experiments/translation/losses.py", "experiments/translation/training.py"
DATA = "experiments/translation/data.py"


def causal(by: int) -> Mutant:
    """Moves the diagonal in the formula, the bounds and the kernel's runs alike."""
    bounds = f"kv_lo <= q_hi⟦⇒ + {by}⟧), _as_truth(kv_hi <= q_lo⟦⇒ + {by}⟧)"
    return Mutant(
        (
            Change(MASKS, f"columns.positions[None, :] <= rows.positions[:, None]⟦⇒ + {by}⟧"),
            Change(MASKS, f"return _as_truth({bounds}"),
            Change(
                BUILT_IN, f"return KeyRanges(0, _until(queries.positions, 0, queries.S)⟦⇒ + {by}⟧)"
            ),
        ),
        ("masks",),
    )


MUTANTS: dict[str, Mutant] = {
    # Key heads of query heads.
    "tile": mutant(
        TILE,
        "grouped = [x.reshape(B, ⟦K, *group⇒*group, K⟧, *x.shape[2:]) for x in grouped]⟦⇒\n"
        "    grouped = [x.swapaxes(1, 2) if group else x for x in grouped]⟧",
        "contract",
    ),
    "tile-in-turn": mutant(
        BLOCKWISE,
        "k, v = (take_head(x, b, h ⟦// shapes.G⇒% shapes.K⟧, S) for x in (key, value))",
        "contract",
    ),
    "tile-in-c": mutant(f"{C}/call.h", "const Index g = n ⟦/ (N / K)⇒% K⟧;", "native"),
    # The scale.
    "scale-of-values": mutant(
        CALL, 'scale=checked_scale(options.get("scale"), shapes.⟦H⇒V⟧)', "contract"
    ),
    "scale-of-the-model": mutant(
        CALL, 'scale=checked_scale(options.get("scale"), shapes.⟦⇒N * shapes.⟧H)', "contract"
    ),
    "no-scale": mutant(CALL, "return 1⟦ / math.sqrt(H)⇒.0⟧", "contract"),
    # Masks.
    "mask-inverted": mutant(
        TILE, "        allowed = ⟦⇒~⟧spec.mask.evaluate(b, h, rows, columns)", "contract"
    ),
    "causal-one-more": causal(1),
    "causal-one-less": causal(-1),
    "bottom-right": mutant(
        TILE,
        "⟦⇒last = jnp.arange(T, dtype=jnp.int32) + S - T\n"
        "    q = last if spec.q_positions is None else spec.q_positions\n"
        "    ⟧return span(T, ⟦spec.q_positions⇒q⟧), span(S, spec.kv_positions)",
        "contract",
    ),
    "window-one-more": mutant(
        MASKS, "allowed = allowed & (kv >= first_key[:, None]⟦⇒ - 1⟧)", "masks"
    ),
    "window-one-less": mutant(MASKS, "allowed = allowed & (kv <⟦=⇒⟧ last_key[:, None])", "masks"),
    "window-bounds": mutant(MASKS, "maybe_any = maybe_any & (kv_hi >⟦=⇒⟧ union_start)", "masks"),
    "window-in-c": mutant(BUILT_IN, "masks.shifted(jnp.maximum(q, 0), ⟦-⇒1 - ⟧left)", "native"),
    "soft-cap-after-mask": mutant(
        TILE,
        "        score = ⟦keep_rounding(⇒score if allowed is None else jnp.where(allowed, score, "
        "-jnp.inf)\n"
        "        score = ⟧function.evaluate(⟦zero_masked(score)⇒score⟧, b, h, rows, columns)⟦)⇒\n"
        "        allowed = None⟧\n"
        "    if allowed is None:",
        "contract",
    ),
    "fill-with-a-constant": mutant(
        TILE,
        "    return jnp.where(allowed, score, 0 if scores_are_weights(spec) else -⟦jnp.inf⇒1e4⟧)",
        "contract",
    ),
    # The softmax.
    "no-maximum": mutant(
        SOFTMAX,
        "⟦⇒maximum = maximum * 0\n    ⟧exponential = jnp.exp(scores - maximum[:, None])",
        "large_numbers",
        "contract",
    ),
    "sums-in-bfloat16": mutant(
        TILE,
        '"th,sh->ts", q, k, precision=precision⟦, preferred_element_type=⇒).astype(⟧dtype)',
        "contract",
    ),
    # XLA would remove a conversion to bfloat16 and back.
    "weights-in-bfloat16": mutant(
        BLOCKWISE,
        "score,⟦ ⇒\n"
        "                ⟧lambda w: dot(⟦⇒lax.reduce_precision(head_tile.drop(w), 8, 7) if v.dtype "
        "== jnp.bfloat16 else ⟧head_tile.drop(w), v_j.finite, spec),⟦ ⇒\n"
        "                ⟧differentiable=False",
        "contract",
    ),
    "lse-in-bfloat16": mutant(
        "jattn/kernels/common/vjp.py",
        "    ⟦⇒low = [x.astype(query.dtype).astype(x.dtype) for x in normalizer]\n"
        "    normalizer = Normalizer(*low)\n"
        "    ⟧return out.astype(query.dtype), normalizer.by_head()",
        "contract",
    ),
    "merged-without-weights": mutant(
        SOFTMAX,
        "totals = [jnp.⟦exp((x.maximum - shift) + x.log_total)⇒ones_like(shift)⟧ for x in parts]",
        "softmax",
    ),
    "lse-of-the-first-part": mutant(
        SOFTMAX,
        "return merged.astype(out.dtype), ⟦normalizer.lse.astype(lse.dtype)⇒lse⟧",
        "softmax",
    ),
    # Normalizers.
    "weights-of-masked-pairs": mutant(
        NORMALIZERS, "return jnp.where(⟦masked⇒False⟧, 0, weights)", "normalizers"
    ),
    "sigmoid-bias-subtracted": mutant(NORMALIZERS, "score ⟦+⇒-⟧ in_dtype(self.bias", "contract"),
    "top-k-one-more": mutant(
        NORMALIZERS, "jax.lax.top_k(score, self.k⟦⇒ + 1⟧)[0]", "contract", "normalizers"
    ),
    "running-with-its-own-term": mutant(
        NORMALIZERS,
        "constant_values=identity)[:, ⟦1:⇒:-1⟧]",
        "contract",
    ),
    "running-in-the-other-order": mutant(
        NORMALIZERS, "lambda later, term: combine(⟦term, later⇒later, term⟧)", "contract"
    ),
    "sigmoid-slope-in-c": mutant(
        f"{C}/pointwise.h", "return {w, w - w * w⟦⇒ * w⟧};", "normalizers_native", "contract"
    ),
    "entmax-mean-in-c": mutant(
        f"{C}/rows.h",
        "load(sums + i) / (total == 0 ? all(1) : total)⟦⇒ * 0⟧ + (factor - factor));",
        "normalizers_native",
        "contract",
    ),
    "threshold-excludes-ties-in-c": mutant(
        f"{C}/rows.h",
        "return score <⟦⇒=⟧ threshold ? Vector{} : exponential(score - most);",
        "normalizers_native",
        "contract",
    ),
    # Quantised caches.
    "integers-without-their-last-digit-in-c": mutant(
        f"{C}/quantized.h",
        "⟦_mm512_cvtepi32_ps(products[0])⇒_mm512_setzero_ps()⟧);",
        "quantized_caches",
    ),
    "weights-with-negative-scales-in-c": mutant(
        f"{C}/quantized.h", "⟦if (!sums) bits |= one < 0.0f;⇒⟧", "quantized_caches"
    ),
    "decay-of-the-own-token-in-c": mutant(
        f"{C}/linear.cc", "      between[i] = ⟦1⇒factor⟧;", "linear"
    ),
    "scales-of-values-left-out-on-gpus": mutant(
        "jattn/kernels/gpu/mosaic/kernels/decode.py",
        "pair = ⟦stored.weights(weights)⇒weights⟧.astype(shapes.dtype), stored.values(v)",
        "gpu_decode",
    ),
    # Dropout.
    "dropout-before-softmax": mutant(
        TILE,
        "    ⟦⇒from jattn import dropout\n"
        "    score = dropout.drop(spec, score, b, h, rows, columns)\n"
        "    ⟧return jnp.where(allowed, score, 0 if scores_are_weights(spec) else -jnp.inf)",
        "contract",
        "dropout",
    ),
    "dropout-not-scaled": mutant(
        DROPOUT, "jnp.where(is_kept, 1⟦ / (1 - spec.dropout_rate)⇒⟧, 0)", "dropout", "contract"
    ),
    "dropout-of-all-heads": mutant(DROPOUT, "for word in (*rest, b, ⟦⇒0 * ⟧h):", "dropout"),
    "dropout-of-all-rows": mutant(DROPOUT, "for word in (*rest, ⟦⇒0 * ⟧b, h):", "dropout"),
    "key-reuse": mutant(
        TRAINING,
        "key = ⟦jax.random.fold_in(⇒⟧jax.random.key(config.seed)⟦, state.step)⇒⟧",
        "translation",
    ),
    # Caches and positions.
    "cache-write-clamped": mutant(
        CACHE,
        "slots = jnp.⟦where(self._fits(slots, valid), ⇒minimum(⟧slots, self.capacity⟦⇒ - 1⟧)\n"
        "        new_positions =",
        "cache_histories",
    ),
    "rotary-offset-dropped": mutant(
        "jattn/nn/attention.py",
        "        return self.rotary(x, ⟦positions⇒jnp.arange(x.shape[-3], dtype=jnp.int32⟧)⟦⇒)⟧",
        "nn",
    ),
    "rotary-halves-swapped": mutant(
        POSITIONS,
        "return jnp.concatenate([⟦⇒b * cos + a * sin, ⟧a * cos - b * sin⟦, b * cos + a * sin⇒⟧], "
        "axis=-1)",
        "positions",
    ),
    # Training.
    "loss-over-padding": mutant(
        TRAINING,
        "tokens = jnp.⟦maximum(jnp.sum⇒asarray⟧(loss_mask(batch)⟦), 1)⇒.size)⟧",
        "translation",
        "losses",
    ),
    "smoothing-over-padding": mutant(
        LOSSES,
        "return⟦ jnp.where(mask, both, 0), jnp.where(mask[:, None], gradient, 0)⇒ both, gradient⟧",
        "losses",
    ),
    "mean-of-means": mutant(
        TRAINING,
        "⟦⇒own = jnp.maximum(jnp.sum(loss_mask(batch)), 1) * len(micro_batches.source)\n"
        "        ⟧return jax.tree.map(jnp.add, sums, gradient(params, batch, key, "
        "⟦tokens⇒own⟧)), None",
        "translation",
    ),
    "zip-truncates": Mutant(
        (
            Change(DATA, "    if ⟦len(left) != len(right)⇒False⟧:"),
            Change(DATA, "zip(left, right⟦, strict=True⇒⟧)"),
        ),
        ("data",),
    ),
    # Gradients.
    "gradient-twice": mutant(
        DERIVATIVES,
        "lambda x, y:⟦⇒ 2 *⟧ x.astype(y.dtype), AttentionInputs(*gradients), inputs",
        "contract",
    ),
    "gradient-of-values-twice-in-c": mutant(
        f"{C}/threads.h",
        "put(to.d_v.from(from), sums.d_v, until - from, V, T{⟦1⇒2⟧}, all.how);",
        "native",
    ),
    "no-delta": mutant(
        DERIVATIVES,
        "delta = row_dots(cotangents.out, self.residuals.out)⟦ - cotangents.lse⇒⟧",
        "contract",
    ),
    "parameters-forgotten": mutant(
        DERIVATIVES,
        "            ⟦⇒zeros = [0 * x for x in gradients[0]]\n"
        "            ⟧return _cast(⟦gradients⇒(zeros, *gradients[1:])⟧, point.inputs)\n"
        "\n"
        "        def rule",
        "contract",
        "scores",
    ),
}


def apply(name: str, root: Path) -> None:
    """Changes a copy of the project; raises ValueError if a text does not occur exactly once."""
    for change in MUTANTS[name].changes:
        path = root / change.file
        text = path.read_text(encoding="utf-8")
        if text.count(change.old) != 1 or change.old == change.new:
            count = text.count(change.old)
            raise ValueError(f"{name}: stands {count} times in {change.file}: {change.old!r}")
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")


def copy(root: Path) -> None:
    """Copies the project without its caches."""
    for name in COPIED:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=ignore)
        else:
            shutil.copy(source, root / name)


def first_failure(root: Path, tests: list[str]) -> str | None:
    """Returns the first test that fails, or None."""
    programs = str(ROOT / ".pytest_cache" / "programs")
    environment = {
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].split(" - ")[0]


def noticed(name: str) -> str | None:
    """Returns the test that notices a mutant, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy(root)
        apply(name, root)
        likely = [f"tests/test_{x}.py" for x in MUTANTS[name].noticed_by]
        # A copy is no repository: tests of the repository fail there without a mutant too.
        elsewhere = [f"--ignore=tests/test_{x}.py" for x in ("layers", "mutants", "packaging")]
        return first_failure(root, likely) or first_failure(root, elsewhere)


def fails_unchanged(test: str) -> bool:
    """Returns whether a test fails in a copy without a mutant, and so notices nothing."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy(Path(folder))
        return first_failure(Path(folder), ["-n0", test.split(" ", 1)[1]]) is not None


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each mutant; returns 1 if any was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MUTANTS))
    names = parser.parse_args(arguments).names or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        parser.error(f"no mutant {unknown[0]!r}; there are {', '.join(MUTANTS)}")
    alive = 0
    for name in names:
        began = time.monotonic()
        test = noticed(name)
        if test is not None and fails_unchanged(test):
            test = None
        alive += test is None
        print(f"{name:32} {time.monotonic() - began:6.0f} s  {test or 'NOT NOTICED'}", flush=True)
    print(f"{len(names) - alive} of {len(names)} noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
