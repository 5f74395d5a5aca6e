"""A strict JAX for every test: no silent promotion, several devices, 64 bits to compare with."""

import contextlib
import gc
import importlib
import io
import os
import shutil
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any


# Programs are compiled without optimisations, which changes values by rounding only, as most run
# once; `users_jit` optimises. Each program is one piece of code, because a process may hold only
# 65,530 memory maps (the default on Linux), of which each piece takes some. Compilers for other
# devices have to optimise, and cuDNN and scatters have to add in one order. Emitters of fusions
# would double the time that a small program takes to compile; newer versions have no switch for
# them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else "",
        "--xla_backend_optimization_level=0"
        if os.environ["JAX_PLATFORMS"] == "cpu"
        else "--xla_gpu_deterministic_ops=true",
    )
).strip()
os.environ.setdefault("MPLBACKEND", "Agg")

# Compiled programs are cached for all processes of a run, including those that tests start, and
# for the next run, which takes half the time.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "programs")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import HealthCheck, settings


ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"

importlib.import_module("tests.typechecker")  # jaxtyping's import hook looks it up in `tests`
gc.set_threshold(100_000, 50, 1000)  # tracing makes many objects: a tenth of the suite's time

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if not ON_CPU:  # there products of float32 have the digits of TF32 by default
    jax.config.update("jax_default_matmul_precision", "highest")

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


quick_jit: Any = jax.jit  # by default programs are compiled without optimisations


def users_jit(function: Any, **options: Any) -> Any:
    """`jax.jit` with all optimisations, as users' programs are compiled."""
    usual: Any = {"xla_backend_optimization_level": 3}
    if ON_CPU and "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
        usual["xla_cpu_use_fusion_emitters"] = True
    return jax.jit(function, compiler_options=usual, **options)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """Skips, on a GPU, tests of implementations that this GPU does not support, with the reason."""
    try:
        return (yield)
    except NotImplementedError as reason:
        if ON_CPU or not str(reason).startswith("implementation "):
            raise
        pytest.skip(str(reason))


def pytest_configure(config: Any) -> None:
    """Removes the programs of earlier versions once they take 4 GB of disk."""
    programs = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    ours = programs.parent.name == ".pytest_cache" and not hasattr(config, "workerinput")
    if ours and programs.is_dir() and sum(x.stat().st_size for x in programs.iterdir()) > 4e9:
        shutil.rmtree(programs, ignore_errors=True)


def pytest_collection() -> None:
    """Lets tests wait for the kernel in C++, however busy the machine that builds it."""
    library: Any = importlib.import_module("jattn.kernels.cpu.library")
    library.PATIENCE = 600.0


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Runs tests of one case after one another, so that they share compiled programs.

    Tests that take minutes come first: at the end one would run alone.
    """
    selection: Any = importlib.import_module("tests.selection")
    selection.thin(items)

    def group(item: Any) -> tuple[Any, ...]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = (str(params.get(name, "")) for name in ("name", "implementation"))
        return item.get_closest_marker("minutes") is None, str(item.path), *case

    items.sort(key=group)


class _Forgetting:
    """Clears JAX's caches every 700 tests, or when called: thousands of programs would take
    gigabytes and every memory map."""

    def __init__(self):
        self.tests = 0

    def __call__(self) -> None:
        self.tests = 0
        jax.clear_caches()


@pytest.fixture(scope="session")
def forget_compiled_programs() -> _Forgetting:
    """Clears JAX's caches now, so that they last for the next 700 tests."""
    return _Forgetting()


@pytest.fixture(autouse=True)
def _few_compiled_programs(forget_compiled_programs):
    yield
    forget_compiled_programs.tests += 1
    if forget_compiled_programs.tests == 700:
        forget_compiled_programs()


@pytest.fixture(autouse=True)
def _small_tiles(request):
    """Splits a few dozen tokens into tiles, by the strategy that belongs to the test's dtype.

    Strategies: head by head, all heads at once, or short sequences as single tiles. Tests marked
    `default_tiles` get the tiles that users get.
    """
    if request.node.get_closest_marker("default_tiles"):
        yield
        return
    # Imported here because jaxtyping's hook must be in place first.
    tuning: Any = importlib.import_module("jattn.tuning")
    dtype = request.node.callspec.params.get("dtype") if hasattr(request.node, "callspec") else None
    row = tuning.TABLE["cpu"]._replace(
        max_untiled=15 * 16 if dtype in (None, "float32") else 0,
        small=16,
        large=16,
        largest=16,
        in_turn=dtype not in ("bfloat16", "float16"),
    )
    sizes = {"row": row, "max_width": 32, "max_unrolled_runs": 5, "row_scores": 1}
    with tuning.using(**sizes):
        yield


@contextlib.contextmanager
def switched_on(config: Any, option: str) -> Generator[None, None, None]:
    """Switches an option of JAX's or jaxtyping's configuration on."""
    previous = config.read(option) if config is jax.config else getattr(config, option)
    config.update(option, True)
    try:
        yield
    finally:
        config.update(option, previous)


@pytest.fixture(scope="module")
def quick_compilation():
    """Turns optimisations off for tests that compile much and compute little."""
    with switched_on(jax.config, "jax_disable_most_optimizations"):
        yield


@pytest.fixture
def unchecked():
    """Switches the annotation checks off, so that the library's own messages are what raises."""
    with switched_on(jaxtyping.config, "jaxtyping_disable"):
        yield


@pytest.fixture
def standard_promotion():
    """JAX's default promotion of dtypes and ranks, which functions of other libraries need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def plain_jax():
    """32 bits and JAX's own rules of promotion, as on the command line; compiles twice as fast."""
    with (
        switched_on(jax.config, "jax_disable_most_optimizations"),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture(scope="module")
def window():
    """A headless browser, in which the tests of a module open pages."""
    browsers: Any = importlib.import_module("tests.browser")
    if browsers.installed() is None:
        pytest.skip("no browser to open pages with: the system's package chromium has one")
    with contextlib.closing(browsers.Browser()) as browser:
        yield browser


@pytest.fixture(scope="session")
def demonstration(tmp_path_factory):
    """The demonstration of the translation experiment with the preset `tiny`: its directory and
    what it printed."""
    command: Any = importlib.import_module("experiments.translation.__main__")
    directory, printed = tmp_path_factory.mktemp("runs") / "demo", io.StringIO()
    jax.clear_caches()  # of programs with the smaller tiles that single tests have
    with plain_jax(), contextlib.redirect_stdout(printed):
        assert command.main(["--preset", "tiny", "--run", str(directory)]) == 0
    jax.clear_caches()
    return directory, printed.getvalue()


@pytest.fixture
def as_users_run_it():
    with plain_jax():
        yield


def expect(
    kind: type[Exception], says: str, function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Checks the kind of error of a call, and that its message has all parts between " | "."""
    with pytest.raises(kind) as raised:
        function(*args, **options)
    assert type(raised.value) is kind, "an error of ours, not a leak from below"
    message = str(raised.value)
    missing = [part for part in says.split(" | ") if part not in message]
    assert not missing, f"{missing} not in {message!r}"
    assert message.count("\n") <= 1, "one clear line"


def assert_trees_close(got: Any, want: Any, **tolerance: Any) -> None:
    """Compares the arrays of two trees by `numpy.testing.assert_allclose`."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


def normal_arrays(*shapes: tuple[int, ...], dtype: Any = "float64", seed: int = 0) -> list[Any]:
    """Normally distributed JAX arrays, drawn one after another."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def attention_arrays(
    sizes: tuple[int, int, int, int, int, int, int], dtype: Any = "float64", seed: int = 0
) -> list[Any]:
    """Random query, key, value and cotangent of out, for sizes B, T, S, N, K, H and V."""
    B, T, S, N, K, H, V = sizes
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, T, N, V)
    return normal_arrays(*shapes, dtype=dtype, seed=seed)


def out_and_gradients(function: Any, arguments: Any, *cotangents: Any) -> tuple[Any, ...]:
    """The results of a function, then the gradients of its arguments, in one flat tuple."""
    out, pull = jax.vjp(function, *arguments)
    results = out if isinstance(out, tuple) else (out,)
    return *results, *pull(cotangents if isinstance(out, tuple) else cotangents[0])
