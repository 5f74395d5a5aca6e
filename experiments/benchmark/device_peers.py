"""Competitors on a device: each turns a task into calls that can be started without waiting.

A competitor that raises an error when it is built or first run is left out, for that reason.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.benchmark.cases import BenchmarkCase
from experiments.offline import peers


class Task(NamedTuple):
    """A case, one of its two passes, and its inputs in float32: query, key, value and the gradient
    of the output."""

    case: BenchmarkCase
    backward: bool
    dtype: str
    inputs: tuple[np.ndarray, ...]

    def in_jax(self) -> list[jax.Array]:
        """Returns the inputs as JAX arrays of the task's dtype."""
        return [jnp.asarray(x, self.dtype) for x in self.inputs]


class Calls(NamedTuple):
    """Functions to run a competitor: `start()` begins a call and on a GPU returns before it ends;
    `wait(x)`, with the result of the last call, waits until that and all earlier calls end."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any]


Peer = Callable[[Task], Calls]
_INTERPRETED_ON_CPUS = "pallas", "ampere", "hopper", "blackwell", "tpu"


def in_jax(task: Task, attend: Callable[..., Any], *rest: Any) -> Calls:
    """Compiles `attend(query, key, value, *rest)` or, for a backward task, only its backward pass
    from saved residuals, with the gradients of query, key and value."""
    *qkv, d_out = task.in_jax()
    if not task.backward:
        program = jax.jit(attend).lower(*qkv, *rest).compile()
        return Calls(lambda: program(*qkv, *rest), jax.block_until_ready)

    @jax.jit
    def forward(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return jax.vjp(lambda *primals: attend(*primals, *rest), query, key, value)

    _, pull = jax.block_until_ready(forward(*qkv, *rest))
    back = jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile()
    return Calls(lambda: back(pull, d_out), jax.block_until_ready)


def ours(implementation: str, task: Task) -> Calls:
    """Builds a named implementation of `jattn.attention`."""
    if jax.default_backend() == "cpu" and implementation in _INTERPRETED_ON_CPUS:
        raise NotImplementedError("a CPU would only interpret it")
    case, ids = task.case, jnp.asarray(task.case.ids())
    reasons = jattn.explain(*task.in_jax()[:3], mask=case.mask(ids))
    if reasons[implementation]:
        raise NotImplementedError(reasons[implementation])

    def attend(query: Any, key: Any, value: Any, ids: Any) -> Any:
        mask = case.mask(ids)
        return jattn.attention(query, key, value, mask=mask, implementation=implementation)

    return in_jax(task, attend, ids)


def jax_nn(implementation: Literal["cudnn", "xla"], task: Task) -> Calls:
    """Builds `jax.nn.dot_product_attention` by "cudnn" or "xla", with its flags for the mask. There
    is no flag for documents: XLA gets them as an array."""
    case = task.case
    if case.pattern == "documents":
        if implementation == "cudnn":
            raise NotImplementedError("it has no flag for documents")
        return with_dense_mask(implementation, task)
    flags: dict[str, Any] = {"is_causal": case.pattern != "full"}
    if case.pattern == "window":
        flags["local_window_size"] = (case.window, 0)
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation, **flags)
    return in_jax(task, attend)


def with_dense_mask(implementation: Literal["cudnn", "xla"], task: Task) -> Calls:
    """Builds `jax.nn.dot_product_attention` with the mask as an array that is made beforehand."""
    case = task.case
    if case.pattern in ("full", "causal"):
        raise NotImplementedError(f"a {case.pattern} mask needs no array")
    rule: Any = case.mask(jnp.asarray(case.ids()[:1]))
    dense = jax.jit(lambda: rule.dense(case.T, case.T).reshape(1, 1, case.T, case.T))()

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, implementation=implementation
        )

    return in_jax(task, attend, dense)


def mgpu(task: Task) -> Calls:
    """Builds JAX's own kernel in Mosaic, in float16, the dtype of its scratch memory; it has no
    gradients of causal attention and no scale argument."""
    case = task.case
    if case.pattern not in ("full", "causal"):
        raise NotImplementedError(f"it has no mask for {case.pattern}")
    config = peers.mgpu_config(case.H, case.pattern == "causal")

    def attend(query: Any, key: Any, value: Any) -> Any:
        return peers.mgpu().attention(query, key, value, config)

    return in_jax(task._replace(dtype="float16"), attend)


def flex(task: Task) -> Calls:
    """Builds PyTorch's compiled FlexAttention on a CUDA device."""
    return importlib.import_module("experiments.benchmark.torch_device").flex(task)


DENSE, CUDNN, FLEX = "cudnn dense", "cudnn flags", "torch flex"
PEERS: dict[str, Peer] = {
    CUDNN: functools.partial(jax_nn, "cudnn"),
    DENSE: functools.partial(with_dense_mask, "cudnn"),
    "jax.nn": functools.partial(jax_nn, "xla"),
    FLEX: flex,
    "jax mgpu": mgpu,
}
