"""Kernels for GPUs before Hopper, on a model of their copies by threads (`tests.copies`): they have
no races, and mistakes in their order are races."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jattn
from jattn import masks, scores
from jattn.call import make
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.gpu.mosaic.kernels import ampere, parameter_gradients
from jattn.kernels.gpu.mosaic.machine import streams
from jattn.spec import Shapes, Spec
from tests import copies
from tests import test_gpu_decode as gpu_decode
from tests.copies import Place, Race, Warpgroup
from tests.kernels import prepared
from tests.oracle import error
from tests.test_contract import assert_same
from tests.test_hopper import LIMITS


B, T, S, N, K, H = 2, 150, 200, 2, 1, 64
RNG = np.random.default_rng(0)
MASK = masks.Causal() & masks.Lengths(kv=jnp.array([200, 60]))


def normal(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape), jnp.float16)


GIVEN = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, T, N, H)
SCORES = {
    "none": None,
    "along_queries": scores.Bias(normal(B, 1, T, 1)),
    "along_keys": scores.Bias(normal(1, N, 1, S)),
    "along_both": scores.Bias(normal(1, 1, T, S)),
    "by_distance": scores.RelativeBias(normal(32, N)),
}
PASSES = "jattn_ampere_forward", "jattn_ampere_d_queries", "jattn_ampere_d_keys"
D_PARAMETER = "jattn_mosaic_d_parameter"


def everything(name: str) -> Any:
    """out, lse, and the gradients of parameters, query, key and value, with a score function."""
    query, key, value, d_out = GIVEN
    kernels = ampere.functions("cpu")
    spec = prepared(Spec(MASK, SCORES[name], H**-0.5, None, None), Shapes.of(query, value))
    out, normalizer, finite = kernels.forward(spec, query, key, value)
    d_out = d_out.astype(out.dtype)
    per_query = PerQuery.of(query, d_out, normalizer, jnp.sum(out * d_out, axis=-1))
    d_parameters, *d_qkv = kernels.backward(spec, per_query, key, value, finite)
    return out, normalizer.lse.swapaxes(1, 2), *d_parameters, *d_qkv


def reference(name: str) -> Any:
    """The same by the formula in float64."""
    *qkv, d_out = (x.astype(jnp.float64) for x in GIVEN)
    attend = functools.partial(
        jattn.attention, mask=MASK, return_lse=True, implementation="reference"
    )
    (out, lse), pull = jax.vjp(lambda x, *qkv: attend(*qkv, score=x), SCORES[name], *qkv)
    return out, lse, *jax.tree.leaves(pull((d_out, jnp.zeros_like(lse))))


DECODE = "jattn_mosaic_decode"
CALL = gpu_decode.Call("paged", 1, gpu_decode.causal)  # four copies for the keys of a tile


@pytest.fixture(autouse=True, scope="module")
def _cache():
    """Filled by compiled programs."""
    cache()


@functools.cache
def cache() -> Any:
    return gpu_decode.filled(CALL.kind)


def decoded() -> Any:
    """out and lse of a step of decoding."""
    query, held = gpu_decode.normal(gpu_decode.B, 1, gpu_decode.N, 64), cache()
    rules = CALL.rules(1, held.capacity, slice(None), jnp.bfloat16)
    out, normalizer = ampere.decode("cpu", make(query, held, **rules).prepared().spec, query, held)
    return out, normalizer.lse.swapaxes(1, 2)


@pytest.mark.slow
def test_decoding_has_no_races():
    with copies.by_threads() as machine:
        got = decoded()
    assert set(machine.waits) == {DECODE}
    gpu_decode.assert_right(CALL, got)


def with_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parameter_gradients._MOST_BYTES, True, 0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", SCORES)
def test_kernels_have_no_races(name):
    """And compute what they should."""
    with copies.by_threads() as machine:
        got = everything(name)
    kernels = PASSES if name == "none" else (*PASSES, D_PARAMETER)
    assert set(machine.waits) == {*kernels}
    for x, y, limit in zip(got, reference(name), (*LIMITS[:2], *LIMITS[2:] * 4), strict=False):
        assert error(x, y) <= limit


PARAMETERS = "along_queries", "along_both", "by_distance"  # by block, by tile, by diagonal


@pytest.mark.one_in(3, slow=True)
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_place_for_tiles_is_released(monkeypatch, name):
    with copies.by_threads():
        want = everything(name)
        with_one_place(monkeypatch)
        assert_same(everything(name), want)
        monkeypatch.setattr(streams.Stream, "release", lambda self: None)
        with pytest.raises(Race, match="other warps may still read"):
            everything(name)


class Kernel(NamedTuple):
    """By its name, in a call with such a score function; which of its first four waits are for
    what others wait for too."""

    name: str
    score: str
    needless: tuple[int, ...] = ()

    def run(self) -> None:
        if self.name == DECODE:
            decoded()
        else:
            everything(self.score)


FORWARD, D_QUERIES, D_KEYS = (Kernel(name, "none", (0,)) for name in PASSES)
DECODING = Kernel(DECODE, "none", (0,))
BY_BLOCK, BY_TILE, BY_DIAGONAL = (Kernel(D_PARAMETER, score) for score in PARAMETERS)
AHEAD = (
    D_QUERIES,
    D_KEYS,
    BY_BLOCK,
    BY_TILE,
    BY_DIAGONAL,
    DECODING,
)  # copy a tile while they compute one


class Without(copies.Machine):
    """A machine on which one of a kernel's waits is missing."""

    def __init__(self, kernel: Kernel, which: int):
        super().__init__()
        self.missing = kernel.name, which

    def wait(self, count: int) -> None:
        if (self.runs, self.waits[self.runs]) == self.missing:
            self.waits[self.runs] += 1
        else:
            super().wait(count)


def by_kernel(kernels: tuple[Kernel, ...]) -> Any:
    names = [f"{x.name.removeprefix('jattn_')}-{x.score}" for x in kernels]
    return pytest.mark.parametrize("kernel", kernels, ids=names)


@pytest.mark.one_in(7)
@by_kernel((FORWARD, *AHEAD))
def test_a_wait_that_is_missing_is_a_race(kernel):
    for which in {*range(4)} - {*kernel.needless}:
        with copies.by_threads(Without(kernel, which)):
            with pytest.raises(Race):
                kernel.run()


def test_nothing_is_under_way_at_the_end():
    """A tile that nobody waits for."""
    group = Warpgroup()
    place, source = Place(group, (2,), np.float32), copies.Global(np.ones((3, 2), np.float32))
    with pytest.raises(Race, match="to which nothing was copied"):
        place[...]
    group.copy(source.at[1], place)
    with pytest.raises(Race, match="ends while copies are under way"):
        group.end()
    group.wait(1)
    with pytest.raises(Race, match="read while a copy"):
        place[...]
    group.wait(0)
    group.end()
    np.testing.assert_array_equal(place[...], np.ones(2))


@pytest.mark.parametrize("index", [3, -1, (0, pl.ds(1, 2))])
def test_what_lies_outside_is_not_copied(index):
    """NumPy would count from the end, or copy less."""
    with pytest.raises(IndexError):
        copies.Global(np.ones((3, 2), np.float32)).at[index]
