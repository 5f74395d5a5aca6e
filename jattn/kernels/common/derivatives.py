"""Derivatives of attention, of first and second order and in every mode.

Attention is y = F(θ), of parameters, queries, keys and values θ. Four maps are all that derivatives
up to the second ask for, and each is the derivative or the transpose of others:

    F(θ)        changes with θ̇ by    T(θ; θ̇)
    T(θ; a)     = F'(θ) a             transposed in a it is G, changes with θ̇ by Q(θ; a, θ̇)
    G(θ; c)     = F'(θ)ᵀ c            changes with θ̇ by H(θ; c, θ̇)
    H(θ; c, u)  = ∂G(θ; c)/∂θ u       transposed in u it is itself: a matrix of second derivatives
    Q(θ; a, u)  = ∂T(θ; a)/∂θ u       transposed in u it is H(θ; c, a)

F and G are a kernel's forward and backward function. T, H and Q are blockwise passes: T is linear
in a, H and Q are derivatives of the backward pass and of T, along a change of θ and of all that the
forward pass has found for them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn.kernels.common import lowering
from jattn.kernels.common.custom_derivative import with_derivative
from jattn.softmax import Normalizer
from jattn.spec import Spec, with_parameters


class Inputs(NamedTuple):
    """What attention is differentiated by, or a change of it or a cotangent, with None for 0."""

    params: Any
    query: Any
    key: Any
    value: Any


class Known(NamedTuple):
    """What the forward pass has found, see `AttentionVJP`, or a change of it; of `kept` a list."""

    out: Any
    normalizer: Normalizer
    all_finite: Any
    kept: Any


class Results(NamedTuple):
    """out `[B, T, N, V]` and lse `[B, T, N]`, or a change of them or a cotangent."""

    out: Any
    lse: Any


def _results(known: Known) -> Results:
    """Of the two numbers of a normalizer the one that has a tangent, that of their sum."""
    return Results(known.out, known.normalizer.log_total)


def _moved(d_lse: Array) -> Any:
    """A change of a normalizer by that of the sum of its two numbers."""
    return Normalizer(None, d_lse)  # pyright: ignore[reportArgumentType]


_At = tuple[Spec, Inputs, Known]
_AtBoth = tuple[Spec, Inputs, Known, Results]


class PerQuery(NamedTuple):
    """What a backward pass is given along the queries, each `[B, T, N, ...]`.

    With s the scores and p = exp((s − maximum) − log_total) the weights before dropout, the
    cotangent of s is p (drop(d_out vᵀ) − delta), where delta = rowsum(d_out · out) − d_lse.
    `maximum` and `log_total` are those of the `Normalizer`, but 0 in place of −inf.
    """

    query: Any
    d_out: Any
    maximum: Any
    log_total: Any
    delta: Any

    @classmethod
    def of(cls, query: Array, d_out: Array, normalizer: Normalizer, delta: Array) -> "PerQuery":
        maximum, log_total = normalizer
        return cls(query, d_out, _finite(maximum), log_total, delta)


def _per_query(query: Array, known: Known, cotangents: Results) -> PerQuery:
    delta = jnp.sum(cotangents.out * known.out, axis=-1) - cotangents.lse
    return PerQuery.of(query, cotangents.out, known.normalizer, delta)


def _finite(maximum: Array) -> Array:
    return jnp.where(maximum == -jnp.inf, 0, maximum)


class Moving(NamedTuple):
    """What a tangent pass is given along the queries, each `[B, T, N, ...]`: the query and its
    tangent, and of the forward pass the output and the normalizer as in `PerQuery`."""

    query: Any
    tangent: Any
    out: Any
    maximum: Any
    log_total: Any


class Passes(NamedTuple):
    """Functions in JAX's own operations, which it differentiates in forward mode.

    tangent(platform, spec, d_params, moving, key, d_key, value, d_value) -> (d_out, d_lse)
        `[B, T, N, V]` and `[B, T, N]`, of a change of the spec's `parameters`, the queries, the
        keys and the values; `moving` is a `Moving`.
    backward(platform, spec, per_query, key, value) -> (d_parameters, d_query, d_key, d_value)
        As that of an `AttentionVJP`.
    """

    tangent: Callable[..., Any]
    backward: Callable[..., Any]


class Attention(NamedTuple):
    """Attention with its derivatives, made of three functions of a kernel and the passes.

    value(spec, *qkv) -> (out, lse)
    forward(spec, *qkv) -> Known
    backward(spec, per_query, key, value, all_finite, *kept) -> gradients as those of an
        `AttentionVJP`, in the dtype of sums.
    """

    value: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    passes: Passes

    def __call__(self, spec: Spec, inputs: Inputs) -> Results:
        """F, differentiable by the inputs."""

        def value(spec: Spec, inputs: Inputs) -> Results:
            return Results(*self.value(with_parameters(spec, inputs.params), *inputs[1:]))

        def rule(operands: Any, changes: Any) -> tuple[Results, Results]:
            spec, inputs = operands
            known = self._known(spec, inputs)
            found = Results(known.out, known.normalizer.lse)
            return found, self._tangent(spec, inputs, known, changes[1])

        return with_derivative(value, rule)(spec, inputs)

    def _known(self, spec: Spec, inputs: Inputs) -> Known:
        """What the forward pass finds. Weights depend on the sum of a normalizer's two numbers
        alone, so that only one of them has a tangent."""

        def value(spec: Spec, inputs: Inputs) -> Known:
            return self.forward(with_parameters(spec, inputs.params), *inputs[1:])

        def rule(operands: Any, changes: Any) -> tuple[Known, Known]:
            spec, inputs = operands
            known = self._known(spec, inputs)
            d_out, d_lse = self._tangent(spec, inputs, known, changes[1])
            return known, Known(d_out, _moved(d_lse), None, [None] * len(known.kept))

        return with_derivative(value, rule)(spec, inputs)

    def _gradients(self, spec: Spec, inputs: Inputs, known: Known, cotangents: Results) -> Inputs:
        """G, in the dtypes of the inputs."""

        def value(spec: Spec, inputs: Inputs, known: Known, cotangents: Results) -> Inputs:
            per_query = _per_query(inputs.query, known, cotangents)
            keys = (inputs.key, inputs.value)
            own = with_parameters(spec, inputs.params)
            found = self.backward(own, per_query, *keys, known.all_finite, *known.kept)
            return _cast(found, inputs)

        def rule(operands: _AtBoth, changes: Any) -> tuple[Inputs, Inputs]:
            _, d_inputs, d_known, d_cotangents = changes
            change = _Change(d_inputs, _results(d_known), d_cotangents)
            return self._gradients(*operands), self._curvature(*operands, change)

        return with_derivative(value, rule)(spec, inputs, known, cotangents)

    def _tangent(self, spec: Spec, inputs: Inputs, known: Known, along: Inputs) -> Results:
        """T."""
        if not jax.tree.leaves(along):
            return jax.tree.map(jnp.zeros_like, _results(known))

        def run(platform: str, spec: Spec, inputs: Inputs, known: Known, along: Inputs) -> Results:
            return self._pass(platform, spec, inputs, known, _filled(along, inputs))

        given = _given(along)

        def transpose(rest: _At, cotangents: Results) -> Inputs:
            return _wanted(self._gradients(*rest, cotangents), given)

        def derivative(rest: _At, along: Inputs, d_rest: Any, d_along: Inputs) -> Results:
            _, d_inputs, d_known = d_rest
            return self._bending(*rest, along, _Change(d_inputs, _results(d_known), d_along))

        like = _results(known)
        rules = lowering.Linear(transpose, derivative)
        return lowering.linear(run, like, rules, spec, inputs, known, along)

    def _pass(
        self, platform: str, spec: Spec, inputs: Inputs, known: Known, along: Inputs
    ) -> Results:
        """T as it is computed, which JAX may differentiate."""
        maximum, log_total = known.normalizer
        moving = Moving(inputs.query, along.query, known.out, _finite(maximum), log_total)
        keys = (inputs.key, along.key, inputs.value, along.value)
        own = with_parameters(spec, inputs.params)
        return Results(*self.passes.tangent(platform, own, along.params, moving, *keys))

    def _curvature(
        self, spec: Spec, inputs: Inputs, known: Known, cotangents: Results, change: "_Change"
    ) -> Inputs:
        """H, with what G changes by with its cotangents."""
        if not jax.tree.leaves(change):
            return jax.tree.map(jnp.zeros_like, inputs)

        def gradients(
            platform: str, spec: Spec, inputs: Inputs, known: Known, cotangents: Results
        ) -> Inputs:
            per_query = _per_query(inputs.query, known, cotangents)
            own = with_parameters(spec, inputs.params)
            found = self.passes.backward(platform, own, per_query, inputs.key, inputs.value)
            return _cast(found, inputs)

        def run(
            platform: str,
            spec: Spec,
            inputs: Inputs,
            known: Known,
            cotangents: Results,
            change: _Change,
        ) -> Inputs:
            run = functools.partial(gradients, platform, spec)
            if not jax.tree.leaves((change.inputs, change.results)):
                return run(inputs, known, _filled(change.operand, cotangents))
            return change.along(run, inputs, known, cotangents)

        given = _given(change)

        def transpose(rest: _AtBoth, cotangent: Inputs) -> _Change:
            d_results = self._tangent(*rest[:3], cotangent)
            found = self._curvature(*rest, _Change(cotangent, d_results, _NOTHING))
            return _Change(
                _wanted(found, given.inputs), _NOTHING, _wanted(d_results, given.operand)
            )

        rules = lowering.Linear(transpose, _third)
        return lowering.linear(run, inputs, rules, spec, inputs, known, cotangents, change)

    def _bending(
        self, spec: Spec, inputs: Inputs, known: Known, along: Inputs, change: "_Change"
    ) -> Results:
        """Q, with what T changes by with what it is linear in."""
        if not jax.tree.leaves(change):
            return jax.tree.map(jnp.zeros_like, _results(known))

        def run(
            platform: str,
            spec: Spec,
            inputs: Inputs,
            known: Known,
            along: Inputs,
            change: _Change,
        ) -> Results:
            run = functools.partial(self._pass, platform, spec)
            return change.along(run, inputs, known, _filled(along, inputs))

        given = _given(change)

        def transpose(rest: Any, cotangents: Results) -> _Change:
            spec, inputs, known, along = rest
            d_results = self._tangent(spec, inputs, known, along)
            own = _Change(along, d_results, _NOTHING)
            found = self._curvature(spec, inputs, known, cotangents, own)
            d_along = self._gradients(spec, inputs, known, cotangents)
            return _Change(_wanted(found, given.inputs), _NOTHING, _wanted(d_along, given.operand))

        like = _results(known)
        rules = lowering.Linear(transpose, _third)
        return lowering.linear(run, like, rules, spec, inputs, known, along, change)


_NOTHING = Results(None, None)


class _Change(NamedTuple):
    """A change of inputs, with that of the results which goes with it, and of what a function of
    both is linear in besides. None stands for 0.

    A transpose gives the results' change no cotangent: that of the inputs has it all.
    """

    inputs: Inputs
    results: Results
    operand: Any

    def along(
        self, function: Callable[..., Any], inputs: Inputs, known: Known, operand: Any
    ) -> Any:
        """The derivative of `function(inputs, known, operand)` along the change."""

        def moved(inputs: Inputs, results: Results, operand: Any) -> Any:
            normalizer = known.normalizer._replace(log_total=results.lse)
            return function(inputs, known._replace(out=results.out, normalizer=normalizer), operand)

        at = (inputs, _results(known), operand)
        return jax.jvp(moved, at, _filled(self, at))[1]


def _is_none(x: Any) -> bool:
    return x is None


def _filled(change: Any, like: Any) -> Any:
    """A change with zeros for None."""
    one = lambda x, y: jnp.zeros_like(y) if x is None else x  # noqa: E731
    leaves = jax.tree.leaves(change, is_leaf=_is_none)
    given, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(one, leaves, given))


def _given(change: Any) -> Any:
    """Where a change is given, True: a rule that outlives a trace may not hold its arrays."""
    return jax.tree.map(lambda x: True, change)


def _wanted(found: Any, given: Any) -> Any:
    """What was found where something is given, else None."""
    where, structure = jax.tree.flatten(given, is_leaf=_is_none)
    one = lambda x, y: x if y is not None else None  # noqa: E731
    return jax.tree.unflatten(structure, map(one, jax.tree.leaves(found), where))


def _cast(gradients: Any, inputs: Inputs) -> Inputs:
    """Gradients in the dtypes of the inputs."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), Inputs(*gradients), inputs)


def _third(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "here are first and second derivatives; "
        "jattn.attention(..., implementation='reference') differentiates in every order"
    )
