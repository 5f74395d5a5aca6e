"""Ring attention: queries stay, keys and values go round, and what each shard adds is merged.

Each device computes its queries with the shard of keys that it holds while the next one is on its
way (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). Backward, keys and values go
round once more, and their gradients with them. A device holds two shards at a time, whatever the
length: memory is linear in its own tokens. Long shards go round in several rounds, a few heads in
each and a chunk of their keys after another, so that a device holds two such chunks. Shards that a
mask surely empties are not computed, and not sent past the devices that need them; of a shard, only
that part travels which others need.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import dropout, softmax
from jattn._pytree import axis_names, axis_of
from jattn._types import Index, LogSumExp, Output, Tree, accumulation
from jattn.kernels.common import reverse_mode, slicing
from jattn.kernels.common.derivatives import PerQuery, row_dots
from jattn.kernels.common.place import Place, at_place
from jattn.parallel import pieces, placement, rounds
from jattn.parallel.axes import Axes
from jattn.parallel.rounds import Round, moved
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, parameter_letters, parameters, with_parameters


class Hops(NamedTuple):
    """Repeated `times`: each device in `sources` sends its shard `distance` devices ahead."""

    distance: int
    times: int
    sources: tuple[int, ...]

    def send(self, tree: Tree, axes: Axes) -> Tree:
        """What arrives; zeros where nobody sends."""
        pairs = [(i, (i + self.distance) % axes.devices) for i in self.sources]

        return jax.tree.map(lambda x: moved(lambda y: lax.ppermute(y, axes.name, pairs), x), tree)

    def send_all(self, tree: Tree, axes: Axes) -> Tree:
        """What arrives when all devices send: gradients have to come home from wherever the last
        device is that needed their shard."""
        return self._replace(sources=tuple(range(axes.devices))).send(tree, axes)


class Route(NamedTuple):
    """How shards travel. `needed[d, s]` tells whether device d needs shard s; first each device has
    its own, then come the `hops` of the `part` of each that any other needs."""

    needed: np.ndarray
    part: slice
    hops: tuple[Hops, ...]

    @classmethod
    def of(cls, spec: Spec, T: int, S: int, n: int, order: str) -> "Route":
        """That of a call on so many queries and keys, on n devices."""
        if spec.q_positions is not None or spec.kv_positions is not None:
            return cls.through(np.ones((n, n), bool), slice(0, S // n))
        sizes = (T, S, n, order)
        return cls.through(placement.needed(spec.mask, *sizes), placement.reach(spec.mask, *sizes))

    @classmethod
    def through(cls, needed: np.ndarray, part: slice) -> "Route":
        """The route that passes through all devices that need anything, and no others."""
        n, shards = len(needed), np.arange(len(needed))
        # [r, s]: whether the device that is r behind needs shard s, now and at any later step.
        wanted = np.stack([needed[(shards + r) % n, shards] for r in range(n)])
        later = np.logical_or.accumulate(wanted[::-1])[::-1]
        steps = [0, *(r for r in range(1, n) if wanted[r].any())]
        hops: list[Hops] = []
        for here, there in itertools.pairwise(steps):
            sources = {int(s + here) % n for s in np.flatnonzero(later[there])}
            last = hops[-1] if hops else None
            if last and last.distance == there - here:
                merged = tuple(sorted({*last.sources, *sources}))
                hops[-1] = Hops(there - here, last.times + 1, merged)
            else:
                hops.append(Hops(there - here, 1, tuple(sorted(sources))))
        return cls(needed, part, tuple(hops))

    @property
    def travelled(self) -> int:
        """How far each shard is from home at the end."""
        return sum(x.distance * x.times for x in self.hops)

    @property
    def home(self) -> Hops:
        """The hop that brings back what belongs to the shards."""
        n = len(self.needed)
        return Hops(n - self.travelled, 1, tuple(range(n)))


# ---------------------------------------------------------------------------------------------
# What goes round
# ---------------------------------------------------------------------------------------------


def travels(letters: str) -> bool:
    """Whether an array of a spec goes with the keys: those along S alone."""
    named = letters.replace("#", "").split()
    return "S" in named and "T" not in named


def _key_axis(letters: str, leaf: Array) -> int | None:
    """The axis along S of an array along T and S, of which each shard of keys has a part."""
    axis = axis_of("S", letters, leaf.ndim)
    has_part = axis is not None and not travels(letters) and leaf.shape[axis] > 1
    return axis if has_part else None


_QUERIES, _KEYS = "T N _", "S N _"  # the letters of queries, keys and values, and their gradients


def _part(letters: str, leaf: Array, start: Index, size: int) -> Array:
    """A run of keys of an array along S; arrays of size 1 there as they are."""
    axis: Any = axis_of("S", letters, leaf.ndim)
    if leaf.shape[axis] in (1, size):
        return leaf
    return moved(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), leaf)


class KVShard(NamedTuple):
    """What goes round: the keys and values of a shard, or of a part of it, and the spec's arrays
    along S."""

    key: Array
    value: Array
    arrays: list[Array]

    @classmethod
    def of(cls, spec: Spec, key: Array, value: Array, first: Index = 0) -> "KVShard":
        """What a device starts with: its own keys, from the first one that goes round."""
        pairs = zip(jax.tree.leaves(axis_names(spec)), jax.tree.leaves(spec), strict=True)
        arrays = [_part(*x, first, key.shape[1]) for x in pairs if travels(x[0])]
        return cls(key, value, arrays)

    def cut(self, spec: Spec, first: Index) -> Spec:
        """The spec with its arrays along S cut to this shard, which begins at key `first`."""
        arrays, size = iter(self.arrays), self.key.shape[1]

        def one(letters: str, leaf: Array) -> Array:
            if travels(letters):
                return next(arrays)
            axis = _key_axis(letters, leaf)
            return leaf if axis is None else slicing.take(leaf, first, size, axis)

        return jax.tree.map(one, axis_names(spec), spec)


class Gradients(NamedTuple):
    """What the backward pass sums.

    local: those of queries, and of the parameters that stay on the device as queries do.
    with_shard: those of keys, of values, and of the parameters that travel with a shard.

    Both lists of parameters have an entry for each; it is None in the list of the other kind.
    """

    local: tuple[Any, list[Any]]
    with_shard: tuple[Any, Any, list[Any]]

    @classmethod
    def of(cls, letters: list[str], query: Any, key: Any, value: Any, params: Any) -> "Gradients":
        """These in place of those of each array; the parameters have `letters`."""
        pairs = [(travels(x), y) for x, y in zip(letters, params, strict=True)]
        local = [None if sent else x for sent, x in pairs]
        return cls((query, local), (key, value, [x if sent else None for sent, x in pairs]))

    @property
    def params(self) -> list[Array]:
        """The gradients of parameters."""
        pairs = zip(self.local[1], self.with_shard[2], strict=True)
        return [y if x is None else x for x, y in pairs]


# ---------------------------------------------------------------------------------------------
# One shard of keys
# ---------------------------------------------------------------------------------------------


class Ring(NamedTuple):
    """One round of a call on a ring of devices.

    axes: how the call is cut over the mesh.
    route: how the shards travel.
    keys: how many keys a shard has.
    implementation: the kernel that was named to compute the pieces, if one was.
    round: which heads go round.
    begin: the first key of each shard that goes round.
    """

    axes: Axes
    route: Route
    keys: int
    implementation: str | None
    round: Round = Round()
    begin: Index = 0

    def runs(self) -> Iterator[tuple["Ring", int, int]]:
        """The runs of a shard's keys: what stays on each device before the part that travels, this
        part, and what stays behind it. Of each its ring, how many keys a chunk of it has, and how
        many chunks."""
        part, stays = self.route.part, self.route._replace(hops=())
        if not self.route.hops:
            part = slice(0, 0)
        yield self._replace(route=stays), part.start, 1
        count = rounds.chunks(part.stop - part.start)
        yield self._replace(begin=part.start), (part.stop - part.start) // count, count
        yield self._replace(route=stays, begin=part.stop), self.keys - part.stop, 1

    def each_chunk(
        self,
        spec: Spec,
        query: Array,
        key: Array,
        value: Array,
        body: Callable[..., Any],
        state: Tree,
    ) -> Tree:
        """`state` after `body(ring, kv, state)` of each chunk of a shard's keys, with the ring of
        that chunk. `key` and `value` have all heads."""
        for run, size, count in self.runs():

            def one(i: Index, state: Tree, run: Ring = run, size: int = size) -> Tree:
                begin = run.begin + i * size
                cut = functools.partial(self.round.cut, keys=(begin, size))
                kv = self.axes.vary(KVShard.of(spec, cut(key), cut(value), begin), query)
                return body(run._replace(begin=begin), kv, state)

            state = _repeat(count if size else 0, one, state)
        return state

    def shard(self, distance: Index) -> Array:
        """Which shard this device holds when all have travelled this `distance` from home."""
        return (self.axes.place - distance) % self.axes.devices

    def first(self, distance: Index) -> Array:
        """Where the keys that this device holds begin among all, as the shards lie."""
        return self.shard(distance) * self.keys + self.begin

    def piece(self, spec: Spec, query: Array, kv: KVShard, distance: Index) -> Spec:
        """The spec of this device's queries and of the shard that it holds."""
        (B, T, N, _), S = query.shape, kv.key.shape[1]
        axes, first, (share, shares) = self.axes, self.first(distance), self.round
        b, h = axes.first(B, N * shares)
        h = h if shares == 1 else h + share * N
        places = axes.places(self.keys, self.shard(distance))
        place = Place(
            b,
            h,
            axes.places(T),
            slicing.take(places, self.begin, S),
            (axes.run(T), min(S, axes.run(self.keys))),
            first if axes.order == "contiguous" else None,
        )
        own = at_place(kv.cut(spec, first), place)
        return dataclasses.replace(own, partial=True)

    def if_needed(self, shard: Array, compute: Callable[..., Any], otherwise: Tree) -> Tree:
        """`compute()`; `otherwise` where none of this device's queries needs the shard."""
        if self.route.needed.all():
            return compute()
        wanted = jnp.asarray(self.route.needed)[self.axes.place, shard]
        return lax.cond(wanted, compute, lambda: otherwise)

    def forward(
        self, spec: Spec, query: Array, kv: KVShard, distance: Index, state: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """`(out, normalizer, all_finite)` with what a shard of keys adds."""
        shard, shapes = self.shard(distance), Shapes.of(query, kv.value)

        def compute() -> Tree:
            own = self.piece(spec, query, kv, distance)
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            operands = (own, query, kv.key, kv.value)
            out, normalizer, finite = pieces.run(
                "forward", like, self.implementation, *operands, shapes=shapes
            )
            return *softmax.join_pair(state[:2], (out, normalizer)), state[2] & finite

        return self.if_needed(shard, compute, state)

    def backward(
        self,
        spec: Spec,
        per_query: PerQuery,
        kv: KVShard,
        distance: Index,
        finite: Array,
        so_far: Gradients,
    ) -> Gradients:
        """`so_far`, in which those that travel are 0, with what a shard of keys adds."""
        shard, shapes = self.shard(distance), Shapes.of(per_query.query, kv.value)
        letters = parameter_letters(spec)
        names = Gradients.of(letters, _QUERIES, "", "", letters).local

        def add(name: str, total: Array, part: Array) -> Array:
            axis = _key_axis(name, total)
            if axis is None:
                return total + part
            return slicing.add_at(total, part, self.first(distance), axis)

        def compute() -> Gradients:
            own = self.piece(spec, per_query.query, kv, distance)
            wide = (so_far.local[0], *so_far.with_shard[:2])
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (parameters(own), *wide)
            )
            operands = (own, per_query, kv.key, kv.value, finite)
            d_params, d_query, d_key, d_value = pieces.run(
                "backward", like, self.implementation, *operands, shapes=shapes
            )
            found = Gradients.of(letters, d_query, d_key, d_value, d_params)
            local = jax.tree.map(add, names, so_far.local, found.local)
            return found._replace(local=local)

        return self.if_needed(shard, compute, so_far)


# ---------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------


def _repeat(count: int, body: Callable[..., Any], state: Tree) -> Tree:
    """`body(i, state)` for i below `count`; without a loop where that is one."""
    if count <= 1:
        return body(0, state) if count else state
    return lax.fori_loop(
        0, count, lambda i, x: body(lax.convert_element_type(i, jnp.int32), x), state
    )


def _forward(ring: Ring, spec: Spec, query: Array, kv: KVShard, state: Tree) -> Tree:
    """What all shards add to `state`. While one is computed, the next is being sent."""
    hops, distance = ring.route.hops, 0
    next_shard = hops and hops[0].send(kv, ring.axes)
    state = ring.forward(spec, query, kv, distance, state)
    for this, then in itertools.zip_longest(hops, hops[1:]):

        def body(i: Array, carried: Tree, distance: int = distance, this: Hops = this) -> Tree:
            kv, state = carried
            next_shard = this.send(kv, ring.axes)
            return next_shard, ring.forward(
                spec, query, kv, distance + (i + 1) * this.distance, state
            )

        kv, state = _repeat(this.times - 1, body, (next_shard, state))
        next_shard = then and then.send(kv, ring.axes)
        distance += this.times * this.distance
        state = ring.forward(spec, query, kv, distance, state)
    return state


def _backward(
    ring: Ring, spec: Spec, per_query: PerQuery, kv: KVShard, finite: Array, so_far: Gradients
) -> Gradients:
    """`so_far`, in which those that travel are 0, with the gradients from all shards.

    While one is computed, two things are being sent: the next shard, and the gradients that the
    devices before have found for this one.
    """
    hops, distance = ring.route.hops, 0
    # Keys are sent once more: XLA would keep those that came in the forward pass until now.
    kv, per_query = lax.optimization_barrier((kv, per_query))
    next_shard = hops and hops[0].send(kv, ring.axes)
    total = ring.backward(spec, per_query, kv, distance, finite, so_far)
    if not hops:
        return total

    def added(hop: Hops, total: Gradients, kv: KVShard, distance: Index) -> Gradients:
        arrived = hop.send_all(total.with_shard, ring.axes)
        total = total._replace(with_shard=so_far.with_shard)
        total = ring.backward(spec, per_query, kv, distance, finite, total)
        return total._replace(with_shard=jax.tree.map(jnp.add, arrived, total.with_shard))

    for this, then in itertools.zip_longest(hops, hops[1:]):

        def body(i: Array, carried: Tree, distance: int = distance, this: Hops = this) -> Tree:
            kv, total = carried
            next_shard = this.send(kv, ring.axes)
            return next_shard, added(this, total, kv, distance + (i + 1) * this.distance)

        kv, total = _repeat(this.times - 1, body, (next_shard, total))
        next_shard = then and then.send(kv, ring.axes)
        distance += this.times * this.distance
        total = added(this, total, kv, distance)
    d_key, d_value, d_params = total.with_shard
    narrow = d_key.astype(kv.key.dtype), d_value.astype(kv.value.dtype)
    home = ring.route.home.send((*narrow, d_params), ring.axes)
    return total._replace(with_shard=home)


class Call(NamedTuple):
    """A call on a ring, whose heads go round in so many `rounds`. The spec is whole."""

    ring: Ring
    rounds: int

    def zeros(self, query: Array, value: Array, beside: Tree) -> Tree:
        """`(out, normalizer, all_finite)` of no keys."""
        dtype = accumulation(query.dtype)
        row = jnp.zeros(query.shape[:3], dtype)
        out, finite = jnp.zeros((*row.shape, value.shape[-1]), dtype), jnp.ones((), bool)
        return self.ring.axes.vary((out, Normalizer(row - jnp.inf, row), finite), beside)

    def forward(self, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
        """`(out, normalizer, all_finite)` of this device's queries and all keys."""
        arrays = spec, query, key, value

        def compute(round: Round, total: Tree) -> Tree:
            spec, query, ring = round.cut_spec(arrays[0]), round.cut(arrays[1]), self.ring
            body = lambda ring, kv, state: _forward(ring, spec, query, kv, state)  # noqa: E731
            state = self.zeros(query, value, arrays)
            ring = ring._replace(round=round)
            found = ring.each_chunk(spec, query, key, value, body, state)
            return *jax.tree.map(round.put, total[:2], found[:2]), total[2] & found[2]

        return rounds.run(self.rounds, compute, self.zeros(query, value, arrays))

    def backward(
        self, spec: Spec, per_query: PerQuery, key: Array, value: Array, finite: Array
    ) -> Gradients:
        """The gradients, in the dtypes of the arrays."""
        letters, dtype = parameter_letters(spec), accumulation(key.dtype)
        names = Gradients.of(letters, _QUERIES, _KEYS, _KEYS, letters)
        arrays, vary = (spec, per_query), self.ring.axes.vary

        def compute(round: Round, total: Gradients) -> Gradients:
            spec, per_query = round.cut_spec(arrays[0]), jax.tree.map(round.cut, arrays[1])
            query, ring = per_query.query, self.ring._replace(round=round)

            def zeros(key: Array, value: Array, spec: Spec) -> Gradients:
                d_query, d_key, d_value = (jnp.zeros(x.shape, dtype) for x in (query, key, value))
                d_params = map(jnp.zeros_like, parameters(spec))
                return vary(Gradients.of(letters, d_query, d_key, d_value, d_params), query)

            def body(ring: Ring, kv: KVShard, state: Tree) -> Tree:
                total, local = state
                so_far = zeros(kv.key, kv.value, kv.cut(spec, ring.begin))._replace(local=local)
                found = _backward(ring, spec, per_query, kv, finite, so_far)
                add = functools.partial(round.add, first_key=ring.begin)
                return jax.tree.map(add, names.with_shard, total, found.with_shard), found.local

            state = total.with_shard, zeros(key, value, spec).local
            with_shard, local = ring.each_chunk(spec, query, key, value, body, state)
            return Gradients(jax.tree.map(round.add, names.local, total.local, local), with_shard)

        total = Gradients.of(letters, per_query.query, key, value, parameters(spec))
        total = vary(jax.tree.map(jnp.zeros_like, total), per_query.query)
        return rounds.run(self.rounds, compute, total)


def attend(
    spec: Spec, query: Array, key: Array, value: Array, axes: Axes, implementation: str | None
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` of this device's queries and all keys, differentiable.

    The spec is prepared, its arrays are this device's; there is one flat batch axis.
    """
    T, S, n = query.shape[1], key.shape[1], axes.devices
    if spec.dropout_rate:
        spec = dataclasses.replace(spec, dropout_key=dropout.key_words(spec.dropout_key))
    route = Route.of(spec, n * T, n * S, n, axes.order)
    count = rounds.count(Shapes.of(query, value)) if route.hops else 1
    call = Call(Ring(axes, route, S, implementation), count)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> tuple[Array, ...]:
        return run_forward(params, spec, *qkv)[0]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Tree:
        out, normalizer, finite = call.forward(with_parameters(spec, params), *qkv)
        return (out, normalizer.lse), (params, spec, *qkv, out, normalizer, finite)

    def run_backward(residuals: Tree, cotangents: tuple[Array, ...]) -> Tree:
        params, spec, query, key, value, out, normalizer, finite = residuals
        d_out, d_lse = cotangents
        delta = row_dots(d_out, out) - d_lse
        per_query = PerQuery.of(query, d_out, normalizer, delta)
        found = call.backward(with_parameters(spec, params), per_query, key, value, finite)
        return found.params, None, found.local[0], *found.with_shard[:2]

    run.defvjp(run_forward, run_backward)
    inputs = reverse_mode.inputs((query, key, value, *parameters(spec)), spec)
    query, key, value, *params = axes.vary(inputs)
    out, lse = run(params, spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)
