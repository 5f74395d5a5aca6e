"""A model of asynchronous copies to shared memory by threads, as GPUs before Hopper make them
(`cp.async`), to find races that neither values nor JAX's interpreter show.

It runs kernels of one warpgroup unchanged, operation by operation, on NumPy arrays in place of a
GPU's memory, one program after another. A copy is in flight from `copy_gmem_to_smem` to the
`wait_gmem_to_smem` that ends it, which waits for the thread's own copies, then for the other
threads (`bar.sync`). Nothing else counts as waiting: from one wait to the next, each warp runs at
its own speed, so that operations of two warps have no order. Therefore, in each slot of shared
memory:

- what is read was copied before the last wait;
- a copy starts only after a wait that follows the last read, and the copy before;
- no copy is in flight when a program ends.

Without `unsafe_no_auto_barriers` Mosaic makes the warps wait before each copy too, which keeps the
second rule. Kernels keep it without that.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.gpu.mosaic.machine import streams
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.spec import Spec


class Race(Exception):
    """The outcome of a kernel depends on an order that a GPU does not guarantee."""


def inside(x: Any, size: int) -> int | slice:
    """The index for NumPy; raises IndexError outside the axis, where NumPy would cut off."""
    if isinstance(x, slice):
        if x != slice(None):
            raise NotImplementedError(x)
        return slice(0, size)
    start, count = (int(x.start), x.size) if isinstance(x, pl.Slice) else (int(x), 1)
    if not 0 <= start <= start + count <= size:
        raise IndexError(f"{start} .. {start + count} of an axis of {size}")
    return slice(start, start + count) if isinstance(x, pl.Slice) else start


def _inside(index: Any, shape: tuple[int, ...]) -> Any:
    if index is Ellipsis:
        return index
    axes = index if isinstance(index, tuple) else (index,)
    return tuple(inside(x, size) for x, size in zip(axes, shape, strict=False))


class PartsAt:
    """The `at` of a reference: `x.at[index]` is a part of x."""

    def __init__(self, part: Callable[[Any], Any]):
        self.part = part

    def __getitem__(self, index: Any) -> Any:
        return self.part(index)


class GlobalArray:
    """An array in global memory, or a part of one."""

    def __init__(self, array: np.ndarray):
        self.at = PartsAt(lambda index: GlobalArray(array[_inside(index, array.shape)]))
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.array[_inside(index, self.shape)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[_inside(index, self.shape)] = value


class Slot:
    """One slot of an array in shared memory. Its parts are ranges of rows."""

    def __init__(self, group: "CopyingThreads", shape: tuple[int, ...], dtype: Any):
        self.at = PartsAt(lambda index: self)
        self.group, self.shape, self.dtype = group, shape, dtype
        self.content, self.written = np.zeros(shape, dtype), np.zeros(shape[0], bool)
        self.read = -1  # the number of waits before the last read

    def __getitem__(self, index: Any) -> Any:
        if not self.written.all():
            raise Race("a slot is read to which nothing was copied")
        if any(x.slot is self for x in self.group.in_flight):
            raise Race("a slot is read while a copy to it is in flight")
        self.read = self.group.waits
        return jnp.asarray(self.content[index])


class SlotRows(NamedTuple):
    slot: Slot
    start: int
    stop: int

    @classmethod
    def of(cls, slots: list[Slot], index: Any) -> "SlotRows":
        slot = slots[int(index[0])]
        (run,) = _inside(index[1], slot.shape)
        return cls(slot, run.start, run.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stop - self.start, *self.slot.shape[1:]

    def overlaps(self, other: "SlotRows") -> bool:
        disjoint = self.stop <= other.start or other.stop <= self.start
        return self.slot is other.slot and not disjoint


class Shared:
    """An array in shared memory, `[slots, ...]`. Kernels read whole slots."""

    def __init__(self, group: "CopyingThreads", like: Any):
        slots = [Slot(group, like.shape[1:], like.dtype) for _ in range(like.shape[0])]
        self.at = PartsAt(
            lambda index: (
                SlotRows.of(slots, index) if isinstance(index, tuple) else slots[int(index)]
            )
        )
        self.shape, self.dtype = like.shape, like.dtype


class CopyingThreads:
    """The threads of a program: the number of their waits, and their copies in flight."""

    def __init__(self) -> None:
        self.waits = 0
        self.in_flight: list[SlotRows] = []

    def copy(self, source: GlobalArray, to: Slot | SlotRows) -> None:
        part = SlotRows(to, 0, to.shape[0]) if isinstance(to, Slot) else to
        if any(map(part.overlaps, self.in_flight)):
            raise Race("a copy starts to a slot to which one is in flight")
        if part.slot.read == self.waits:
            raise Race("a copy starts to a slot that other warps may still read")
        if source.shape != part.shape:
            raise ValueError(f"expected {part.shape}, got {source.shape}")
        rows = slice(part.start, part.stop)
        part.slot.content[rows], part.slot.written[rows] = source.array, True
        self.in_flight.append(part)

    def wait(self, count: int) -> None:
        """Waits until at most `count` copies are in flight."""
        self.in_flight = self.in_flight[len(self.in_flight) - count :] if count else []
        self.waits += 1

    def end(self) -> None:
        if self.in_flight:
            raise Race("a program ends while copies are in flight")


class Programs:
    """Runs kernels in place of Mosaic, one program of a grid after another.

    `runs` is the name of the kernel that runs, `place` the program's index by the names of axes.
    """

    def __init__(self) -> None:
        self.runs = ""
        self.place: dict[str, Any] = {}

    def kernel(self, body: Any, **options: Any) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            arguments = [GlobalArray(np.asarray(x)) for x in operands]
            results = [np.full(x.shape, np.nan, x.dtype) for x in options["out_type"]]
            self.runs = options["kernel_name"]
            for index in itertools.product(*map(range, options["grid"])):
                self.place = dict(zip(options["grid_names"], map(jnp.int32, index), strict=True))
                self.program(body, [*arguments, *map(GlobalArray, results)], options)
            return list(map(jnp.asarray, results))

        return run

    def program(self, body: Any, refs: list[Any], options: dict[str, Any]) -> None:
        raise NotImplementedError

    def axis_index(self, name: str) -> Any:
        return self.place[name]

    @contextlib.contextmanager
    def replacing(self, **members: Any) -> Iterator[pytest.MonkeyPatch]:
        """Runs the kernels that are called inside, with these members of Mosaic replaced."""
        with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
            for name, member in {"kernel": self.kernel, **members}.items():
                patch.setattr(mosaic(), name, member, raising=False)
            patch.setattr(lax, "axis_index", self.axis_index)
            yield patch


class CopyMachine(Programs):
    """Runs kernels whose threads copy; `waits` counts the waits of each kernel so far."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, int] = {}
        self.group = CopyingThreads()

    def program(self, body: Any, refs: list[Any], options: dict[str, Any]) -> None:
        self.waits.setdefault(self.runs, 0)
        self.group = CopyingThreads()
        body(*refs, *jax.tree.map(lambda x: Shared(self.group, x), options["scratch_types"]))
        self.group.end()

    def copy(self, source: GlobalArray, to: Slot | SlotRows, barrier=None, *, oob_mode) -> None:
        if barrier is not None:
            raise ValueError("a copy by threads has no barrier")
        self.group.copy(source, to)

    def wait(self, count: int) -> None:
        self.waits[self.runs] += 1
        self.group.wait(count)


def gradients(kernels: Any, spec: Spec, operands: Any, results: Any) -> Any:
    """The gradients of parameters, query, key and value. Operands are these and the cotangent of
    the output, results those of the forward pass."""
    (query, key, value, d_out), (out, normalizer, finite) = operands, results
    d_out = d_out.astype(out.dtype)
    per_query = PerQuery.of(query, d_out, normalizer, jnp.sum(out * d_out, axis=-1))
    d_parameters, *d_qkv = kernels.backward(spec, per_query, key, value, finite)
    return *d_parameters, *d_qkv


@contextlib.contextmanager
def by_threads(machine: CopyMachine | None = None) -> Iterator[CopyMachine]:
    """Runs the kernels that are called inside on a machine whose threads copy."""
    machine = machine or CopyMachine()
    members: dict[str, Any] = {
        "copy_gmem_to_smem": machine.copy,
        "wait_gmem_to_smem": machine.wait,
        "SMEM": lambda shape, dtype, transforms=(): jax.ShapeDtypeStruct(shape, dtype),
    }
    with machine.replacing(**members) as patch:
        patch.setattr(streams, "_copies_by_unit", lambda unit: False)
        yield machine
