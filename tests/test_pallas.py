"""Which kernels the name "pallas" stands for."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import masks
from jattn.cache import DenseCache
from jattn.kernels.gpu import ampere, blackwell, hopper, pallas, registers, streams, triton
from jattn.spec import Shapes, make_spec
from tests.conftest import quick_jit
from tests.test_contract import assert_same
from tests.test_hopper import HOPPER, translated


SHAPES = Shapes((1,), 128, 128, 2, 1, 64, 64, jnp.dtype(jnp.bfloat16))
SPEC = make_spec(SHAPES, mask=masks.Causal())
TRITON = {"jattn_forward", "jattn_d_queries", "jattn_d_keys"}


@pytest.mark.parametrize(
    ("platform", "capability", "products", "dtype", "expected"),
    [
        ("cuda", "9.0", True, "bfloat16", hopper),
        ("cuda", "9.0", False, "float16", hopper),
        ("cuda", "9.0", True, "float32", triton),
        ("cuda", "8.0", True, "bfloat16", ampere),
        ("cuda", "12.0", True, "float16", ampere),
        ("cuda", "10.0", True, "float16", blackwell),
        ("cuda", "10.3", True, "float32", triton),
        ("cuda", "8.6", False, "bfloat16", triton),
        ("cuda", "7.5", True, "float16", triton),
        ("cuda", None, True, "bfloat16", hopper),  # JAX compiles for one, too
        ("rocm", None, True, "bfloat16", triton),
        ("cpu", "9.0", True, "bfloat16", triton),
    ],
)
def test_which_kernel_runs(monkeypatch, platform, capability, products, dtype, expected):
    device = capability and types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(streams, "device", lambda: device)
    monkeypatch.setattr(hopper, "_cuda_version", lambda: 13000)
    for module in (ampere, blackwell, registers):
        monkeypatch.setattr(module, "knows_ampere", lambda: products)
    shapes = SHAPES._replace(dtype=jnp.dtype(dtype))
    assert pallas._chosen(platform, SPEC, shapes) is expected


def gradients(q: Any, k: Any) -> Any:
    """Of a sum of results by queries and keys, which are the values too."""
    attend = functools.partial(jattn.attention, mask=masks.Causal(), implementation="pallas")
    return jax.grad(lambda q, k: attend(q, k, k).astype(jnp.float32).sum(), (0, 1))(q, k)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("dtype", "names"), [("bfloat16", HOPPER), ("float32", TRITON)])
def test_it_is_translated_for_a_hopper(dtype, names):
    q, k = (jnp.ones((1, 128, n, 64), dtype) for n in (2, 1))
    assert translated(gradients, (q, k)) == names


def test_a_cpu_interprets_those_in_triton():
    q, k = (jax.random.normal(jax.random.key(n), (1, 40, n, 16), jnp.bfloat16) for n in (2, 1))
    attend = functools.partial(jattn.attention, mask=masks.Causal())
    got, want = (
        quick_jit(functools.partial(attend, implementation=name))(q, k, k)
        for name in ("pallas", "triton")
    )
    assert_same(got, want)


def test_caches_are_read_by_those_in_mosaic(monkeypatch):
    cache = DenseCache.create(1, 128, 1, 64, dtype=jnp.bfloat16)
    call = SPEC, SHAPES._replace(T=1), cache
    monkeypatch.setattr(streams, "device", lambda: None)
    assert pallas.unreadable("cuda", *call) is None
    assert pallas.unreadable("cpu", *call) == "kernels in Triton take arrays"


def test_a_reason_where_none_can():
    q = jnp.ones((1, 8, 1, 300), jnp.float32)
    with pytest.raises(NotImplementedError, match="'pallas': expected head sizes up to 256"):
        jattn.attention(q, q, q, implementation="pallas")
