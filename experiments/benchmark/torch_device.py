"""PyTorch's FlexAttention on a CUDA device; imported only if it competes."""

from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch._functorch import config  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
    create_block_mask,
    flex_attention,
)

from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.device_peers import Calls, Task


def flex(task: Task) -> Calls:
    """Builds a compiled call with a block mask made beforehand, or only its backward pass."""
    if not torch.cuda.is_available():
        raise NotImplementedError("torch finds no device of CUDA")
    query, key, value, d_out = map(_on_device(task.dtype), task.inputs)
    mask = _block_mask(task.case)
    torch._dynamo.reset()  # otherwise it stops compiling at the eighth mask
    attend = torch.compile(flex_attention)
    if not task.backward:

        def forward() -> Any:
            with torch.no_grad():
                return attend(query, key, value, block_mask=mask)

        return Calls(forward, _wait)
    config.donated_buffer = False  # the residuals are read more than once
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, block_mask=mask)
    return Calls(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True), _wait)


def _on_device(dtype: str) -> Callable[[Any], Any]:
    """Returns a function that moves an array to the GPU and transposes it to torch's layout, heads
    before tokens."""
    kind = getattr(torch, dtype)
    return lambda x: torch.from_numpy(x).to("cuda", kind).transpose(1, 2).contiguous()


def _block_mask(case: BenchmarkCase) -> Any:
    if case.pattern == "full":
        return None
    ids, window = torch.from_numpy(case.ids()[0]).to("cuda"), case.window
    rules: dict[str, Any] = {
        "causal": lambda b, h, q, k: k <= q,
        "window": lambda b, h, q, k: (k <= q) & (q - k <= window),
        "documents": lambda b, h, q, k: (k <= q) & (ids[q] == ids[k]),
    }
    return create_block_mask(rules[case.pattern], None, None, case.T, case.T, device="cuda")


def _wait(_: Any) -> None:
    torch.cuda.synchronize()
