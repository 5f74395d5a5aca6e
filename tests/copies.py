"""A model of copies to shared memory by threads, as GPUs before Hopper make them (`cp.async`), to
find races that neither values nor JAX's interpreter show.

It runs kernels of one warpgroup as they stand, operation by operation, on arrays of NumPy in place
of a GPU's memory, one program after another. A copy is under way from `copy_gmem_to_smem` to the
`wait_gmem_to_smem` that ends it. That waits for the thread's own copies, then for the other threads
(`bar.sync`). Nothing else counts as waiting: from one wait to the next, each warp runs at a speed
of its own, so that what two of them do has no order. Therefore, in each place of shared memory:

- what is read was copied before the last wait;
- a copy starts only after a wait that follows the last read, and the copy before;
- nothing is under way when a program ends.

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

from jattn.kernels.gpu.mosaic.machine import streams
from jattn.kernels.gpu.mosaic.machine.versions import mosaic


class Race(Exception):
    """What a kernel does may come out otherwise on a GPU."""


def inside(x: Any, size: int) -> int | slice:
    """The same index of an axis for NumPy, which would cut off what lies outside."""
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


class _Reference:
    """What a kernel takes for a reference: `x[index]` reads, `x.at[index]` is a part."""

    shape: tuple[int, ...]
    dtype: Any

    def __init__(self, part: Callable[[Any], Any]):
        self.at = _At(part)


class _At:
    def __init__(self, part: Callable[[Any], Any]):
        self.part = part

    def __getitem__(self, index: Any) -> Any:
        return self.part(index)


class Global(_Reference):
    """Global memory, which holds an array or a part of one."""

    def __init__(self, array: np.ndarray):
        super().__init__(lambda index: Global(array[_inside(index, array.shape)]))
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.array[_inside(index, self.shape)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[_inside(index, self.shape)] = value


class Place(_Reference):
    """One place of an array in shared memory. Parts of it are some of its rows."""

    def __init__(self, group: "Warpgroup", shape: tuple[int, ...], dtype: Any):
        super().__init__(lambda index: self)
        self.group, self.shape, self.dtype = group, shape, dtype
        self.content, self.written = np.zeros(shape, dtype), np.zeros(shape[0], bool)
        self.read = -1  # after how many waits

    def __getitem__(self, index: Any) -> Any:
        if not self.written.all():
            raise Race("a place is read to which nothing was copied")
        if any(x.place is self for x in self.group.under_way):
            raise Race("a place is read while a copy to it is under way")
        self.read = self.group.waits
        return jnp.asarray(self.content[index])


class Part(NamedTuple):
    """Rows of a place."""

    place: Place
    start: int
    stop: int

    @classmethod
    def of(cls, places: list[Place], index: Any) -> "Part":
        place = places[int(index[0])]
        (run,) = _inside(index[1], place.shape)
        return cls(place, run.start, run.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stop - self.start, *self.place.shape[1:]

    def overlaps(self, other: "Part") -> bool:
        apart = self.stop <= other.start or other.stop <= self.start
        return self.place is other.place and not apart


class Shared(_Reference):
    """An array in shared memory, `[places, ...]`. What kernels read are whole places."""

    def __init__(self, group: "Warpgroup", like: Any):
        places = [Place(group, like.shape[1:], like.dtype) for _ in range(like.shape[0])]
        super().__init__(
            lambda index: Part.of(places, index) if isinstance(index, tuple) else places[int(index)]
        )
        self.shape, self.dtype = like.shape, like.dtype


class Warpgroup:
    """The threads of a program: how often they have waited, and their copies that are under way."""

    def __init__(self) -> None:
        self.waits = 0
        self.under_way: list[Part] = []

    def copy(self, source: Global, to: Place | Part) -> None:
        part = Part(to, 0, to.shape[0]) if isinstance(to, Place) else to
        if any(map(part.overlaps, self.under_way)):
            raise Race("a copy starts to a place to which one is under way")
        if part.place.read == self.waits:
            raise Race("a copy starts to a place that other warps may still read")
        if source.shape != part.shape:
            raise ValueError(f"expected {part.shape}, got {source.shape}")
        rows = slice(part.start, part.stop)
        part.place.content[rows], part.place.written[rows] = source.array, True
        self.under_way.append(part)

    def wait(self, count: int) -> None:
        """Until at most so many copies are under way."""
        self.under_way = self.under_way[len(self.under_way) - count :] if count else []
        self.waits += 1

    def end(self) -> None:
        if self.under_way:
            raise Race("a program ends while copies are under way")


class Machine:
    """What runs kernels in place of Mosaic: the one that `runs`, and the waits of each so far."""

    def __init__(self) -> None:
        self.runs = ""
        self.waits: dict[str, int] = {}
        self.group = Warpgroup()
        self.place: dict[str, Any] = {}

    def kernel(self, body: Any, **how: Any) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            given = [Global(np.asarray(x)) for x in operands]
            results = [np.full(x.shape, np.nan, x.dtype) for x in how["out_type"]]
            self.runs = how["kernel_name"]
            self.waits.setdefault(self.runs, 0)
            for index in itertools.product(*map(range, how["grid"])):
                self.group = Warpgroup()
                self.place = dict(zip(how["grid_names"], map(jnp.int32, index), strict=True))
                shared = jax.tree.map(lambda x: Shared(self.group, x), how["scratch_types"])
                body(*given, *map(Global, results), *shared)
                self.group.end()
            return list(map(jnp.asarray, results))

        return run

    def copy(self, source: Global, to: Place | Part, barrier: Any = None, *, oob_mode: Any) -> None:
        if barrier is not None:
            raise ValueError("a copy by threads has no barrier")
        self.group.copy(source, to)

    def wait(self, count: int) -> None:
        self.waits[self.runs] += 1
        self.group.wait(count)


@contextlib.contextmanager
def by_threads(machine: Machine | None = None) -> Iterator[Machine]:
    """Kernels that are called inside run on a machine on which threads copy."""
    machine = machine or Machine()
    ours: dict[str, Any] = {
        "kernel": machine.kernel,
        "copy_gmem_to_smem": machine.copy,
        "wait_gmem_to_smem": machine.wait,
        "SMEM": lambda shape, dtype, transforms=(): jax.ShapeDtypeStruct(shape, dtype),
    }
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        for name, replaced in ours.items():
            patch.setattr(mosaic(), name, replaced, raising=False)
        patch.setattr(streams, "_copies_by_unit", lambda unit: False)
        patch.setattr(lax, "axis_index", lambda name: machine.place[name])
        yield machine
