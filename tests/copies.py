"""A model of asynchronous copies to shared memory by threads, as GPUs before Hopper make them
(`cp.async`), to find races that neither values nor JAX's interpreter show.

It runs kernels of one warpgroup unchanged, operation by operation, on NumPy arrays in place of a
GPU's memory, one program after another. A copy is in flight from `copy_gmem_to_smem` to the
`wait_gmem_to_smem` that ends it, which waits for the thread's own copies, then for the other
threads (`bar.sync`). Nothing else counts as waiting: from one wait to the next, each warp runs at
its own speed, so that operations of two warps have no order. Therefore, in each part of shared
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
from typing import Any

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


def _overlap(box: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    pairs = zip(box, other, strict=True)
    return all(x.start < y.stop and y.start < x.stop for x, y in pairs)


class Events:
    """The accesses to one place in memory, which holds an array or several: the part, a bit for the
    event, and whether it writes. `machine.touch` records accesses by threads."""

    def __init__(self, machine: Any, name: str, tensor: bool = False):
        self.machine, self.name, self.tensor = machine, name, tensor
        self.past: list[tuple[tuple[slice, ...], int, bool]] = []

    def add(self, box: tuple[slice, ...], event: int, known: int, writes: bool) -> None:
        overlapping = [x for x in self.past if _overlap(box, x[0])]
        if not writes and not any(wrote for *_, wrote in overlapping):
            raise Race(f"{self.name} is read to which nothing was written")
        for _, earlier, wrote in overlapping:
            if (writes or wrote) and not earlier & known:
                verb, then = ("written" if x else "read" for x in (writes, wrote))
                raise Race(f"{self.name} is {verb} by who does not know that it was {then}")
        self.past.append((box, event, writes))


class Part:
    """A kernel's reference to a part of an array, without axes that were indexed by a number; `box`
    is the range of indices along every axis."""

    def __init__(
        self, events: Events, content: np.ndarray, box: tuple[slice, ...], axes: list[int]
    ):
        self.events, self.content, self.box, self.axes = events, content, box, axes
        self.shape, self.dtype = content.shape, content.dtype

    @classmethod
    def whole(cls, events: Events, like: Any) -> "Part":
        # What nobody has written is NaN, or a large number.
        floating = jnp.issubdtype(like.dtype, jnp.floating)
        content = np.full(like.shape, np.nan if floating else 99, like.dtype)
        box = tuple(slice(0, size) for size in like.shape)
        return cls(events, content, box, [*range(len(like.shape))])

    @property
    def at(self) -> PartsAt:
        return PartsAt(self.part)

    def part(self, index: Any) -> "Part":
        if index is Ellipsis:
            return self
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        selected = tuple(inside(x, size) for x, size in zip(index, self.shape, strict=True))
        box, axes = list(self.box), []
        for axis, x in zip(self.axes, selected, strict=True):
            first, run = box[axis].start, x if isinstance(x, slice) else slice(x, x + 1)
            box[axis] = slice(first + run.start, first + run.stop)
            axes += [axis] if isinstance(x, slice) else []
        return Part(self.events, self.content[selected], tuple(box), axes)

    def transpose(self, _: Any) -> "Part":
        return Part(self.events, self.content.T, self.box, self.axes[::-1])

    def note(self, event: int, known: int, writes: bool) -> None:
        """Records an access. The last axis is in bytes: arrays of other types may lie there."""
        *box, last = self.box
        each = self.dtype.itemsize
        self.events.add((*box, slice(last.start * each, last.stop * each)), event, known, writes)

    def fill(self, source: GlobalArray, event: int, known: int) -> None:
        """Copies an array to this part of shared memory."""
        if source.shape != self.shape:
            raise ValueError(f"expected {self.shape}, got {source.shape}")
        self.note(event, known, writes=True)
        self.content[...] = source.array

    def __getitem__(self, index: Any) -> Any:
        part = self.part(index)
        self.events.machine.touch(part, writes=False)
        return jnp.array(part.content)

    def __setitem__(self, index: Any, value: Any) -> None:
        part = self.part(index)
        self.events.machine.touch(part, writes=True)
        part.content[...] = value


class Programs:
    """Runs kernels in place of Mosaic, one program of a grid after another.

    `runs` is the name of the kernel that runs, `place` the program's index by the names of axes,
    `events` the number of its events.
    """

    def __init__(self) -> None:
        self.runs, self.events = "", 0
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

    def event(self) -> int:
        self.events += 1
        return 1 << self.events

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
    """Runs kernels whose threads copy; `waits` counts the waits of each kernel so far.

    All events before a program's last wait are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, int] = {}
        self.known, self.in_flight = 0, False

    def program(self, body: Any, refs: list[Any], options: dict[str, Any]) -> None:
        self.waits.setdefault(self.runs, 0)
        self.events, self.known, self.in_flight = 0, 0, False
        make = lambda x: Part.whole(Events(self, "a slot"), x)  # noqa: E731
        body(*refs, *jax.tree.map(make, options["scratch_types"]))
        if self.in_flight:
            raise Race("a program ends while copies are in flight")

    def touch(self, part: Part, writes: bool) -> None:
        part.note(self.event(), self.known, writes)

    def copy(self, source: GlobalArray, to: Part, barrier=None, *, oob_mode) -> None:
        if barrier is not None:
            raise ValueError("a copy by threads has no barrier")
        to.fill(source, self.event(), self.known)
        self.in_flight = True

    def wait(self, count: int) -> None:
        self.waits[self.runs] += 1
        if count:
            raise NotImplementedError("to wait for some of the copies")
        self.known, self.in_flight = (2 << self.events) - 1, False


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
