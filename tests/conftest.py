"""A strict JAX for every test: no silent promotion, several devices, 64 bits to compare with."""

import functools
import gc
import importlib
import itertools
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any


# Programs are compiled in a hurry, with the same values to rounding, for most run once; users'
# optimisations stand in `users_jit`. One piece of code for each program instead of many: a process
# may hold only so many memory maps (65,530 by default on Linux), of which each piece takes some.
# On other devices compilers have to optimise, and cuDNN and scatters to add in one order.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_optimization_level=0"
        if os.environ["JAX_PLATFORMS"] == "cpu"
        else "--xla_gpu_deterministic_ops=true",
    )
).strip()
os.environ.setdefault("MPLBACKEND", "Agg")

# Compiled programs are kept, for all processes of a run, also those that tests start, and for the
# next run, which takes half the time.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "programs")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import jaxtyping
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


@functools.cache
def quick_options() -> dict[str, Any]:
    """Compiler options that make small programs on CPU quicker to compile still."""
    options = {"xla_cpu_use_fusion_emitters": False}
    if not ON_CPU:
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(1.0).compile()
    except jax.errors.JaxRuntimeError:  # newer versions have no such switch
        return {}
    return options


def quick_jit(function: Any, **options: Any) -> Any:
    """`jax.jit` for programs that run once: compiled in a hurry, same values to rounding."""
    return jax.jit(function, compiler_options=quick_options(), **options)


def users_jit(function: Any, **options: Any) -> Any:
    """`jax.jit` with all optimisations, as users' programs are compiled."""
    level = {"xla_backend_optimization_level": 3}
    return jax.jit(function, compiler_options=level, **options)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """On a GPU, tests of an implementation that this GPU has not are skipped, with its reason."""
    try:
        return (yield)
    except NotImplementedError as reason:
        if ON_CPU or not str(reason).startswith("implementation "):
            raise
        pytest.skip(str(reason))


def pytest_configure(config: Any) -> None:
    """Programs of versions long gone do not fill the disk."""
    programs = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    ours = programs.parent.name == ".pytest_cache" and not hasattr(config, "workerinput")
    if ours and programs.is_dir() and sum(x.stat().st_size for x in programs.iterdir()) > 4e9:
        shutil.rmtree(programs, ignore_errors=True)


def pytest_collection() -> None:
    """Tests wait for the kernel in C++, however busy the machine that builds it."""
    library: Any = importlib.import_module("jattn.kernels.cpu.library")
    library.PATIENCE = 600.0


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Within a file, tests of one case after one another: what they share is compiled once. Those
    that take minutes come first: at the end one would run alone."""
    selection: Any = importlib.import_module("tests.selection")
    selection.thin(items)

    def group(item: Any) -> tuple[Any, ...]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = (str(params.get(name, "")) for name in ("name", "implementation"))
        return item.get_closest_marker("minutes") is None, str(item.path), *case

    items.sort(key=group)


_tests_since_forgetting = itertools.count(1)


@pytest.fixture(autouse=True)
def _forget_compiled_programs():
    """Every so often: thousands of programs in memory would take gigabytes and every memory map."""
    yield
    if next(_tests_since_forgetting) % 400 == 0:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _small_tiles(request):
    """Cases of a few dozen keys go over several tiles, and by the dtype of a test every way: head
    by head, all heads at once, or short ones as single tiles.

    Tests marked `default_tiles` get the tiles that users get.
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
    sizes = {"row": row, "max_width": 32, "max_written_out": 5}
    with tuning.using(**sizes):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests that compile much and compute little."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def unchecked():
    """Switches the annotation checks off, so that the library's own messages are what raises."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
