"""Ring attention: queries stay, keys and values go around the ring, and results are merged.

Each device computes its queries with the shard of keys that it holds while it receives the next one
(Liu et al. 2023, "Ring Attention with Blockwise Transformers"). In the backward pass keys and
values go around once more, together with their gradients. A device holds two shards at a time,
whatever the length: memory is linear in its own tokens. Long shards go around in several rounds,
each with a few heads, and in each round in chunks of their keys, so that a device holds two such
chunks. Shards that a mask surely empties are not computed, and not sent past the devices that need
them; only the part of a shard that other devices need is sent.
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
from jattn.call import Call
from jattn.kernels.common import reverse_mode, slicing
from jattn.kernels.common.derivatives import PerQuery, row_dots
from jattn.kernels.common.place import Place, at_place
from jattn.parallel import pieces, placement, rounds
from jattn.parallel.axes import Axes
from jattn.parallel.rounds import Round, moved
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, parameter_letters, parameters, with_parameters


class Hops(NamedTuple):
    """Hops of the route, `times` alike: each device in `sources` sends `distance` devices ahead."""

    distance: int
    times: int
    sources: tuple[int, ...]

    def send(self, tree: Tree, axes: Axes) -> Tree:
        """Returns what this device receives; zeros if no device sends to it."""
        pairs = [(i, (i + self.distance) % axes.devices) for i in self.sources]

        return jax.tree.map(lambda x: moved(lambda y: lax.ppermute(y, axes.name, pairs), x), tree)

    def send_all(self, tree: Tree, axes: Axes) -> Tree:
        """Returns what this device receives if all devices send.

        Gradients need this: they return home from wherever the last device is that needed their
        shard.
        """
        return self._replace(sources=tuple(range(axes.devices))).send(tree, axes)


class Route(NamedTuple):
    """The route of the shards. `needed[d, s]` tells whether device d needs shard s.

    Each device starts with its own shard; then come the `hops` with the `part` of each shard that
    any other device needs.
    """

    needed: np.ndarray
    part: slice
    hops: tuple[Hops, ...]

    @classmethod
    def of(cls, spec: Spec, T: int, S: int, n: int, order: str) -> "Route":
        """Returns the route of a call on T queries and S keys, on n devices."""
        if spec.q_positions is not None or spec.kv_positions is not None:
            return cls.through(np.ones((n, n), bool), slice(0, S // n))
        sizes = (T, S, n, order)
        return cls.through(placement.needed(spec.mask, *sizes), placement.reach(spec.mask, *sizes))

    @classmethod
    def through(cls, needed: np.ndarray, part: slice) -> "Route":
        """Returns the route that passes through all devices that need anything, and no others."""
        n, shards = len(needed), np.arange(len(needed))
        # [r, s]: whether device s + r needs shard s; `later`: whether it or a further device does.
        wanted = np.stack([needed[(shards + r) % n, shards] for r in range(n)])
        later = np.logical_or.accumulate(wanted[::-1])[::-1]
        steps = [0, *(r for r in range(1, n) if wanted[r].any())]
        hops: list[Hops] = []
        for start, stop in itertools.pairwise(steps):
            sources = {int(s + start) % n for s in np.flatnonzero(later[stop])}
            last = hops[-1] if hops else None
            if last and last.distance == stop - start:
                merged = tuple(sorted({*last.sources, *sources}))
                hops[-1] = Hops(stop - start, last.times + 1, merged)
            else:
                hops.append(Hops(stop - start, 1, tuple(sorted(sources))))
        return cls(needed, part, tuple(hops))

    @property
    def travelled(self) -> int:
        """The distance of each shard from home at the end."""
        return sum(x.distance * x.times for x in self.hops)

    @property
    def home(self) -> Hops:
        """The hop that returns the gradients of a shard to the shard's device."""
        n = len(self.needed)
        return Hops(n - self.travelled, 1, tuple(range(n)))


# ---------------------------------------------------------------------------------------------
# The arrays that go around
# ---------------------------------------------------------------------------------------------


def travels(letters: str) -> bool:
    """Returns whether an array of a spec goes around with the keys: those along S but not T do."""
    named = letters.replace("#", "").split()
    return "S" in named and "T" not in named


def _key_axis(letters: str, leaf: Array) -> int | None:
    """Returns the S axis of an array along T and S, which is sliced for each shard; else None."""
    axis = axis_of("S", letters, leaf.ndim)
    has_part = axis is not None and not travels(letters) and leaf.shape[axis] > 1
    return axis if has_part else None


_QUERIES, _KEYS = "T N _", "S N _"  # the letters of queries, keys and values, and their gradients


def _part(letters: str, leaf: Array, start: Index, size: int) -> Array:
    """Slices a run of keys from an array along S; arrays of size 1 there stay unchanged."""
    axis: Any = axis_of("S", letters, leaf.ndim)
    if leaf.shape[axis] in (1, size):
        return leaf
    return moved(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), leaf)


class KVShard(NamedTuple):
    """The arrays that go around: keys and values of a shard or its part, and arrays of the spec."""

    key: Array
    value: Array
    arrays: list[Array]

    @classmethod
    def of(cls, spec: Spec, key: Array, value: Array, first: Index = 0) -> "KVShard":
        """Returns the shard with which a device starts: its own keys, from key `first` on."""
        pairs = zip(jax.tree.leaves(axis_names(spec)), jax.tree.leaves(spec), strict=True)
        arrays = [_part(*x, first, key.shape[1]) for x in pairs if travels(x[0])]
        return cls(key, value, arrays)

    def cut(self, spec: Spec, first: Index) -> Spec:
        """Returns the spec with arrays along S sliced to this shard, from key `first` on."""
        arrays, size = iter(self.arrays), self.key.shape[1]

        def sliced(letters: str, leaf: Array) -> Array:
            if travels(letters):
                return next(arrays)
            axis = _key_axis(letters, leaf)
            return leaf if axis is None else slicing.take(leaf, first, size, axis)

        return jax.tree.map(sliced, axis_names(spec), spec)


class Gradients(NamedTuple):
    """The gradients that the backward pass sums.

    local: the gradients of queries, and of the parameters that stay on the device like queries.
    with_shard: the gradients of keys, of values, and of the parameters that travel with a shard.

    Both lists of parameters have an entry for each parameter, None for parameters of the other
    kind.
    """

    local: tuple[Any, list[Any]]
    with_shard: tuple[Any, Any, list[Any]]

    @classmethod
    def of(cls, letters: list[str], query: Any, key: Any, value: Any, params: Any) -> "Gradients":
        """Arranges one value for each array in this structure; the parameters have `letters`."""
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

    axes: the mesh axes over which the call is sharded.
    route: the route of the shards.
    keys: the number of keys of a shard.
    implementation: the kernel that was named to compute the pieces, if any.
    round: the heads that go around.
    begin: the first key of each shard that goes around.
    """

    axes: Axes
    route: Route
    keys: int
    implementation: str | None
    round: Round = Round()
    begin: Index = 0

    def runs(self) -> Iterator[tuple["Ring", int, int]]:
        """Yields the runs of a shard's keys, each as its ring, the number of keys of a chunk, and
        the number of chunks: the keys before the part that travels, this part, and the keys after
        it. The first and last run stay on their device."""
        part, no_hops = self.route.part, self.route._replace(hops=())
        if not self.route.hops:
            part = slice(0, 0)
        yield self._replace(route=no_hops), part.start, 1
        count = rounds.chunks(part.stop - part.start)
        yield self._replace(begin=part.start), (part.stop - part.start) // count, count
        yield self._replace(route=no_hops, begin=part.stop), self.keys - part.stop, 1

    def each_chunk(
        self,
        spec: Spec,
        query: Array,
        key: Array,
        value: Array,
        body: Callable[..., Any],
        state: Tree,
    ) -> Tree:
        """Folds `body(ring, kv, state)` over the chunks of a shard's keys, each with its own ring.

        `key` and `value` have all heads.
        """
        for run, size, count in self.runs():

            def compute_chunk(i: Index, state: Tree, run: Ring = run, size: int = size) -> Tree:
                begin = run.begin + i * size
                cut = functools.partial(self.round.cut, keys=(begin, size))
                kv = self.axes.vary(KVShard.of(spec, cut(key), cut(value), begin), query)
                return body(run._replace(begin=begin), kv, state)

            state = _repeat(count if size else 0, compute_chunk, state)
        return state

    def shard(self, distance: Index) -> Array:
        """Returns the index of the shard on this device after all have moved by `distance`."""
        return (self.axes.place - distance) % self.axes.devices

    def first(self, distance: Index) -> Array:
        """Returns the index of this device's first key among all, in the order of the shards."""
        return self.shard(distance) * self.keys + self.begin

    def piece(self, spec: Spec, query: Array, kv: KVShard, distance: Index) -> Spec:
        """Returns the spec of this device's queries and of the shard that it holds."""
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
        piece_spec = at_place(kv.cut(spec, first), place)
        return dataclasses.replace(piece_spec, partial=True)

    def if_needed(self, shard: Array, compute: Callable[..., Any], otherwise: Tree) -> Tree:
        """Returns `compute()`, or `otherwise` if none of this device's queries needs the shard."""
        if self.route.needed.all():
            return compute()
        wanted = jnp.asarray(self.route.needed)[self.axes.place, shard]
        return lax.cond(wanted, compute, lambda: otherwise)

    def forward(
        self, spec: Spec, query: Array, kv: KVShard, distance: Index, state: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Returns `(out, normalizer, all_finite)` after adding a shard's contribution."""
        shard, shapes = self.shard(distance), Shapes.of(query, kv.value)

        def compute() -> Tree:
            piece_spec = self.piece(spec, query, kv, distance)
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            operands = (piece_spec, query, kv.key, kv.value)
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
        """Adds the gradients from a shard of keys to `so_far`, whose `with_shard` must be 0."""
        shard, shapes = self.shard(distance), Shapes.of(per_query.query, kv.value)
        letters = parameter_letters(spec)
        names = Gradients.of(letters, _QUERIES, "", "", letters).local

        def add(name: str, total: Array, part: Array) -> Array:
            axis = _key_axis(name, total)
            if axis is None:
                return total + part
            return slicing.add_at(total, part, self.first(distance), axis)

        def compute() -> Gradients:
            piece_spec = self.piece(spec, per_query.query, kv, distance)
            wide = (so_far.local[0], *so_far.with_shard[:2])
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (parameters(piece_spec), *wide)
            )
            operands = (piece_spec, per_query, kv.key, kv.value, finite)
            d_params, d_query, d_key, d_value = pieces.run(
                "backward", like, self.implementation, *operands, shapes=shapes
            )
            of_shard = Gradients.of(letters, d_query, d_key, d_value, d_params)
            local = jax.tree.map(add, names, so_far.local, of_shard.local)
            return of_shard._replace(local=local)

        return self.if_needed(shard, compute, so_far)


# ---------------------------------------------------------------------------------------------
# All shards of keys
# ---------------------------------------------------------------------------------------------


def _repeat(count: int, body: Callable[..., Any], state: Tree) -> Tree:
    """Applies `body(i, state)` for i in range(count); without a loop if `count` is at most 1."""
    if count <= 1:
        return body(0, state) if count else state
    return lax.fori_loop(
        0, count, lambda i, x: body(lax.convert_element_type(i, jnp.int32), x), state
    )


def _over_shards(ring: Ring, kv: KVShard, compute: Callable[..., Tree], state: Tree) -> Tree:
    """Folds `compute(kv, distance, hop, state)` over all shards, while the next shard is being
    sent; `hop` is the hop with which the shard arrived, None for the device's own."""
    hops, distance = ring.route.hops, 0
    next_shard = hops and hops[0].send(kv, ring.axes)
    state = compute(kv, distance, None, state)
    for hop, next_hop in itertools.zip_longest(hops, hops[1:]):

        def body(i: Index, carried: Tree, distance: int = distance, hop: Hops = hop) -> Tree:
            kv, state = carried
            next_shard = hop.send(kv, ring.axes)
            return next_shard, compute(kv, distance + (i + 1) * hop.distance, hop, state)

        kv, state = _repeat(hop.times - 1, body, (next_shard, state))
        next_shard = next_hop and next_hop.send(kv, ring.axes)
        distance += hop.times * hop.distance
        state = compute(kv, distance, hop, state)
    return state


def _forward(ring: Ring, spec: Spec, query: Array, kv: KVShard, state: Tree) -> Tree:
    """Adds the contributions of all shards to `state`."""

    def compute(kv: KVShard, distance: Index, _: Hops | None, state: Tree) -> Tree:
        return ring.forward(spec, query, kv, distance, state)

    return _over_shards(ring, kv, compute, state)


def _backward(
    ring: Ring, spec: Spec, per_query: PerQuery, kv: KVShard, finite: Array, so_far: Gradients
) -> Gradients:
    """Returns `so_far`, whose `with_shard` must be 0, plus the gradients from all shards.

    While a shard is computed, the gradients for it arrive from the previous devices.
    """
    # A barrier makes XLA send the keys again; it would keep those of the forward pass in memory.
    kv, per_query = lax.optimization_barrier((kv, per_query))

    def compute(kv: KVShard, distance: Index, hop: Hops | None, total: Gradients) -> Gradients:
        if hop is None:
            return ring.backward(spec, per_query, kv, distance, finite, total)
        arrived = hop.send_all(total.with_shard, ring.axes)
        total = total._replace(with_shard=so_far.with_shard)
        total = ring.backward(spec, per_query, kv, distance, finite, total)
        return total._replace(with_shard=jax.tree.map(jnp.add, arrived, total.with_shard))

    total = _over_shards(ring, kv, compute, so_far)
    if not ring.route.hops:
        return total
    d_key, d_value, d_params = total.with_shard
    narrow = d_key.astype(kv.key.dtype), d_value.astype(kv.value.dtype)
    home = ring.route.home.send((*narrow, d_params), ring.axes)
    return total._replace(with_shard=home)


class RingCall(NamedTuple):
    """A call on a ring, whose heads go around in this number of `rounds`. The spec is whole."""

    ring: Ring
    rounds: int

    def zeros(self, query: Array, value: Array, operands: Tree) -> Tree:
        """Returns `(out, normalizer, all_finite)` for no keys."""
        dtype = accumulation(query.dtype)
        row = jnp.zeros(query.shape[:3], dtype)
        out, finite = jnp.zeros((*row.shape, value.shape[-1]), dtype), jnp.ones((), bool)
        return self.ring.axes.vary((out, Normalizer(row - jnp.inf, row), finite), operands)

    def forward(self, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
        """Computes `(out, normalizer, all_finite)` of this device's queries and all keys."""
        arrays = spec, query, key, value

        def compute(round: Round, total: Tree) -> Tree:
            spec, query, ring = round.cut_spec(arrays[0]), round.cut(arrays[1]), self.ring
            body = lambda ring, kv, state: _forward(ring, spec, query, kv, state)  # noqa: E731
            state = self.zeros(query, value, arrays)
            ring = ring._replace(round=round)
            of_round = ring.each_chunk(spec, query, key, value, body, state)
            return *jax.tree.map(round.put, total[:2], of_round[:2]), total[2] & of_round[2]

        return rounds.run(self.rounds, compute, self.zeros(query, value, arrays))

    def backward(
        self, spec: Spec, per_query: PerQuery, key: Array, value: Array, finite: Array
    ) -> Gradients:
        """Computes the gradients, in the dtypes of the arrays."""
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
                chunk = _backward(ring, spec, per_query, kv, finite, so_far)
                add = functools.partial(round.add, first_key=ring.begin)
                return jax.tree.map(add, names.with_shard, total, chunk.with_shard), chunk.local

            state = total.with_shard, zeros(key, value, spec).local
            with_shard, local = ring.each_chunk(spec, query, key, value, body, state)
            return Gradients(jax.tree.map(round.add, names.local, total.local, local), with_shard)

        total = Gradients.of(letters, per_query.query, key, value, parameters(spec))
        total = vary(jax.tree.map(jnp.zeros_like, total), per_query.query)
        return rounds.run(self.rounds, compute, total)


def attend(
    call: Call, query: Array, key: Array, value: Array, axes: Axes
) -> tuple[Output, LogSumExp]:
    """Computes `(out [B, T, N, V], lse [B, N, T])` of this device's queries, differentiable.

    The call is prepared, and its arrays are this device's; there is one flat batch axis.
    """
    spec, T, S, n = call.spec, query.shape[1], key.shape[1], axes.devices
    if spec.dropout_rate:
        spec = dataclasses.replace(spec, dropout_key=dropout.key_words(spec.dropout_key))
    route = Route.of(spec, n * T, n * S, n, axes.order)
    count = rounds.count(Shapes.of(query, value)) if route.hops else 1
    ring = RingCall(Ring(axes, route, S, call.implementation), count)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> tuple[Array, ...]:
        return run_forward(params, spec, *qkv)[0]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Tree:
        out, normalizer, finite = ring.forward(with_parameters(spec, params), *qkv)
        return (out, normalizer.lse), (params, spec, *qkv, out, normalizer, finite)

    def run_backward(residuals: Tree, cotangents: tuple[Array, ...]) -> Tree:
        params, spec, query, key, value, out, normalizer, finite = residuals
        d_out, d_lse = cotangents
        delta = row_dots(d_out, out) - d_lse
        per_query = PerQuery.of(query, d_out, normalizer, delta)
        gradients = ring.backward(with_parameters(spec, params), per_query, key, value, finite)
        return gradients.params, None, gradients.local[0], *gradients.with_shard[:2]

    run.defvjp(run_forward, run_backward)
    inputs = reverse_mode.inputs((query, key, value, *parameters(spec)), spec)
    query, key, value, *params = axes.vary(inputs)
    out, lse = run(params, spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)
