"""Ring attention: queries stay, keys and values go round, and what each shard adds is merged.

Each device computes its queries with the shard of keys that it holds while the next one is on its
way (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). Backward, keys and values go
round once more, and their gradients with them. A device holds two shards at a time, whatever the
length: memory is linear in its own tokens. Long shards go round in several rounds, a few heads in
each, so that a device holds two shards of a few heads. Shards that a mask surely empties are not
computed, and not sent past the devices that need them; of a shard, only that part travels which
others need.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import softmax, tile
from jattn._pytree import axis_names, axis_of
from jattn._types import LogSumExp, Output, accumulation
from jattn.kernels.common import reverse_mode, slicing
from jattn.kernels.common.derivatives import PerQuery
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

    def send(self, tree: Any, axes: Axes) -> Any:
        """What arrives; zeros where nobody sends."""
        pairs = [(i, (i + self.distance) % axes.devices) for i in self.sources]

        return jax.tree.map(lambda x: moved(lambda y: lax.ppermute(y, axes.name, pairs), x), tree)

    def send_all(self, tree: Any, axes: Axes) -> Any:
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


def _key_axis(letters: str, leaf: Any) -> int | None:
    """The axis along S of an array along T and S, of which each shard of keys has a part."""
    axis = axis_of("S", letters, leaf.ndim)
    has_part = axis is not None and not travels(letters) and leaf.shape[axis] > 1
    return axis if has_part else None


_KEYS = "S _ _"  # the letters of keys and values, and of their gradients


def _part(letters: str, leaf: Array, part: slice) -> Array:
    """A shard of an array along S cut to a part; arrays of size 1 there as they are."""
    axis: Any = axis_of("S", letters, leaf.ndim)
    if leaf.shape[axis] == 1:
        return leaf
    return lax.slice_in_dim(leaf, part.start, part.stop, axis=axis)


def _put_back(letters: str, leaf: Array, found: Array, part: slice) -> Array:
    """A shard of an array along S with this in place of a part."""
    if found.shape == leaf.shape:
        return found
    axis: Any = axis_of("S", letters, leaf.ndim)
    return lax.dynamic_update_slice_in_dim(leaf.astype(found.dtype), found, part.start, axis)


class KVShard(NamedTuple):
    """What goes round: the keys and values of a shard, or of a part of it, and the spec's arrays
    along S."""

    key: Array
    value: Array
    arrays: list[Array]

    @classmethod
    def of(cls, spec: Spec, key: Array, value: Array) -> "KVShard":
        """The shard that a device starts with: its own."""
        pairs = zip(jax.tree.leaves(axis_names(spec)), jax.tree.leaves(spec), strict=True)
        return cls(key, value, [x for letters, x in pairs if travels(letters)])

    def part(self, spec: Spec, part: slice) -> "KVShard":
        """The part of a shard that travels."""
        letters = filter(travels, jax.tree.leaves(axis_names(spec)))
        arrays = [_part(*x, part) for x in zip(letters, self.arrays, strict=True)]
        return KVShard(_part(_KEYS, self.key, part), _part(_KEYS, self.value, part), arrays)

    def cut(self, spec: Spec, first: Any) -> Spec:
        """The spec with its arrays along S cut to this shard, which begins at key `first`."""
        arrays, size = iter(self.arrays), self.key.shape[1]

        def one(letters: str, leaf: Any) -> Any:
            if travels(letters):
                return next(arrays)
            axis = _key_axis(letters, leaf)
            return leaf if axis is None else slicing.take(leaf, first, size, axis)

        return jax.tree.map(one, axis_names(spec), spec)


class Gradients(NamedTuple):
    """What the backward pass sums.

    query: the gradient of the queries, which never leaves its device.
    local: those of the parameters that stay on the device, as the query does.
    with_shard: those of keys, of values, and of the parameters that travel with a shard.

    Both lists of parameters have an entry for each; it is None in the list of the other kind.
    """

    query: Array
    local: list[Any]
    with_shard: tuple[Array, Array, list[Any]]

    @property
    def params(self) -> list[Array]:
        """The gradients of parameters."""
        return [y if x is None else x for x, y in zip(self.local, self.with_shard[2], strict=True)]

    def part(self, letters: list[str], part: slice) -> "Gradients":
        """Those that travel with a shard, cut to a part of it."""
        return self._moving(letters, lambda name, x, _: _part(name, x, part), self.with_shard)

    def put_back(self, letters: list[str], with_shard: Any, part: slice) -> "Gradients":
        """Those of a whole shard with these, which have come home, in place of a part."""
        return self._moving(letters, lambda name, x, y: _put_back(name, x, y, part), with_shard)

    def _moving(self, letters: list[str], function: Any, others: Any) -> "Gradients":
        names, (d_key, d_value, d_params) = (_KEYS, _KEYS, *letters), self.with_shard
        pairs = zip(names, (d_key, d_value, *d_params), (*others[:2], *others[2]), strict=True)
        d_key, d_value, *d_params = (None if x is None else function(n, x, y) for n, x, y in pairs)
        return self._replace(with_shard=(d_key, d_value, d_params))


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
    """

    axes: Axes
    route: Route
    keys: int
    implementation: str | None
    round: Round = Round()

    def shard(self, distance: Any) -> Any:
        """Which shard this device holds when all have travelled this `distance` from home."""
        return (self.axes.place - distance) % self.axes.devices

    def first(self, distance: Any) -> Any:
        """Where the keys that this device holds begin among all, as the shards lie."""
        at_home = isinstance(distance, int) and distance == 0
        return self.shard(distance) * self.keys + (0 if at_home else self.route.part.start)

    def piece(self, spec: Spec, query: Array, kv: KVShard, distance: Any) -> Spec:
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
            places if S == self.keys else places[self.route.part],
            (axes.run(T), min(S, axes.run(self.keys))),
            first if axes.order == "contiguous" else None,
        )
        own = at_place(kv.cut(spec, first), place)
        return dataclasses.replace(own, partial=True)

    def if_needed(self, shard: Any, compute: Any, otherwise: Any) -> Any:
        """`compute()`; `otherwise` where none of this device's queries needs the shard."""
        if self.route.needed.all():
            return compute()
        wanted = jnp.asarray(self.route.needed)[self.axes.place, shard]
        return lax.cond(wanted, compute, lambda: otherwise)

    def forward(
        self, spec: Spec, query: Array, kv: KVShard, distance: Any, state: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """`(out, normalizer, all_finite)` with what a shard of keys adds."""
        shard, shapes = self.shard(distance), Shapes.of(query, kv.value)

        def compute() -> Any:
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
        distance: Any,
        finite: Array,
        zeros: Gradients,
    ) -> Gradients:
        """What a shard of keys adds to gradients."""
        shard, shapes = self.shard(distance), Shapes.of(per_query.query, kv.value)
        letters = parameter_letters(spec)

        def compute() -> Gradients:
            own = self.piece(spec, per_query.query, kv, distance)
            wide = (zeros.query, *zeros.with_shard[:2])
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (parameters(own), *wide)
            )
            operands = (own, per_query, kv.key, kv.value, finite)
            d_params, d_query, d_key, d_value = pieces.run(
                "backward", like, self.implementation, *operands, shapes=shapes
            )

            def part_of_all(name: str, part: Array, zero: Array) -> Array:
                axis = _key_axis(name, zero)
                return (
                    part if axis is None else slicing.add_at(zero, part, self.first(distance), axis)
                )

            parts = list(zip(letters, d_params, zeros.local, strict=True))
            local = [
                None if zero is None else part_of_all(name, part, zero)
                for name, part, zero in parts
            ]
            travelling = [part if zero is None else None for _, part, zero in parts]
            return Gradients(d_query, local, (d_key, d_value, travelling))

        return self.if_needed(shard, compute, zeros)


# ---------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------


def _repeat(count: int, body: Any, state: Any) -> Any:
    """`body(i, state)` for i below `count`; without a loop where that is one."""
    if count <= 1:
        return body(0, state) if count else state
    return lax.fori_loop(
        0, count, lambda i, x: body(lax.convert_element_type(i, jnp.int32), x), state
    )


def _forward(ring: Ring, spec: Spec, query: Array, kv: KVShard, state: Any) -> Any:
    """What all shards add to `state`. While one is computed, the next is being sent."""
    hops, distance = ring.route.hops, 0
    next_shard = hops[0].send(kv.part(spec, ring.route.part), ring.axes) if hops else None
    state = ring.forward(spec, query, kv, distance, state)
    for this, then in itertools.zip_longest(hops, hops[1:]):

        def body(i: Any, carried: Any, distance: int = distance, this: Hops = this) -> Any:
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
    ring: Ring, spec: Spec, per_query: PerQuery, kv: KVShard, finite: Array, zeros: Gradients
) -> Gradients:
    """The gradients from all shards. While one is computed, two things are being sent: the next
    shard, and the gradients that the devices before have found for this one."""
    hops, letters, part, distance = ring.route.hops, parameter_letters(spec), ring.route.part, 0
    # Keys are sent once more: XLA would keep those that came in the forward pass until now.
    kv, per_query = lax.optimization_barrier((kv, per_query))
    next_shard = hops[0].send(kv.part(spec, part), ring.axes) if hops else None
    own = ring.backward(spec, per_query, kv, distance, finite, zeros)
    if not hops:
        return own
    total, zeros = own.part(letters, part), zeros.part(letters, part)

    def added(hop: Hops, total: Gradients, kv: KVShard, distance: Any) -> Gradients:
        total = total._replace(with_shard=hop.send_all(total.with_shard, ring.axes))
        found = ring.backward(spec, per_query, kv, distance, finite, zeros)
        return jax.tree.map(jnp.add, total, found)

    for this, then in itertools.zip_longest(hops, hops[1:]):

        def body(i: Any, carried: Any, distance: int = distance, this: Hops = this) -> Any:
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
    return total._replace(with_shard=own.with_shard).put_back(letters, home, part)


def attend(
    spec: Spec, query: Array, key: Array, value: Array, axes: Axes, implementation: str | None
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` of this device's queries and all keys, differentiable.

    The spec is prepared, its arrays are this device's; there is one flat batch axis.
    """
    (B, T, N, _), (S, V) = query.shape, (key.shape[1], value.shape[-1])
    dtype, n = accumulation(query.dtype), axes.devices
    if spec.dropout_rate:
        spec = dataclasses.replace(spec, dropout_key=tile.key_words(spec.dropout_key))
    route = Route.of(spec, n * T, n * S, n, axes.order)
    count = rounds.count(Shapes.of(query, value)) if route.hops else 1
    ring = Ring(axes, route, S, implementation)
    by_head = [Round.axis(*x) for x in zip(parameter_letters(spec), parameters(spec), strict=True)]

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        return run_forward(params, spec, *qkv)[0]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        whole = with_parameters(spec, params)

        def zeros(heads: int, beside: Any) -> Any:
            row = jnp.zeros((B, T, heads), dtype)
            out, finite = jnp.zeros((B, T, heads, V), dtype), jnp.ones((), bool)
            return axes.vary((out, Normalizer(row - jnp.inf, row), finite), beside)

        def compute(round: Round) -> Any:
            own = round.cut_spec(whole)
            query, key, value = map(round.cut, qkv)
            kv = axes.vary(KVShard.of(own, key, value), query)
            state = zeros(N // count, (kv, query))
            return _forward(ring._replace(round=round), own, query, kv, state)

        def put(round: Round, total: Any, found: Any) -> Any:
            return *jax.tree.map(round.put, total[:2], found[:2]), total[2] & found[2]

        results = rounds.run(count, compute, zeros(N, (whole, qkv)), put)
        out, normalizer, finite = results
        return (out, normalizer.lse), (params, spec, *qkv, out, normalizer, finite)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        params, spec, query, key, value, out, normalizer, finite = residuals
        whole = with_parameters(spec, params)
        rows = query, out, normalizer, *cotangents
        which_travel = [travels(x) for x in parameter_letters(spec)]

        def compute(round: Round) -> Any:
            own = round.cut_spec(whole)
            query, out, normalizer, d_out, d_lse = jax.tree.map(round.cut, rows)
            delta = jnp.sum(d_out * out, axis=-1) - d_lse
            per_query = PerQuery.of(query, d_out, normalizer, delta)
            arrays = query, round.cut(key), round.cut(value)
            params = list(zip(parameters(own), which_travel, strict=True))
            local = [None if sent else jnp.zeros_like(x) for x, sent in params]
            travelling = [jnp.zeros_like(x) if sent else None for x, sent in params]
            wide = [jnp.zeros(x.shape, dtype) for x in arrays]
            zeros = Gradients(wide[0], local, (wide[1], wide[2], travelling))
            kv, zeros = axes.vary((KVShard.of(own, *arrays[1:]), zeros), arrays[0])
            total = _backward(ring._replace(round=round), own, per_query, kv, finite, zeros)
            found = zip((total.query, *total.with_shard[:2]), arrays, strict=True)
            return total.params, [x.astype(y.dtype) for x, y in found]

        def put(round: Round, total: Any, found: Any) -> Any:
            by_round = zip(total[0], found[0], by_head, strict=True)
            return [round.put(*x) for x in by_round], jax.tree.map(round.put, total[1], found[1])

        zeros = axes.vary(jax.tree.map(jnp.zeros_like, (params, [query, key, value])), query)
        d_params, gradients = rounds.run(count, compute, zeros, put)
        return d_params, None, *gradients

    run.defvjp(run_forward, run_backward)
    inputs = reverse_mode.inputs((query, key, value, *parameters(spec)), spec)
    query, key, value, *params = axes.vary(inputs)
    out, lse = run(params, spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)
