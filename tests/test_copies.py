"""Kernels for GPUs before Hopper, on a model of their copies by threads (`tests.copies`): they have
no races, and mistakes in their order are races."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax.experimental import pallas as pl

from jattn import masks, scores
from jattn.call import make
from jattn.kernels.gpu.mosaic.kernels import ampere, parameter_gradients
from jattn.kernels.gpu.mosaic.machine import streams
from jattn.spec import Shapes, Spec
from tests import copies
from tests import test_gpu_decode as gpu_decode
from tests.conftest import attention_arrays
from tests.copies import Race
from tests.kernels import exact_results, prepared
from tests.test_hopper import assert_within, normal


B, T, S, N, K, H = 1, 150, 200, 2, 1, 64
MASK = masks.Causal() & masks.Lengths(kv=140)
ARRAYS = attention_arrays((B, T, S, N, K, H, H), "float16")
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
    """Returns out, lse, and the gradients of parameters, query, key and value."""
    *qkv, _ = ARRAYS
    kernels = ampere.functions("cpu")
    spec = prepared(Spec(MASK, SCORES[name], H**-0.5, None, None), Shapes.of(qkv[0], qkv[2]))
    out, normalizer, _ = results = kernels.forward(spec, *qkv)
    d = copies.gradients(kernels, spec, ARRAYS, results)
    return out, normalizer.lse.swapaxes(1, 2), *d


DECODE = "jattn_mosaic_decode"
CALL = gpu_decode.DecodeCall("paged", 1, gpu_decode.causal)  # four copies for the keys of a tile


@functools.cache
def cache() -> Any:
    return gpu_decode.filled(CALL.kind)


def decoded() -> Any:
    query = gpu_decode.normal(gpu_decode.B, 1, gpu_decode.N, 64)
    rules = CALL.rules(1, cache().capacity)
    spec = make(query, cache(), **rules).prepared().spec
    out, normalizer = ampere.decode("cpu", spec, query, cache())
    return out, normalizer.lse.swapaxes(1, 2)


@pytest.mark.slow
def test_decoding_has_no_races():
    cache()  # filled by compiled programs
    with copies.by_threads() as machine:
        got = decoded()
    assert set(machine.waits) == {DECODE}
    assert_within(got, gpu_decode.formula(CALL))


@pytest.mark.one_in(5, slow=True)
@pytest.mark.parametrize("name", SCORES)
def test_kernels_have_no_races(name):
    with copies.by_threads() as machine:
        got = everything(name)
    kernels = PASSES if name == "none" else (*PASSES, D_PARAMETER)
    assert set(machine.waits) == {*kernels}
    assert_within(got, exact_results(MASK, SCORES[name], *ARRAYS))


PARAMETERS = "along_queries", "along_both", "by_distance"  # by block, by tile, by diagonal


@pytest.mark.one_in(3, slow=True)
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_place_for_tiles_is_released(monkeypatch, name):
    monkeypatch.setitem(parameter_gradients._MOST_BYTES, True, 0)
    with copies.by_threads():
        assert_within(everything(name), exact_results(MASK, SCORES[name], *ARRAYS))
        monkeypatch.setattr(streams.Stream, "release", lambda self: None)
        with pytest.raises(Race, match="written by who does not know that it was read"):
            everything(name)


class KernelRun(NamedTuple):
    """A kernel in a call with this score function.

    `needless` are those of its first four waits that other waits make unnecessary.
    """

    name: str
    score: str
    needless: tuple[int, ...] = ()

    def run(self) -> None:
        if self.name == DECODE:
            decoded()
        else:
            everything(self.score)


FORWARD, D_QUERIES, D_KEYS = (KernelRun(name, "none", (0,)) for name in PASSES)
BY_PARAMETER = [KernelRun(D_PARAMETER, score) for score in PARAMETERS]
# All but the forward kernel copy a tile while they compute one.
KERNELS = FORWARD, D_QUERIES, D_KEYS, *BY_PARAMETER, KernelRun(DECODE, "none", (0,))


class Without(copies.CopyMachine):
    """A machine on which one of a kernel's waits is missing."""

    def __init__(self, kernel: KernelRun, which: int):
        super().__init__()
        self.missing = kernel.name, which

    def wait(self, count: int) -> None:
        if (self.runs, self.waits[self.runs]) == self.missing:
            self.waits[self.runs] += 1
        else:
            super().wait(count)


@pytest.mark.one_in(7, slow=True)
@pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda x: f"{x.name.removeprefix('jattn_')}-{x.score}"
)
def test_a_wait_that_is_missing_is_a_race(kernel):
    cache()
    for which in {*range(4)} - {*kernel.needless}:
        with copies.by_threads(Without(kernel, which)):
            with pytest.raises(Race):
                kernel.run()


@pytest.mark.parametrize("index", [3, -1, (0, pl.ds(1, 2))])
def test_copies_from_outside_an_array_raise(index):
    """NumPy would count from the end, or copy less."""
    with pytest.raises(IndexError):
        copies.GlobalArray(np.ones((3, 2), np.float32)).at[index]
