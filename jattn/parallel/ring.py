"""Ring attention: each device keeps its queries, and shards of keys pass from device to device.

A device attends to the shard of keys and values that it holds while it receives the next shard, and
merges the results by their log-sum-exp (Liu et al. 2023, "Ring Attention with Blockwise
Transformers"). In the backward pass the shards go around once more, together with their gradients.
Beside its own shard, a device holds at most two others, so that its memory is linear in its own
number of tokens, whatever the length of the sequence.

Long shards go around in several rounds, each with a few of the heads. Each round's keys go around
in chunks, of which a device holds two at a time. A shard may stop once the mask certainly excludes
it for all further devices. A device skips a shard if the mask certainly excludes all pairs of its
queries and the shard's keys.
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
from jattn._pytree import axis_names, axis_of, split_letters
from jattn._types import Index, Output, Tree, accumulation
from jattn.call import Call
from jattn.kernels import registry
from jattn.kernels.common import lowering, reverse_mode, slicing
from jattn.kernels.common.derivatives import PerQuery, row_dots
from jattn.kernels.common.place import Place, at_place
from jattn.kernels.common.vjp import FunctionName
from jattn.parallel import placement, rounds
from jattn.parallel.axes import Axes
from jattn.parallel.rounds import Round, moved
from jattn.softmax import Normalizer
from jattn.spec import (
    Shapes,
    Spec,
    parameter_letters,
    parameters,
    scores_are_weights,
    with_parameters,
)


class HopGroup(NamedTuple):
    """`times` equal hops in succession: in each, every device in `sources` sends the shard that
    it holds to the device `distance` further in the ring."""

    distance: int
    times: int
    sources: tuple[int, ...]

    def send(self, tree: Tree, axes: Axes) -> Tree:
        """Returns the arrays that this device receives in one hop; 0 if no device sends to it."""
        pairs = [(i, (i + self.distance) % axes.devices) for i in self.sources]
        return jax.tree.map(lambda x: moved(lambda y: lax.ppermute(y, axes.name, pairs), x), tree)


class Route(NamedTuple):
    """The hops of the shards. All shards follow the same sequence of hops, each starting at its own
    device. A shard may stop before the last hop: in each hop only the devices in `sources` send."""

    needed: np.ndarray  # [d, s] is true if device d needs shard s
    sent_keys: slice  # the keys of each shard that are sent: other devices need only these
    hops: tuple[HopGroup, ...]  # in order, from a shard's own device to the others that need it

    @classmethod
    def of(cls, spec: Spec, T: int, S: int, n: int, order: str) -> "Route":
        """Returns the route of a call with T queries and S keys in all, on n devices."""
        if spec.q_positions is not None or spec.kv_positions is not None:
            return cls.with_fewest_hops(np.ones((n, n), bool), slice(0, S // n))
        arguments = spec.mask, T, S, n, order
        return cls.with_fewest_hops(placement.needed(*arguments), placement.sent_keys(*arguments))

    @classmethod
    def with_fewest_hops(cls, needed: np.ndarray, sent_keys: slice) -> "Route":
        """Returns the route with the fewest hops that takes each shard where it is needed."""
        n, shards = len(needed), np.arange(len(needed))
        # wanted[r, s]: device s + r needs shard s.
        # wanted_from[r, s]: device s + r or a device further ahead needs shard s.
        wanted = np.stack([needed[(shards + r) % n, shards] for r in range(n)])
        wanted_from = np.logical_or.accumulate(wanted[::-1])[::-1]
        # `stops` are distances from a shard's own device: 0, where every shard starts, and each
        # distance at which at least one shard is needed. Each hop leads from one stop to the next.
        stops = [0, *(r for r in range(1, n) if wanted[r].any())]
        hops: list[HopGroup] = []
        for start, stop in itertools.pairwise(stops):
            sources = {int(s + start) % n for s in np.flatnonzero(wanted_from[stop])}
            last = hops[-1] if hops else None
            # Successive hops over the same distance form one group, whose sources are those of all
            # its hops: a device that must send in one of them sends in all.
            if last and last.distance == stop - start:
                merged = tuple(sorted({*last.sources, *sources}))
                hops[-1] = HopGroup(stop - start, last.times + 1, merged)
            else:
                hops.append(HopGroup(stop - start, 1, tuple(sorted(sources))))
        return cls(needed, sent_keys, tuple(hops))

    @property
    def home(self) -> HopGroup:
        """The hop that takes the gradients of each shard back to the shard's own device."""
        n, travelled = len(self.needed), sum(x.distance * x.times for x in self.hops)
        return HopGroup(n - travelled, 1, tuple(range(n)))


def travels(letters: str) -> bool:
    """Returns whether an array with these axes goes around with the keys: it has S but not T."""
    axes = split_letters(letters)
    return "S" in axes and "T" not in axes


def _all_keys_axis(letters: str, leaf: Array) -> int | None:
    """Returns the S axis of an array that also has a T axis, such as a dense mask; returns None for
    other arrays, and if the S axis broadcasts.

    Arrays with both axes do not travel: each device has the entries of its own queries and all
    keys.
    """
    axis = axis_of("S", letters, leaf.ndim)
    has_all_keys = axis is not None and not travels(letters) and leaf.shape[axis] > 1
    return axis if has_all_keys else None


_QUERY_LETTERS = "T N _"  # axes of queries and their gradients
_KEY_LETTERS = "S N _"  # axes of keys, values and their gradients


def _slice_keys(letters: str, leaf: Array, start: Index, size: int) -> Array:
    """Slices an array with an axis S to `size` keys from `start` on, unless S broadcasts."""
    axis: Any = axis_of("S", letters, leaf.ndim)
    if leaf.shape[axis] in (1, size):
        return leaf
    return moved(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), leaf)


class KVShard(NamedTuple):
    """A shard of keys, or a chunk of one: the arrays that go around the ring.

    The local index of a key is its index in its shard; its global index is its index in the
    concatenation of all shards.
    """

    key: Array
    value: Array
    arrays: list[Array]  # the arrays of the spec that travel with the keys

    @classmethod
    def of(cls, spec: Spec, key: Array, value: Array, local_start: Index = 0) -> "KVShard":
        """Returns these keys and values with their slices of the arrays of `spec` that travel.
        `local_start` is the local index of the first key."""
        pairs = zip(jax.tree.leaves(axis_names(spec)), jax.tree.leaves(spec), strict=True)
        arrays = [_slice_keys(x, y, local_start, key.shape[1]) for x, y in pairs if travels(x)]
        return cls(key, value, arrays)

    def slice_spec(self, spec: Spec, global_start: Index) -> Spec:
        """Returns the spec with its arrays along S sliced to these keys, of which the first has the
        global index `global_start`."""
        arrays, size = iter(self.arrays), self.key.shape[1]

        def slice_leaf(letters: str, leaf: Array) -> Array:
            if travels(letters):
                return next(arrays)
            axis = _all_keys_axis(letters, leaf)
            return leaf if axis is None else slicing.take(leaf, global_start, size, axis)

        return jax.tree.map(slice_leaf, axis_names(spec), spec)


class Gradients(NamedTuple):
    """The gradients that the backward pass sums.

    `local` and `with_shard` each end with a list that has an entry for every parameter: None if the
    parameter's gradient is in the other list.
    """

    local: tuple[Any, list[Any]]  # of the queries, and of the parameters that stay on the device
    with_shard: tuple[Any, Any, list[Any]]  # of keys, values, and the parameters that travel

    @classmethod
    def of(cls, letters: list[str], query: Any, key: Any, value: Any, params: Any) -> "Gradients":
        """Builds this structure from one value for each array, such as its gradient or its axes.
        `letters` are the axes of the parameters; they tell which parameters travel."""
        pairs = [(travels(x), y) for x, y in zip(letters, params, strict=True)]
        local = [None if is_sent else x for is_sent, x in pairs]
        return cls((query, local), (key, value, [x if is_sent else None for is_sent, x in pairs]))

    @property
    def params(self) -> list[Array]:
        """The gradients of all parameters."""
        pairs = zip(self.local[1], self.with_shard[2], strict=True)
        return [travelled if local is None else local for local, travelled in pairs]


# The kernels that compute attention to a part of the keys, for results that are merged later.
_PARTIAL_KERNELS = ("native", "blockwise")


def check_normalizer(spec: Spec, alternative: str) -> None:
    """Raises NotImplementedError if `spec.normalizer` needs all keys of a query at once."""
    if spec.normalizer is not None and not scores_are_weights(spec):
        raise NotImplementedError(
            f"normalizer: {type(spec.normalizer).__name__} needs all keys of a query at once, but "
            f"each device has only some of them; write {alternative}"
        )


def check_implementation(name: str | None) -> None:
    """Raises NotImplementedError for an implementation that needs all keys at once."""
    registry.check_name(name)
    if name is not None and name not in _PARTIAL_KERNELS:
        possible = " and ".join(map(repr, _PARTIAL_KERNELS))
        reason = "it needs all keys at once, but a device of a ring holds only some of them"
        registry.refuse(name, f"{reason}; {possible} can compute with a part")


def run_part(
    function: FunctionName,
    like: Tree,
    implementation: str | None,
    spec: Spec,
    *operands: Tree,
    shapes: Shapes,
) -> Tree:
    """Runs a function of the named kernel, or of the first kernel that supports the call. Its
    results have the shapes and dtypes of `like`."""
    call = Call(spec, shapes, implementation=implementation)
    functions = registry.functions(call, _PARTIAL_KERNELS)
    assert functions is not None, "expected a kernel, got the reference implementation"

    def on_platform(platform: str, *operands: Any) -> Any:
        return getattr(functions.on(platform), function)(*operands)

    result_types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return lowering.platform_dependent(on_platform, result_types, spec, *operands)


class Ring(NamedTuple):
    """A ring of devices, and the heads and keys that go around it."""

    axes: Axes
    route: Route
    shard_size: int  # the number of keys of a shard
    implementation: str | None  # the kernel; None for the first that supports the call
    num_rounds: int  # in each, an equal share of the key heads goes around
    round: Round = Round()  # the current round
    local_start: Index = 0  # the local index of the first key of the current range or chunk

    def key_ranges(self) -> Iterator[tuple["Ring", int, int]]:
        """Yields `(ring, chunk size, number of chunks)` for each of three ranges of a shard's keys:
        the keys before the sent ones, the sent keys, and the keys after them. In the first and the
        last, the ring has no hops."""
        sent = self.route.sent_keys if self.route.hops else slice(0, 0)
        no_hops = self.route._replace(hops=())
        yield self._replace(route=no_hops), sent.start, 1
        count = rounds.chunks(sent.stop - sent.start)
        yield self._replace(local_start=sent.start), (sent.stop - sent.start) // count, count
        yield self._replace(route=no_hops, local_start=sent.stop), self.shard_size - sent.stop, 1

    def over_chunks(
        self,
        spec: Spec,
        query: Array,
        key: Array,
        value: Array,
        body: Callable[..., Any],
        state: Tree,
    ) -> Tree:
        """Folds `body(ring, kv, state)` over the chunks `kv` of this device's shard of keys. The
        argument `ring` has the hops of the chunk and its `local_start`.

        `spec` and `query` are sliced to the heads of the round, `key` and `value` are not.
        """
        for ring, size, count in self.key_ranges():

            def compute_chunk(i: Index, state: Tree, ring: Ring = ring, size: int = size) -> Tree:
                start = ring.local_start + i * size
                slice_chunk = functools.partial(self.round.slice_heads, keys=(start, size))
                kv = KVShard.of(spec, slice_chunk(key), slice_chunk(value), start)
                return body(ring._replace(local_start=start), self.axes.vary(kv, query), state)

            state = rounds.repeat(count if size else 0, compute_chunk, state)
        return state

    def shard_index(self, distance: Index) -> Array:
        """Returns the index of the shard that this device holds after all shards have moved
        `distance` devices."""
        return (self.axes.device_index - distance) % self.axes.devices

    def global_start(self, distance: Index) -> Array:
        """Returns the global index of the first key that this device holds after all shards have
        moved `distance` devices."""
        return self.shard_index(distance) * self.shard_size + self.local_start

    def local_spec(self, spec: Spec, query: Array, kv: KVShard, distance: Index) -> Spec:
        """Returns the spec of this device's queries and of the keys `kv`, which have moved
        `distance` devices. Masks, score functions and dropout see the places of the whole call."""
        (B, T, N, _), S = query.shape, kv.key.shape[1]
        axes, start, (number, num_rounds) = self.axes, self.global_start(distance), self.round
        b, h = axes.first_row_and_head(B, N * num_rounds)
        h = h if num_rounds == 1 else h + number * N
        shard_places = axes.places(self.shard_size, self.shard_index(distance))
        place = Place(
            b,
            h,
            q=axes.places(T),
            kv=slicing.take(shard_places, self.local_start, S),
            runs=(axes.range_size(T), min(S, axes.range_size(self.shard_size))),
            keys_from=start if axes.order == "contiguous" else None,
        )
        return dataclasses.replace(at_place(kv.slice_spec(spec, start), place), partial=True)

    def if_needed(self, distance: Index, compute: Callable[..., Any], otherwise: Tree) -> Tree:
        """Returns `compute()`, or `otherwise` if none of this device's queries needs the shard."""
        if self.route.needed.all():
            return compute()
        index = self.axes.device_index, self.shard_index(distance)
        is_needed = jnp.asarray(self.route.needed)[index]
        return lax.cond(is_needed, compute, lambda: otherwise)

    def forward(
        self, spec: Spec, query: Array, kv: KVShard, distance: Index, state: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Returns the state with a shard's contribution added. A state is `(out, normalizer,
        all_finite)`, like the results of `AttentionVJP.forward`."""
        shapes = Shapes.of(query, kv.value)

        def compute() -> Tree:
            operands = (self.local_spec(spec, query, kv, distance), query, kv.key, kv.value)
            out, normalizer, all_finite = run_part(
                "forward", state, self.implementation, *operands, shapes=shapes
            )
            if scores_are_weights(spec):
                return state[0] + out, normalizer, state[2] & all_finite
            return *softmax.join_pair(state[:2], (out, normalizer)), state[2] & all_finite

        return self.if_needed(distance, compute, state)

    def backward(
        self,
        spec: Spec,
        per_query: PerQuery,
        kv: KVShard,
        distance: Index,
        all_finite: Array,
        so_far: Gradients,
    ) -> Gradients:
        """Returns the gradients from a shard of keys.

        `so_far.with_shard` must be 0. In the result, `local` is `so_far.local` plus this shard's
        contribution, and `with_shard` is this device's contribution to the gradients that travel
        with the shard. If no query needs the shard, `so_far` is returned unchanged.
        """
        shapes = Shapes.of(per_query.query, kv.value)
        letters = parameter_letters(spec)
        local_letters = Gradients.of(letters, _QUERY_LETTERS, "", "", letters).local

        def add(letters: str, total: Array, gradient: Array) -> Array:
            axis = _all_keys_axis(letters, total)
            if axis is None:
                return total + gradient
            return slicing.add_at(total, gradient, self.global_start(distance), axis)

        def compute() -> Gradients:
            local_spec = self.local_spec(spec, per_query.query, kv, distance)
            like = (parameters(local_spec), so_far.local[0], *so_far.with_shard[:2])
            operands = (per_query, kv.key, kv.value, all_finite)
            d_params, d_query, d_key, d_value = run_part(
                "backward", like, self.implementation, local_spec, *operands, shapes=shapes
            )
            gradients = Gradients.of(letters, d_query, d_key, d_value, d_params)
            local = jax.tree.map(add, local_letters, so_far.local, gradients.local)
            return gradients._replace(local=local)

        return self.if_needed(distance, compute, so_far)


def _over_shards(ring: Ring, kv: KVShard, compute: Callable[..., Tree], state: Tree) -> Tree:
    """Folds `compute(kv, distance, hop, state)` over the shards that visit this device.

    A device sends each shard on before it computes with it, so that transfer and computation
    overlap. `distance` is the number of devices by which the shard has moved. `hop` is the
    `HopGroup` with which the shard arrived; None for the device's own shard.
    """
    hops, distance = ring.route.hops, 0
    next_shard = hops[0].send(kv, ring.axes) if hops else None
    state = compute(kv, distance, None, state)
    for hop, next_hop in itertools.zip_longest(hops, hops[1:]):

        def body(i: Index, carried: Tree, distance: int = distance, hop: HopGroup = hop) -> Tree:
            kv, state = carried
            next_shard = hop.send(kv, ring.axes)
            return next_shard, compute(kv, distance + (i + 1) * hop.distance, hop, state)

        # The last shard that arrives in this group is sent on by the next group.
        kv, state = rounds.repeat(hop.times - 1, body, (next_shard, state))
        next_shard = next_hop.send(kv, ring.axes) if next_hop else None
        distance += hop.times * hop.distance
        state = compute(kv, distance, hop, state)
    return state


def _all_shards_backward(
    ring: Ring, spec: Spec, per_query: PerQuery, kv: KVShard, all_finite: Array, so_far: Gradients
) -> Gradients:
    """Adds the gradients from all shards to `so_far`, whose `with_shard` must be 0.

    While a device computes with a shard, the shard's gradients arrive from its previous device. In
    the result, `with_shard` has the gradients of this device's own shard, from all devices.
    """
    # Without this barrier XLA reuses the shards that were received in the forward pass, and so
    # keeps all of them in memory; with it they are sent again.
    kv, per_query = lax.optimization_barrier((kv, per_query))

    def compute(kv: KVShard, distance: Index, hop: HopGroup | None, total: Gradients) -> Gradients:
        if hop is None:
            return ring.backward(spec, per_query, kv, distance, all_finite, total)
        # The gradients of a shard make all hops, even those that the shard itself does not make, so
        # that `Route.home` takes the gradients of every shard home over the same distance.
        hop_from_all = hop._replace(sources=tuple(range(ring.axes.devices)))
        arrived = hop_from_all.send(total.with_shard, ring.axes)
        # This device's contribution is computed first, and `arrived` is added to it afterwards, so
        # that the computation overlaps with the transfer.
        total = total._replace(with_shard=so_far.with_shard)
        total = ring.backward(spec, per_query, kv, distance, all_finite, total)
        return total._replace(with_shard=jax.tree.map(jnp.add, arrived, total.with_shard))

    total = _over_shards(ring, kv, compute, so_far)
    if not ring.route.hops:
        return total
    d_key, d_value, d_params = total.with_shard
    # The sums are complete, so the last hop can send them in the dtypes of keys and values.
    d_key, d_value = d_key.astype(kv.key.dtype), d_value.astype(kv.value.dtype)
    returned = ring.route.home.send((d_key, d_value, d_params), ring.axes)
    return total._replace(with_shard=returned)


def _initial_state(ring: Ring, query: Array, value: Array, operands: Tree) -> Tree:
    """Returns `(out, normalizer, all_finite)` of queries that have seen no keys."""
    dtype = accumulation(query.dtype)
    zeros = jnp.zeros(query.shape[:3], dtype)
    out, all_finite = jnp.zeros((*zeros.shape, value.shape[-1]), dtype), jnp.ones((), bool)
    return ring.axes.vary((out, Normalizer(zeros - jnp.inf, zeros), all_finite), operands)


def _forward(ring: Ring, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Computes `(out, normalizer, all_finite)` of this device's queries and all keys and heads."""
    inputs = spec, query, key, value

    def compute_round(number: Index, total: Tree) -> Tree:
        round = Round(number, ring.num_rounds)
        round_spec, round_query = round.slice_spec(spec), round.slice_heads(query)

        def body(ring: Ring, kv: KVShard, state: Tree) -> Tree:
            add_shard = lambda kv, distance, _, state: ring.forward(  # noqa: E731
                round_spec, round_query, kv, distance, state
            )
            return _over_shards(ring, kv, add_shard, state)

        state = _initial_state(ring, round_query, value, inputs)
        round_ring = ring._replace(round=round)
        result = round_ring.over_chunks(round_spec, round_query, key, value, body, state)
        return *jax.tree.map(round.put, total[:2], result[:2]), total[2] & result[2]

    return rounds.repeat(ring.num_rounds, compute_round, _initial_state(ring, query, value, inputs))


def _backward(
    ring: Ring, spec: Spec, per_query: PerQuery, key: Array, value: Array, all_finite: Array
) -> Gradients:
    """Computes the gradients of queries, keys, values and parameters, each in its array's dtype."""
    letters, dtype = parameter_letters(spec), accumulation(key.dtype)
    axis_letters = Gradients.of(letters, _QUERY_LETTERS, _KEY_LETTERS, _KEY_LETTERS, letters)
    vary = ring.axes.vary

    def compute_round(number: Index, total: Gradients) -> Gradients:
        round = Round(number, ring.num_rounds)
        round_spec = round.slice_spec(spec)
        round_per_query = jax.tree.map(round.slice_heads, per_query)
        query, round_ring = round_per_query.query, ring._replace(round=round)

        def zeros(key: Array, value: Array, spec: Spec) -> Gradients:
            d_query, d_key, d_value = (jnp.zeros(x.shape, dtype) for x in (query, key, value))
            d_params = map(jnp.zeros_like, parameters(spec))
            return vary(Gradients.of(letters, d_query, d_key, d_value, d_params), query)

        def body(ring: Ring, kv: KVShard, state: Tree) -> Tree:
            total, local = state
            chunk_spec = kv.slice_spec(round_spec, ring.local_start)  # only its shapes are used
            so_far = zeros(kv.key, kv.value, chunk_spec)._replace(local=local)
            result = _all_shards_backward(ring, round_spec, round_per_query, kv, all_finite, so_far)
            add = functools.partial(round.add, first_key=ring.local_start)
            total = jax.tree.map(add, axis_letters.with_shard, total, result.with_shard)
            return total, result.local

        state = total.with_shard, zeros(key, value, round_spec).local
        with_shard, local = round_ring.over_chunks(round_spec, query, key, value, body, state)
        return Gradients(
            jax.tree.map(round.add, axis_letters.local, total.local, local), with_shard
        )

    total = Gradients.of(letters, per_query.query, key, value, parameters(spec))
    total = vary(jax.tree.map(jnp.zeros_like, total), per_query.query)
    return rounds.repeat(ring.num_rounds, compute_round, total)


def attend(
    call: Call, query: Array, key: Array, value: Array, axes: Axes
) -> tuple[Output, Normalizer]:
    """Computes `(out [B, T, N, V], normalizer [B, N, T])` of this device's queries. JAX can
    differentiate both in reverse mode.

    `call` comes from `Call.prepared` and has this device's arrays. All arrays have one batch axis.
    """
    spec, T, S, n = call.spec, query.shape[1], key.shape[1], axes.devices
    if spec.dropout_rate:
        spec = dataclasses.replace(spec, dropout_key=dropout.key_words(spec.dropout_key))
    route = Route.of(spec, n * T, n * S, n, axes.order)
    num_rounds = rounds.count(Shapes.of(query, value)) if route.hops else 1
    ring = Ring(axes, route, S, call.implementation, num_rounds)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> tuple[Array, Normalizer]:
        return run_forward(params, spec, *qkv)[0]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Tree:
        out, normalizer, all_finite = _forward(ring, with_parameters(spec, params), *qkv)
        return (out, normalizer), (params, spec, *qkv, out, normalizer, all_finite)

    def run_backward(residuals: Tree, cotangents: tuple[Array, Normalizer]) -> Tree:
        params, spec, query, key, value, out, normalizer, all_finite = residuals
        # Callers use the normalizer only through lse = maximum + log_total. So the cotangent of
        # log_total is that of lse, and the cotangent of maximum is not needed.
        d_out, (_, d_lse) = cotangents
        # The cotangent of a score is weight · (d_weight − delta), with one delta for each query.
        delta = row_dots(d_out, out) - d_lse
        if scores_are_weights(spec):
            delta = jnp.zeros_like(delta)
        per_query = PerQuery.of(query, d_out, normalizer, delta)
        spec = with_parameters(spec, params)
        gradients = _backward(ring, spec, per_query, key, value, all_finite)
        # None for `spec`: its differentiable arrays are passed as `params`.
        return gradients.params, None, gradients.local[0], *gradients.with_shard[:2]

    run.defvjp(run_forward, run_backward)
    inputs = reverse_mode.inputs((query, key, value, *parameters(spec)), spec)
    query, key, value, *params = axes.vary(inputs)
    out, normalizer = run(params, spec, query, key, value)
    return out.astype(query.dtype), normalizer.by_head()
