"""PyTorch's attention as a competitor; imported only if torch is installed."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
    create_block_mask,
    flex_attention,
)

import jattn
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.peers import Runnable, dense_bias
from experiments.benchmark.rules import CAUSAL, BenchmarkRule


def _runnable(case: BenchmarkCase, backward: bool, attend: Callable[..., Any]) -> Runnable:
    tensors = [_heads_first(x, case.dtype) for x in case.inputs()]
    weights = _heads_first(case.inputs(seed=1)[0], case.dtype)

    def run() -> Any:
        if not backward:
            with torch.no_grad():
                return attend(*tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        (attend(*leaves) * weights).sum().backward()
        return [x.grad for x in leaves]

    def arrays(result: Any) -> list[np.ndarray]:
        tensors = result if backward else [result]
        return [x.float().transpose(1, 2).numpy() for x in tensors]

    start = time.perf_counter()
    run()
    return Runnable(run, time.perf_counter() - start, arrays=arrays)


def _heads_first(array: np.ndarray, dtype: str) -> Any:
    # through float32, as torch does not read NumPy's arrays of bfloat16
    tensor = torch.from_numpy(np.asarray(array, np.float32)).to(getattr(torch, dtype))
    return tensor.transpose(1, 2).contiguous()


def sdpa(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds `torch.nn.functional.scaled_dot_product_attention`, in its own layout."""
    if case.modifier == "softcap" or (case.modifier == "t5" and backward):
        return None
    options: dict[str, Any] = {"enable_gqa": case.key_heads != case.N}
    if case.pattern == "causal" and not case.modifier:
        options["is_causal"] = True
    elif case.pattern != "full" or case.modifier:
        options["attn_mask"] = torch.from_numpy(_mask(case))
    attend = torch.nn.functional.scaled_dot_product_attention
    return _runnable(case, backward, lambda *qkv: attend(*qkv, **options))


def _mask(case: BenchmarkCase) -> np.ndarray:
    mask = case.mask(jnp.asarray(case.ids()[:1]))
    allowed = None if mask is None else np.asarray(mask.dense(case.T, case.T))
    if not case.modifier:
        return np.array(allowed)
    bias = np.array(dense_bias(case, case.parameter()))
    return bias if allowed is None else np.where(allowed, bias, -np.inf).astype(np.float32)


def flex(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds compiled FlexAttention, which cannot train on a CPU; its block mask is made
    beforehand."""
    if backward or (case.pattern == "full" and not case.modifier):
        return None
    ids = torch.from_numpy(case.ids()[0])
    window = case.window
    rules = {
        "causal": lambda b, h, q, k: k <= q,
        "window": lambda b, h, q, k: (k <= q) & (q - k <= window),
        "documents": lambda b, h, q, k: (k <= q) & (ids[q] == ids[k]),
    }
    options: dict[str, Any] = {"enable_gqa": case.key_heads != case.N}
    if case.pattern != "full":
        options["block_mask"] = create_block_mask(
            rules[case.pattern], None, None, case.T, case.T, device="cpu"
        )
    if case.modifier:
        options["score_mod"] = _score(case)
    return _compiled(case, options)


def _compiled(case: BenchmarkCase, options: dict[str, Any]) -> Runnable | None:
    torch._dynamo.reset()  # otherwise it stops compiling at the eighth rule
    attend = torch.compile(flex_attention)
    try:
        return _runnable(case, False, lambda *qkv: attend(*qkv, **options))
    except Exception as error:  # its compiler raises errors of many kinds
        print(f"torch flex does not compile {case.name}: {type(error).__name__}", file=sys.stderr)
        return None


class Flex(NamedTuple):
    """FlexAttention with a rule: its compiled forward pass, the share of 128 × 128 tiles that its
    block mask skips, and the milliseconds that it takes to build the block mask."""

    runnable: Runnable | None
    skipped: float = 0.0
    block_mask_milliseconds: float = 0.0


def _closed_over(function: Callable[..., Any], operands: list[Any]) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(score, b, h, q, kv, *operands)

    return score_mod


def flex_with(rule: BenchmarkRule, case: BenchmarkCase) -> Flex:
    """Builds FlexAttention with a rule, on the inputs of a case."""
    function = rule.make(torch, case.T)
    options: dict[str, Any] = {}
    if rule.is_score:
        operands = [torch.from_numpy(x) for x in rule.operands(case.T)]
        options["score_mod"] = _closed_over(function, operands)
        if not rule.causal:
            return Flex(_compiled(case, options))
        function = CAUSAL.make(torch, case.T)
    sizes = None, None, case.T, case.T
    create_block_mask(function, *sizes, device="cpu")  # warms up
    start = time.perf_counter()
    mask = create_block_mask(function, *sizes, device="cpu")
    milliseconds = 1e3 * (time.perf_counter() - start)
    runnable = _compiled(case, options | {"block_mask": mask})
    return Flex(runnable, mask.sparsity() / 100, milliseconds)


def _score(case: BenchmarkCase) -> Callable[..., Any]:
    slopes = torch.from_numpy(np.array(jattn.scores.alibi_slopes(case.N)))
    if case.modifier == "alibi":
        return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()
    if case.modifier == "softcap":
        return lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)
    distances = jnp.arange(-case.T + 1, case.T)
    bucket = jattn.scores.relative_bucket(distances, 32, bidirectional=True, max_distance=128)
    table = torch.from_numpy(np.asarray(case.parameter())[np.asarray(bucket)].copy())
    return lambda s, b, h, q, k: s + table[k - q + case.T - 1, h]
