"""A model of warpgroups that wait for one another at barriers while copy units and tensor cores run
asynchronously, as on GPUs since Hopper. It finds unordered accesses even where values are right.

Kernels run unchanged on NumPy arrays, each warpgroup in a thread, of which one at a time runs until
it has to wait. Every access to shared memory and tensor memory is an event. A warpgroup knows its
own events, and at a barrier learns the events known to those who arrived there; those of a unit it
knows after waiting for it; a unit knows what the warpgroup knew that started it. Therefore:

- a read knows all writes to its place, and a write all reads and writes;
- units know accesses of threads to shared memory only after a fence, `commit_smem`;
- a barrier is passed again only when all who wait there are known to have seen it passed before;
- when a program ends, no copy is in flight, and each passing of a barrier was seen;
- at any time some warpgroup can run.

Products that tensor cores add to the same numbers are ordered; others have no order.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.kernels.gpu.mosaic.machine import matrix_units, tensor_memory
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from tests.copies import Events, GlobalArray, Part, PartsAt, Programs, Race


class Knowledge(NamedTuple):
    """Events, a bit each, that happen before the next access of threads, and of units."""

    threads: int = 0
    units: int = 0

    def with_events(self, threads: int, units: int) -> "Knowledge":
        return Knowledge(self.threads | threads, self.units | units)

    def with_all(self, events: int) -> "Knowledge":
        return self.with_events(events, events)


class Barrier:
    """A barrier: what waiting teaches at each passing, and which waits have ended."""

    def __init__(self, name: str, arrivals: int):
        self.name, self.arrivals = name, arrivals
        self.pending: list[Knowledge] = []
        self.passed: list[Knowledge] = []
        self.seen: list[int] = []
        self.waits: dict[int, int] = {}  # of each warpgroup

    def arrive(self, known: Knowledge) -> None:
        self.pending.append(known)
        if len(self.pending) < self.arrivals:
            return
        learned = Knowledge()
        for x in self.pending:
            learned = learned.with_events(*x)
        if self.seen and self.seen[-1] & ~learned.threads:
            raise self.too_early()
        self.passed.append(learned)
        self.seen.append(0)
        self.pending = []

    def too_early(self) -> Race:
        return Race(f"{self.name} is passed again before all have seen it passed")

    def end(self) -> None:
        if self.pending or not all(self.seen):
            raise Race(f"a program ends while nobody has waited for {self.name}")


class Barriers:
    """One barrier, or an array of them."""

    def __init__(self, each: list[Barrier]):
        self.each, self.at = each, PartsAt(lambda index: Barriers([each[int(index)]]))

    @property
    def single(self) -> Barrier:
        (barrier,) = self.each
        return barrier


# --- what kernels ask for -----------------------------------------------------------------------


class Array:
    """An array in shared memory, or in tensor memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, tensor: bool = False):
        self.shape, self.dtype, self.tensor = shape, jnp.dtype(dtype), tensor

    def make(self, machine: "Machine", name: str) -> Any:
        return Part.whole(Events(machine, name, self.tensor), self)


class Alternatives:
    """Several arrays that share one place in memory."""

    def __init__(self, *arrays: Array):
        self.arrays = arrays

    def make(self, machine: "Machine", name: str) -> Any:
        events = Events(machine, name, tensor=True)
        return tuple(Part.whole(events, x) for x in self.arrays)


class Arrivals:
    """A request for `num_barriers` barriers, each passed by `num_arrivals` arrivals."""

    def __init__(
        self, num_arrivals: int = 1, num_barriers: int = 1, orders_tensor_core: bool = False
    ):
        self.arrivals, self.barriers = num_arrivals, num_barriers

    def make(self, machine: "Machine", name: str) -> Any:
        arrivals = machine.arrivals(name, self.arrivals)
        made = [Barrier(name, arrivals) for _ in range(self.barriers)]
        machine.barriers += made
        return Barriers(made)


# --- programs -----------------------------------------------------------------------------------


class Warpgroup:
    """A warpgroup: its knowledge, and its asynchronous events that it has not waited for yet."""

    def __init__(self, number: int):
        self.number, self.known = number, Knowledge()
        self.multiplies = False  # whether tensor cores do the reads
        self.copied_out = self.loaded = self.stored = self.multiplied = 0
        self.added: dict[Any, int] = {}  # products, by the place of their sum
        self.ready: Callable[[], bool] = lambda: True
        self.resumed, self.ended = threading.Semaphore(0), False


class _Stopped(BaseException):
    """Raised in a warpgroup's thread after another warpgroup has failed."""


class Passes(NamedTuple):
    """The number of arrivals that pass a barrier, and of its passings in a program, at most."""

    arrivals: int
    most: int


class Machine(Programs):
    """Runs kernels whose warpgroups wait at barriers. By the names of kernels, `did` has the
    operations of each, and `passes` its barriers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.did: dict[str, set[str]] = {}
        self.passes: dict[str, dict[str, Passes]] = {}
        self.barriers: list[Barrier] = []
        self.group = Warpgroup(0)
        self.paused, self.errors = threading.Semaphore(0), list[BaseException]()

    def does(self, what: str) -> bool:
        """Records an operation; returns whether it takes place. Models of mistakes return False."""
        self.did[self.runs].add(what)
        return True

    def arrivals(self, barrier: str, count: int) -> int:
        """Returns the arrivals that a barrier takes; models of mistakes return another number."""
        return count

    def program(self, body: Any, refs: list[Any], options: dict[str, Any]) -> None:
        self.did.setdefault(self.runs, set())
        passes = self.passes.setdefault(self.runs, {})
        self.events, self.barriers, self.errors = 0, [], []

        def make(path: Any, request: Any) -> Any:
            return request.make(self, jax.tree_util.keystr(path, simple=True, separator="."))

        refs += jax.tree_util.tree_map_with_path(make, options["scratch_types"])
        groups = [Warpgroup(i) for i in range(options.get("num_threads", 1))]
        for group in groups:
            threading.Thread(target=self._run, args=(group, body, refs), daemon=True).start()
        while left := [x for x in groups if not x.ended]:
            ready = [x for x in left if self.errors or x.ready()]
            if not ready:
                self.errors.append(Race("all wait, and nobody arrives"))
            self.group = (ready or left)[0]
            self.group.resumed.release()
            self.paused.acquire()
        if self.errors:
            raise self.errors[0]
        for barrier in self.barriers:
            barrier.end()
            _, most = passes.get(barrier.name, (0, 0))
            passes[barrier.name] = Passes(barrier.arrivals, max(most, len(barrier.passed)))
        if any(x.copied_out or x.stored for x in groups):
            raise Race("a program ends while copies are in flight")

    def _run(self, group: Warpgroup, body: Any, refs: list[Any]) -> None:
        group.resumed.acquire()
        try:
            with jax.disable_jit():
                if not self.errors:
                    body(*refs)
        except _Stopped:
            pass
        except BaseException as error:
            self.errors.append(error)
        group.ended = True
        self.paused.release()

    def axis_index(self, name: str) -> Any:
        return jnp.int32(self.group.number) if name == "warpgroup" else super().axis_index(name)

    # --- events ---------------------------------------------------------------------------------

    def touch(self, part: Part, writes: bool) -> None:
        """Records an access by the threads of a warpgroup, or by tensor cores that it waits for."""
        group, event = self.group, self.event()
        by_unit = group.multiplies
        part.note(event, group.known.units if by_unit else group.known.threads, writes)
        group.known = group.known.with_events(event, event if by_unit else 0)

    def copy_in(self, source: GlobalArray, to: Part, barrier: Barriers) -> None:
        known, event = self.group.known, self.event()
        to.fill(source, event, known.units)
        barrier.single.arrive(known.with_all(event))

    def copy_out(self, source: Part, to: GlobalArray) -> None:
        event = self.event()
        source.note(event, self.group.known.units, writes=False)
        to.array[...] = source.content
        self.group.copied_out |= event

    def wait_for_copies_out(self, count: int) -> None:
        if count:
            raise NotImplementedError("to wait for some of the copies")
        if self.does("wait_smem_to_gmem"):
            self.group.known = self.group.known.with_all(self.group.copied_out)
            self.group.copied_out = 0

    def fence(self) -> None:
        if self.does("commit_smem"):
            self.group.known = self.group.known.with_all(self.group.known.threads)

    def arrive(self, barriers: Barriers) -> None:
        barrier = barriers.single
        if self.does(f"arrive {barrier.name}"):
            barrier.arrive(self.group.known)

    def wait(self, barriers: Barriers) -> None:
        barrier, group = barriers.single, self.group
        if not self.does(f"wait {barrier.name}"):
            return
        turn = barrier.waits.get(group.number, 0)
        group.ready = lambda: len(barrier.passed) > turn
        if not group.ready():
            self.paused.release()
            group.resumed.acquire()
            if self.errors:
                raise _Stopped
        if len(barrier.passed) > turn + 1:
            raise barrier.too_early()
        group.ready, event = lambda: True, self.event()
        barrier.waits[group.number] = turn + 1
        barrier.seen[turn] |= event
        group.known = group.known.with_events(*barrier.passed[turn]).with_all(event)

    # --- products -------------------------------------------------------------------------------

    def products(self, unit: Unit, pairs: Any, **options: Any) -> Any:
        """Computes products that a warpgroup waits for. A unit reads their operands, from start to
        end, unless single warps multiply."""
        group = self.group
        group.multiplies = not unit.by_warp
        for x in itertools.chain.from_iterable(pairs):
            _ = x[...]
        result = _MULTIPLY(unit, pairs, **options)
        group.multiplies = False
        return result

    def multiply(self, total: Part, a: Part, b: Part, accumulate: bool) -> None:
        group, event = self.group, self.event()
        place = id(total.events), *((x.start, x.stop) for x in total.box)
        known = group.known.with_all(group.added.get(place, 0))
        for x in (a, b):
            x.note(event, known.threads if x.events.tensor else known.units, writes=False)
        total.note(event, known.threads, writes=True)
        product = a.content.astype(np.float32) @ b.content.astype(np.float32)
        total.content[...] = total.content + product if accumulate else product
        group.added[place] = event | group.added.get(place, 0)
        group.multiplied |= event

    def arrive_after_products(self, barriers: Barriers) -> None:
        barrier = barriers.single
        if self.does(f"arrive {barrier.name}"):
            barrier.arrive(self.group.known.with_all(self.group.multiplied))

    def load(self, source: Part) -> Any:
        event = self.event()
        source.note(event, self.group.known.threads, writes=False)
        self.group.loaded |= event
        return jnp.array(source.content)

    def wait_for_loads(self) -> None:
        if self.does("wait_load_tmem"):
            self.group.known = self.group.known.with_all(self.group.loaded)

    def store(self, to: Part, value: Any) -> None:
        event = self.event()
        to.note(event, self.group.known.threads, writes=True)
        to.content[...] = value
        self.group.stored |= event

    def wait_for_stores(self) -> None:
        if self.does("commit_tmem"):
            self.group.known = self.group.known.with_all(self.group.stored)
            self.group.stored = 0


_MULTIPLY = matrix_units.multiply


@contextlib.contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Runs the kernels that are called inside on a machine."""
    members: dict[str, Any] = {
        "SMEM": lambda shape, dtype, transforms=(): Array(shape, dtype),
        "TMEM": lambda shape, dtype, packed: Array(shape, dtype, tensor=True),
        "RefUnion": Alternatives,
        "Barrier": Arrivals,
        "barrier_wait": machine.wait,
        "barrier_arrive": machine.arrive,
        "copy_gmem_to_smem": machine.copy_in,
        "copy_smem_to_gmem": machine.copy_out,
        "wait_smem_to_gmem": machine.wait_for_copies_out,
        "commit_smem": machine.fence,
        "set_max_registers": lambda count, action: None,
        "tcgen05_mma": machine.multiply,
        "tcgen05_commit_arrive": machine.arrive_after_products,
        "async_load_tmem": machine.load,
        "wait_load_tmem": machine.wait_for_loads,
        "async_store_tmem": machine.store,
        "commit_tmem": machine.wait_for_stores,
    }
    with machine.replacing(**members) as patch:
        patch.setattr(matrix_units, "multiply", machine.products)
        patch.setattr(tensor_memory, "_in_shared_memory", lambda unit: False)
        yield
