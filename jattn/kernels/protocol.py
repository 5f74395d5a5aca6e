"""The interfaces of the registry's tables: kernels, readers of caches and sums of weights.

The file of a kernel ends with `KERNEL = Kernel(...)`, made of the functions of that file. Functions
that a kernel does not need have defaults here.
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
from jattn.spec import Shapes, Spec


CacheResults = tuple[Array, Normalizer]
"""`out [B, T, N, V]` in the dtype of sums, and normalizers `[B, T, N]`."""


@dataclass(frozen=True)
class Reader:
    """An implementation that reads a cache in place.

    unreadable: returns why it cannot read a cache for a call, on a platform; None if it can.
    read: computes a spec's attention of queries to the cache, on a platform.
    """

    unreadable: Callable[[str, Call, Cache], str | None]
    read: Callable[[str, Spec, Array, Cache], CacheResults]


@dataclass(frozen=True)
class Kernel:
    """One way of computing attention. Its functions receive prepared calls.

    supports: returns why the kernel cannot compute a call. The registry calls it while the call is
        traced; it inspects structure and shapes. A kernel that is traced with the program (see
        `registry.Row`) also inspects the machine, because the registry does not call `unavailable`
        for it later: cuDNN does so.
    functions: returns the kernel's functions for one of the platforms of its row.
    too_small: returns why a call is too small for the kernel. A call that names no kernel then
        takes another one.
    unavailable: returns why the kernel cannot run on this machine or in this program. The registry
        calls it when a program is lowered. It may wait for resources of the kernel if its second
        argument is True.
    compilation_failure: returns why an earlier attempt to compile code for such a call failed. The
        kernel's functions then raise `CompilationFailed`, and a call that names no kernel takes the
        next one.
    reader: reads a cache in place. Without it, and if it returns a reason, the kernel receives keys
        and values as arrays.
    """

    supports: Callable[[Call], str | None]
    functions: Callable[[str], AttentionVJP]
    too_small: Callable[[Call], str | None] = lambda call: None
    unavailable: Callable[[Shapes, bool], str | None] = lambda shapes, wait: None
    compilation_failure: Callable[[Call], str | None] = lambda call: None
    reader: Reader | None = None


@pytree_dataclass
class StatisticsRequest:
    """A question about the weights of a spec: the sum of each row over the pairs that the mask of
    the spec `keys` allows, and over the weights above a threshold."""

    spec: Spec
    keys: Spec | None = None
    threshold: float | None = static_field(default=None)


class QueryStatistics(NamedTuple):
    """The answers for each query, `[B, N, T]`.

    `place` is −1 if no key is attended. `on_keys` and `above` are None if not requested.
    """

    entropy: Any
    greatest: Any
    place: Any
    distance: Any
    on_keys: Array | None
    above: Array | None


@dataclass(frozen=True)
class WeightSums:
    """An implementation that sums weights over queries and over keys.

    unsupported: returns why it cannot answer a question about a call of these sizes; None if it
        can.
    run: returns the sums for each query and for each key, see `xla.statistics`.
    """

    unsupported: Callable[[StatisticsRequest, Shapes], str | None]
    run: Callable[[StatisticsRequest, Array, Array], tuple[Any, Array]]
