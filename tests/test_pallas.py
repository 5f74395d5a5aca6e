"""The kernels that the name "pallas" selects."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jattn
from jattn import masks
from jattn.cache import DenseCache
from jattn.call import Call
from jattn.kernels.common.errors import CompilationFailed
from jattn.kernels.gpu.mosaic.kernels import ampere, blackwell, hopper, pallas
from jattn.kernels.gpu.mosaic.machine import device as gpu
from jattn.kernels.gpu.mosaic.machine import versions
from jattn.spec import Shapes
from tests.devices import pretend_gpu
from tests.kernels import made
from tests.test_hopper import HOPPER


SHAPES = Shapes((1,), 128, 128, 2, 1, 64, 64, jnp.dtype(jnp.bfloat16))
CALL = made(SHAPES, mask=masks.Causal())

pytestmark = pytest.mark.default_tiles


@pytest.mark.parametrize(
    ("capability", "expected"),  # without a GPU JAX compiles for a Hopper, too
    [("9.0", hopper), ("8.0", ampere), ("12.0", ampere), ("10.0", blackwell), (None, hopper)],
)
def test_which_kernel_runs(monkeypatch, capability, expected):
    on_gpu(monkeypatch, capability, products=True)
    for dtype in (jnp.bfloat16, jnp.float16):
        assert pallas._chosen(call_in(dtype)) is expected.KERNEL


@pytest.mark.parametrize(
    ("capability", "products", "dtype", "reason"),
    [
        ("9.0", True, "float32", "expected bfloat16 or float16, got float32"),
        ("10.3", True, "float32", "expected bfloat16 or float16, got float32"),
        ("8.6", False, "bfloat16", "expected JAX 0.11 or later"),
        ("7.5", True, "float16", r"expected compute capability 8\.0 or more, got 7\.5"),
    ],
)
def test_a_gpu_without_a_kernel_is_named(monkeypatch, capability, products, dtype, reason):
    on_gpu(monkeypatch, capability, products)
    with pytest.raises(CompilationFailed, match=reason):
        pallas._chosen(call_in(dtype))


def call_in(dtype: Any) -> Call:
    return dataclasses.replace(CALL, shapes=SHAPES._replace(dtype=jnp.dtype(dtype)))


def on_gpu(monkeypatch: Any, capability: str | None, products: bool) -> None:
    """Pretends that this machine has such a GPU, and that JAX has products of single warps or
    not."""
    if capability:
        pretend_gpu(monkeypatch, capability)
    for module in (ampere, versions):
        monkeypatch.setattr(module, "knows_ampere", lambda: products)


def gradients(implementation: str | None, q: Any, k: Any) -> Any:
    attend = functools.partial(jattn.attention, mask=masks.Causal(), implementation=implementation)
    return jax.grad(lambda q, k: attend(q, k, k).astype("float32").sum(), (0, 1))(q, k)


def test_caches_are_read_in_place(monkeypatch):
    cache = DenseCache.create(1, 128, 1, 64, dtype=jnp.bfloat16)
    call = dataclasses.replace(CALL, shapes=SHAPES._replace(T=1))
    monkeypatch.setattr(gpu, "device", lambda: None)
    reader = pallas.KERNEL.reader
    assert reader and reader.unreadable("cuda", call, cache) is None


def test_a_reason_where_none_can():
    q = jnp.ones((1, 8, 1, 300), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="'pallas': expected head sizes up to 256"):
        jattn.attention(q, q, q, implementation="pallas")


def test_it_is_lowered_for_cuda_on_a_machine_without():
    """`explain` lists the implementations that can run, and those of one GPU by their common
    name; each of them is lowered."""
    q = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    said = jattn.explain(q, q, q, mask=masks.Causal(), platform="cuda")
    can = [name for name, reason in said.items() if reason is None]
    assert can == ["pallas", "blockwise", "reference"]
    assert said.runs == "blockwise" and said.by_name == ("pallas",)
    assert "runs       blockwise; pallas has to be named" in str(said)
    assert "implementation='pallas', which chooses it" in (said["hopper"] or "")
    assert (said["cudnn"] or "").startswith("runs on a machine with a GPU: ")
    for name in (None, *can):
        traced = jax.jit(functools.partial(gradients, name)).trace(q, q[:, :, :1])
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        kernels = {x for x in HOPPER if x in lowered}
        assert kernels == (HOPPER if name == "pallas" else set())


def without_derivative(score: Any, *_: Any) -> Any:
    return lax.while_loop(lambda x: x < 0, lambda x: x + 1, score)


@pytest.mark.parametrize(
    ("capability", "sizes", "dtype", "score", "runs"),
    [
        ("9.0", (1, 1024, 1, 64), "bfloat16", None, "pallas"),
        ("9.0", (1, 1024, 1, 64), "bfloat16", without_derivative, "blockwise"),
        ("9.0", (1, 1024, 1, 64), "float32", None, "blockwise"),
        ("9.0", (1, 1024, 1, 300), "bfloat16", None, "blockwise"),
        ("9.0", (1, 512, 1, 64), "bfloat16", None, "blockwise"),
        ("8.0", (1, 1024, 1, 64), "bfloat16", None, "blockwise"),
    ],
)
def test_it_runs_on_a_hopper_where_cudnn_cannot(monkeypatch, capability, sizes, dtype, score, runs):
    on_gpu(monkeypatch, capability, products=True)
    x, options = jnp.ones(sizes, dtype), {"mask": masks.Dilated(3), "score": score}
    attend = jax.jit(functools.partial(jattn.attention, **options))
    lowered = attend.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("jattn_hopper_forward" in lowered) == (runs == "pallas")
    assert jattn.explain(x, x, x, platform="cuda", **options).runs == runs
