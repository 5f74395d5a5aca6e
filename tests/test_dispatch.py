"""The implementation in a program depends on the platform that it is lowered for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jattn
from jattn import masks, tuning
from jattn.attention import IMPLEMENTATIONS
from jattn.kernels import registry
from jattn.kernels.common import lowering
from jattn.kernels.xla import blockwise
from tests.arrays import assert_equal
from tests.conftest import assert_trees_close, attention_arrays


PLATFORMS = (["cpu"], ["cuda"], ["rocm"], ["cpu", "cuda", "tpu"], ["tpu"], ["cpu", "cuda"])
every_platform = pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)


def arrays(T: int = 12, S: int = 9) -> list[jax.Array]:
    return attention_arrays((2, T, S, 4, 2, 8, 8), "float32")[:3]


def causal(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jattn.attention(q, k, v, mask=masks.Causal(), **options)


def gradients(function: Any) -> Any:
    """Returns a function for the value and all gradients of a weighted sum."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = function(q, k, v)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.value_and_grad(loss, (0, 1, 2))


@pytest.fixture
def traced(monkeypatch):
    """The platforms for which the blockwise implementation has been traced."""
    platforms: list[str] = []

    def functions(platform: str, *options: Any) -> Any:
        platforms.append(platform)
        return original(platform, *options)

    original = blockwise.functions
    counted = dataclasses.replace(blockwise.KERNEL, functions=functions)
    monkeypatch.setattr(blockwise, "KERNEL", counted)
    jax.clear_caches()
    yield platforms
    jax.clear_caches()


@pytest.mark.one_in(6)
@every_platform
def test_a_program_lowers_for_any_platform(platforms):
    exported = export.export(jax.jit(gradients(causal)), platforms=platforms)(*arrays())
    assert list(exported.platforms) == platforms
    if "cpu" in platforms:
        want = gradients(functools.partial(causal, implementation="reference"))(*arrays())
        assert_trees_close(exported.call(*arrays()), want, atol=3e-6)


@pytest.mark.one_in(3)
@every_platform
def test_only_what_is_lowered_is_traced(traced, platforms, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("asked for the default"))
    jax.eval_shape(causal, *arrays())
    assert traced == []
    export.export(jax.jit(causal), platforms=platforms)(*arrays())
    assert sorted(traced) == platforms


def test_each_platform_gets_the_first_supported_implementation(monkeypatch):
    """The kernel for TPUs, which a call has to name otherwise, is moved before blockwise."""
    rows = registry.KERNELS
    assert [*rows].index("blockwise") < [*rows].index("tpu")
    monkeypatch.setattr(registry, "KERNELS", {"tpu": rows["tpu"], **rows})

    def kernels(*platforms: str, **options: Any) -> int:
        call = jax.jit(functools.partial(causal, **options))
        program = export.export(call, platforms=platforms)(*arrays())
        return program.mlir_module().count("tpu_custom_call")

    assert kernels("tpu") == 1
    assert kernels("tpu", implementation="tpu") == 1
    assert kernels("tpu", implementation="blockwise") == 0
    assert kernels("cpu") == kernels("cuda") == 0
    assert kernels("cpu", "cuda", "tpu") == 1


@pytest.mark.default_tiles
def test_heads_are_looped_over_on_a_cpu_only(monkeypatch):
    monkeypatch.setattr(tuning, "TABLE", {"cpu": tuning.TABLE["cpu"]._replace(max_untiled=0)})
    monkeypatch.setattr(tuning, "DEFAULT", tuning.Sizes(max_untiled=0))

    def loops(platform: str) -> int:
        call = jax.jit(jattn.attention)
        return export.export(call, platforms=[platform])(*arrays()).mlir_module().count("while")

    assert loops("cpu") > loops("cuda") == 0


def test_a_kernel_named_for_another_platform_gives_its_reason():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    call = functools.partial(causal, implementation="pallas")
    for function in (call, jax.jit(call), gradients(call)):
        with pytest.raises(NotImplementedError, match=r"'pallas': is for cuda, .* for cpu"):
            function(q, k, v)


def test_explain_says_so_for_each_platform():
    q, k, v = arrays()
    on_cpu = jattn.explain(q, k, v)
    assert on_cpu == jattn.explain(q, k, v, platform="cpu")
    assert list(on_cpu) == list(IMPLEMENTATIONS)
    on_tpus = jattn.explain(q, k, v, platform="tpu")
    assert on_tpus["native"] == "is for cpu, the program is for tpu"
    assert on_tpus["tpu"] is None and on_tpus.runs == "blockwise"
    assert on_cpu["cudnn"] == "expected bfloat16 or float16, got float32"
    assert on_cpu["blockwise"] is None
    assert on_cpu["reference"] is None
    traced: dict[str, Any] = {}
    jax.eval_shape(lambda *qkv: traced.update(jattn.explain(*qkv)) or qkv[0], q, k, v)
    assert traced == on_cpu


def test_contexts_of_the_call_hold_when_it_is_lowered():
    q, k, v = arrays()

    def call(q: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return causal(q, k, v, implementation="blockwise")

    assert "HIGHEST" in jax.jit(call).lower(q).as_text()
    with jax.enable_x64(False):
        lowered = jax.jit(lambda q: causal(q, k, v, implementation="blockwise")).trace(q)
    assert "f64" not in lowered.lower().as_text()


def by_platform(x: Any, y: Any) -> Any:
    """Returns x times 2 on a CPU, 3 on a TPU, 5 elsewhere; and y."""
    scaled = lambda platform, x, y: (x * {"cpu": 2, "tpu": 3}.get(platform, 5), y)  # noqa: E731
    return lowering.platform_dependent(scaled, (x, y), x, y)


def test_one_operation_under_the_transformations():
    x, y = jnp.arange(3), jnp.arange(2.0)
    for wrap in (jax.jit, jax.checkpoint, lambda f: f):
        assert_equal(wrap(by_platform)(x, y), (2 * x, y))
    for axes in ((0, None), (None, 0), (0, 0)):
        xs = jnp.stack([x, x + 1]) if axes[0] == 0 else x
        ys = jnp.stack([y, y + 1]) if axes[1] == 0 else y
        want = jnp.broadcast_to(2 * xs, (2, 3)), jnp.broadcast_to(ys, (2, 2))
        assert_equal(jax.vmap(by_platform, axes)(xs, ys), want)
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.jvp(lambda y: by_platform(x, y)[1], (y,), (y,))


def test_one_operation_for_several_platforms():
    program = export.export(jax.jit(by_platform), platforms=["cpu", "tpu", "cuda"])
    exported = program(jnp.arange(3), jnp.arange(2.0))
    np.testing.assert_array_equal(exported.call(jnp.arange(3), jnp.arange(2.0))[0], [0, 2, 4])
    for factor in (2, 3, 5):
        assert f"dense<{factor}>" in exported.mlir_module()


@pytest.mark.default_tiles
def test_sizes_are_those_of_the_device():
    assert tuning.sizes("cpu") == tuning.TABLE["cpu"]
    assert tuning.sizes("tpu") == tuning.DEFAULT  # none here
    with tuning.using(row=tuning.Sizes(small=32)):
        assert tuning.sizes("cpu").small == tuning.sizes("tpu").small == 32
    assert tuning.sizes("cpu") == tuning.TABLE["cpu"]


@pytest.mark.default_tiles
def test_other_sizes_make_another_program():
    q, k, v = arrays(600, 600)
    whole = tuning.Sizes(max_untiled=600 * 600)
    tiled = tuning.Sizes(max_untiled=0, large=64, small=64)

    def length(row: tuning.Sizes) -> int:
        with tuning.using(row=row):
            call = functools.partial(causal, implementation="blockwise")
            return len(jax.jit(call).lower(q, k, v).as_text())

    assert length(whole) != length(tiled) == length(tiled)
