"""What a kernel is, and what else the registry's tables hold.

The file of a kernel ends with `KERNEL = Kernel(...)`, made of the functions of that file. Those
that a kernel does not need have defaults here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common.questions import Question
from jattn.kernels.common.vjp import AttentionVJP
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


CacheResults = tuple[Array, Normalizer]
"""`out [B, T, N, V]` in the dtype of sums, and normalizers `[B, T, N]`."""


@dataclass(frozen=True)
class Reader:
    """A way to read a cache where its keys and values lie.

    unreadable: says why it cannot read a cache for a call, on a platform.
    read: computes a spec's attention of queries to the cache, on a platform.
    """

    unreadable: Callable[[str, Call, Cache], str | None]
    read: Callable[[str, Spec, Array, Cache], CacheResults]


@dataclass(frozen=True)
class Kernel:
    """One way of computing attention. Calls that its functions take are prepared.

    supports: says why the kernel cannot compute a call. It is asked while the call is traced, and
        looks at structure and shapes. A kernel that is traced with the program (see
        `registry.Row`) also looks at the machine, as nobody asks it later: cuDNN does.
    functions: gives the kernel's functions for one of the platforms of its row.
    too_small: says why a call is too small for the kernel. A call that names no kernel then takes
        another one.
    unavailable: says why the kernel cannot run on this machine or in this program. It is asked when
        a program is lowered. It may wait for what the kernel needs if its second argument is True.
    unbuilt: says why the code that has to be compiled for such a call could not be, if that was
        tried. The kernel's functions raise `Unbuilt` then, and a call that names no kernel takes
        the next one.
    reader: reads a cache where it lies. Without it, and where it gives a reason, the kernel is
        given keys and values as arrays.
    """

    supports: Callable[[Call], str | None]
    functions: Callable[[str], AttentionVJP]
    too_small: Callable[[Call], str | None] = lambda call: None
    unavailable: Callable[[Shapes, bool], str | None] = lambda shapes, wait: None
    unbuilt: Callable[[Call], str | None] = lambda call: None
    reader: Reader | None = None


@dataclass(frozen=True)
class WeightSums:
    """A way to sum weights over queries and over keys.

    unsupported: says why it cannot answer a question about a call of these sizes.
    run: gives the sums for each query and for each key, see `xla.statistics`.
    """

    unsupported: Callable[[Question, Shapes], str | None]
    run: Callable[[Question, Array, Array], tuple[Any, Array]]
