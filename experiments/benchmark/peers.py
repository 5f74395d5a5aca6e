"""The competitors: each turns a case into a forward and a forward-and-backward function.

A competitor returns None for a case that it does not support. torch is optional.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from experiments.benchmark.cases import BenchmarkCase


def _from_jax(result: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(result) if x.ndim]


class Runnable(NamedTuple):
    """A function to time, with the compile time and temporary memory of its program if known.

    `arrays` converts what `run` returns, the output or the gradients of query, key and value, to
    float32 arrays `[B, T, N, H]`."""

    run: Callable[[], Any]  # returns when the result is ready
    compile_seconds: float = 0.0
    temporary_bytes: int | None = None
    arrays: Callable[[Any], list[np.ndarray]] = _from_jax


Peer = Callable[[BenchmarkCase, bool], Runnable | None]


def compiled(function: Callable[..., Any], *arguments: Any) -> Runnable:
    """Compiles a function for these arguments."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    analysis: Any = program.memory_analysis()
    memory = None if analysis is None else analysis.temp_size_in_bytes
    return Runnable(lambda: jax.block_until_ready(program(*arguments)), seconds, memory)


def _jax_runnable(case: BenchmarkCase, backward: bool, attend: Callable[..., Any]) -> Runnable:
    """Builds `attend(q, k, v, ids, parameter)` forward, or with all gradients of a weighted
    sum."""
    arguments = [jnp.asarray(x) for x in (*case.inputs(), case.ids())]
    parameter = case.parameter()
    arguments.append(jnp.zeros(()) if parameter is None else jnp.asarray(parameter))
    if not backward:
        return compiled(attend, *arguments)
    argnums = (0, 1, 2) if parameter is None else (0, 1, 2, 4)
    return with_gradients(case, attend, arguments, argnums)


def with_gradients(
    case: BenchmarkCase, attend: Callable[..., Any], arguments: list[Any], argnums: tuple[int, ...]
) -> Runnable:
    """Builds a weighted sum of `attend(*arguments)` and its gradients by `argnums`."""
    weights = jnp.asarray(case.inputs(seed=1)[0])

    def loss(*arguments: Any) -> Any:
        return jnp.vdot(attend(*arguments[:-1]), arguments[-1])

    return compiled(jax.value_and_grad(loss, argnums), *arguments, weights)


def ours(case: BenchmarkCase, backward: bool, implementation: str | None = None) -> Runnable:
    """Builds `jattn.attention`; by default it chooses the implementation. Decoding uses a cache."""
    if case.S and not case.plain:
        query, *keys_and_values = map(jnp.asarray, case.inputs())
        cache = jax.block_until_ready(jattn.cache.DenseCache.of(*keys_and_values))
        return compiled(jattn.attention, query, cache)

    def attend(q: Any, k: Any, v: Any, ids: Any, parameter: Any) -> Any:
        rules = {"mask": case.mask(ids), "score": case.score(parameter)}
        return jattn.attention(q, k, v, implementation=implementation, **rules)

    return _jax_runnable(case, backward, attend)


def blockwise(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds `jattn.attention` by XLA alone, which does not read caches."""
    return None if case.S and not case.plain else ours(case, backward, "blockwise")


def dense_bias(case: BenchmarkCase, parameter: Any) -> Any:
    """Returns the bias of ALiBi or T5, `[1, N, T, S]`, for peers without score functions."""
    distance = jnp.arange(case.T)[None, :] - jnp.arange(case.T)[:, None]
    if case.modifier == "alibi":
        slopes = jattn.scores.alibi_slopes(case.N)
        return -slopes[None, :, None, None] * jnp.abs(distance)
    bucket = jattn.scores.relative_bucket(distance, 32, bidirectional=True, max_distance=128)
    return jnp.moveaxis(parameter[bucket], -1, 0)[None]


def jax_nn(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds `jax.nn.dot_product_attention`."""
    if case.modifier == "softcap":
        return None

    def attend(q: Any, k: Any, v: Any, ids: Any, parameter: Any) -> Any:
        options: dict[str, Any] = {"is_causal": case.pattern != "full"}
        if case.pattern == "window":
            options["local_window_size"] = (case.window, 0)
        if case.pattern == "documents":
            options["mask"] = ids[:, None, :, None] == ids[:, None, None, :]
        if case.modifier:
            options["bias"] = dense_bias(case, parameter)
        return jax.nn.dot_product_attention(q, k, v, **options)

    return _jax_runnable(case, backward, attend)


def flax_nnx(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds `flax.nnx.dot_product_attention`, for the cases that it supports directly."""
    if case.modifier or case.key_heads != case.N or case.pattern not in ("full", "causal"):
        return None

    def attend(q: Any, k: Any, v: Any, ids: Any, parameter: Any) -> Any:
        dense = None if case.pattern == "full" else jnp.tril(jnp.ones((1, 1, case.T, case.T), bool))
        return nnx.dot_product_attention(q, k, v, mask=dense)

    return _jax_runnable(case, backward, attend)
