"""What the registry expects of a kernel (`Kernel`), of a kernel that reads caches (`Reader`) and of
a kernel that sums weights (`WeightSums`).

A kernel's file ends with `KERNEL = Kernel(...)`, which holds the functions of that file. The
optional functions have defaults here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array

from jattn._pytree import pytree_dataclass, static_field
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common.vjp import AttentionVJP
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, refusal_of_normalizer


CacheResults = tuple[Array, Normalizer]
"""`out [B, T, N, V]` in the accumulation dtype, and the normalizers `[B, T, N]`."""


@dataclass(frozen=True)
class Reader:
    """A kernel that computes attention to a cache without copying the cache first.

    unreadable: `(platform, call, cache)` to the reason why it cannot read the cache; None if it
        can.
    read: `(platform, spec, query, cache)` to the attention of the queries to the cache.
    """

    unreadable: Callable[[str, Call, Cache], str | None]
    read: Callable[[str, Spec, Array, Cache], CacheResults]


def softmax_only(call: Call) -> str | None:
    """Returns why a kernel that computes only the softmax cannot compute a call."""
    return refusal_of_normalizer(call.spec)


@dataclass(frozen=True)
class Kernel:
    """One way of computing attention. Calls are passed to its functions in prepared form.

    Functions that return why something is impossible return None if it is possible.

    supports: returns why the kernel cannot compute a call, by the call's structure and shapes. The
        registry calls it while the call is traced. The registry does not call `unavailable` for a
        kernel that is traced with the program, such as cuDNN (see `registry.Row`): its `supports`
        has to inspect the machine too.
    functions: returns the kernel's functions for one of the platforms in its row of the registry.
    too_small: returns why the kernel is not worth using for a call so small. It still runs in calls
        that name it.
    unavailable: `(shapes, wait)`; returns why the kernel cannot run on this machine or in this
        program. The registry calls it when a program is lowered. With `wait` it may wait for what
        the kernel needs, such as a compiler that is still running.
    unselected: returns why None does not select the kernel for calls of these shapes on this
        machine, although they can name it. The registry calls it when a program is lowered.
    compilation_failure: returns why an earlier compilation for such a call failed. The kernel's
        functions then raise `CompilationFailed`, and a call that names no kernel gets the next one.
    reader: reads a cache in place. Without a reader, or if `unreadable` returns a reason, the
        kernel receives keys and values as arrays.
    normalizers: returns why the kernel cannot compute the call's normalizer. By default only the
        softmax is supported. The registry calls it before `supports`.
    """

    supports: Callable[[Call], str | None]
    functions: Callable[[str], AttentionVJP]
    too_small: Callable[[Call], str | None] = lambda call: None
    unavailable: Callable[[Shapes, bool], str | None] = lambda shapes, wait: None
    compilation_failure: Callable[[Call], str | None] = lambda call: None
    unselected: Callable[[Shapes], str | None] = lambda shapes: None
    reader: Reader | None = None
    normalizers: Callable[[Call], str | None] = softmax_only


@pytree_dataclass
class StatisticsRequest:
    """The requested statistics of a spec's weights.

    keys: a spec whose mask allows the pairs that `on_keys` sums; None without that sum.
    threshold: the weight above which `above` sums; None without that sum.
    """

    spec: Spec
    keys: Spec | None = None
    threshold: float | None = static_field(default=None)


class QueryStatistics(NamedTuple):
    """The statistics of each query's weights, `[B, N, T]`, see `jattn.statistics.Statistics`.

    `place` is −1 if all keys are masked. `on_keys` and `above` are None if not requested.
    """

    entropy: Any
    greatest: Any
    place: Any
    distance: Any
    on_keys: Array | None
    above: Array | None


@dataclass(frozen=True)
class WeightSums:
    """A kernel that sums weights over queries and over keys.

    unsupported: `(request, shapes)` to the reason why it cannot compute these sums; None if it can.
    run: `(request, query, key)` to `QueryStatistics` and the sum of the weights on each key,
        `[B, N, S]`.
    """

    unsupported: Callable[[StatisticsRequest, Shapes], str | None]
    run: Callable[[StatisticsRequest, Array, Array], tuple[Any, Array]]


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of linear attention over earlier tokens.

    unavailable: `(operands)` to the reason why it cannot run here; None if it can.
    run: `(formula, *operands)` to the results of `xla.linear.attend`, whose arguments these are.
    """

    unavailable: Callable[[Any], str | None]
    run: Callable[..., Any]
