"""The competitors: each turns a case into a forward and a forward-and-backward function.

A competitor that cannot do a case returns None for it. torch is optional.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jattn
from experiments.benchmark.cases import Case


class Runnable(NamedTuple):
    """A function to be timed, and what is known of its compiled program."""

    run: Callable[[], Any]  # returns when the result is there
    compile_seconds: float = 0.0
    temporary_bytes: int | None = None


Peer = Callable[[Case, bool], Runnable | None]


def compiled(function: Callable[..., Any], *arguments: Any) -> Runnable:
    """A function of arrays, compiled for these."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    analysis: Any = program.memory_analysis()
    memory = None if analysis is None else analysis.temp_size_in_bytes
    return Runnable(lambda: jax.block_until_ready(program(*arguments)), seconds, memory)


def _jax_runnable(case: Case, backward: bool, attend: Callable[..., Any]) -> Runnable:
    """`attend(q, k, v, ids, parameter)` forward, or with all gradients of a weighted sum."""
    arguments = [jnp.asarray(x) for x in (*case.inputs(), case.ids())]
    parameter = case.parameter()
    arguments.append(jnp.zeros(()) if parameter is None else jnp.asarray(parameter))
    if not backward:
        return compiled(attend, *arguments)
    wanted = (0, 1, 2) if parameter is None else (0, 1, 2, 4)
    return with_gradients(case, attend, arguments, wanted)


def with_gradients(
    case: Case, attend: Callable[..., Any], arguments: list[Any], wanted: tuple[int, ...]
) -> Runnable:
    """A weighted sum of what `attend(*arguments)` gives, with its gradients of those wanted."""
    weights = jnp.asarray(case.inputs(seed=1)[0])

    def loss(*arguments: Any) -> Any:
        return jnp.vdot(attend(*arguments[:-1]), arguments[-1])

    return compiled(jax.value_and_grad(loss, wanted), *arguments, weights)


def ours(case: Case, backward: bool, implementation: str | None = None) -> Runnable:
    """`jattn.attention`, with the implementation that it chooses; in decoding, of a cache."""
    if case.S and not case.plain:
        query, *held = map(jnp.asarray, case.inputs())
        cache = jax.block_until_ready(jattn.cache.DenseCache.of(*held))
        return compiled(jattn.attention, query, cache)

    def attend(q: Any, k: Any, v: Any, ids: Any, parameter: Any) -> Any:
        rules = {"mask": case.mask(ids), "score": case.score(parameter)}
        return jattn.attention(q, k, v, implementation=implementation, **rules)

    return _jax_runnable(case, backward, attend)


def blockwise(case: Case, backward: bool) -> Runnable | None:
    """`jattn.attention` in XLA alone; it does not read caches."""
    return None if case.S and not case.plain else ours(case, backward, "blockwise")


def dense_bias(case: Case, parameter: Any) -> Any:
    """What ALiBi and T5 add, `[1, N, T, S]`, as peers without score functions need it."""
    distance = jnp.arange(case.T)[None, :] - jnp.arange(case.T)[:, None]
    if case.modifier == "alibi":
        slopes = jattn.scores.alibi_slopes(case.N)
        return -slopes[None, :, None, None] * jnp.abs(distance)
    bucket = jattn.scores.relative_bucket(distance, 32, bidirectional=True, max_distance=128)
    return jnp.moveaxis(parameter[bucket], -1, 0)[None]


def jax_nn(case: Case, backward: bool) -> Runnable | None:
    """`jax.nn.dot_product_attention`."""
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


def flax_nnx(case: Case, backward: bool) -> Runnable | None:
    """`flax.nnx.dot_product_attention`, for the cases it is meant for."""
    if case.modifier or case.key_heads != case.N or case.pattern not in ("full", "causal"):
        return None

    def attend(q: Any, k: Any, v: Any, ids: Any, parameter: Any) -> Any:
        dense = None if case.pattern == "full" else jnp.tril(jnp.ones((1, 1, case.T, case.T), bool))
        return nnx.dot_product_attention(q, k, v, mask=dense)

    return _jax_runnable(case, backward, attend)
