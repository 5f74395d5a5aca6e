"""Derivatives of attention, of first and second order and in every mode.

Attention is y = F(θ), of parameters, queries, keys and values θ. Derivatives up to the second order
need only five functions. Here θ̇ and a are tangents of θ, c is a cotangent of y:

    F(θ)                                      the results
    jvp(θ; a)           = F'(θ) a             their tangents, linear in a
    vjp(θ; c)           = F'(θ)ᵀ c            the gradients, linear in c
    jvp_of_jvp(θ; a, θ̇) = ∂jvp(θ; a)/∂θ θ̇     the tangent of jvp
    jvp_of_vjp(θ; c, θ̇) = ∂vjp(θ; c)/∂θ θ̇     the tangent of vjp

The transposes, which reverse mode needs, are among them:

    of jvp, in a             vjp(θ; c)
    of jvp_of_jvp, in θ̇      jvp_of_vjp(θ; c, a)
    of jvp_of_vjp, in θ̇      jvp_of_vjp itself: it is a symmetric matrix of second derivatives

F and vjp are a kernel's forward and backward function. The other three are computed blockwise, by
`DerivativeFunctions`: jvp by its `tangent`, the tangents of jvp and vjp as JAX's derivatives, in
forward mode, of its `tangent` and its `backward`. Both read the results of the forward function,
the residuals, and so the residuals have a tangent too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._types import Tree
from jattn.kernels.common import lowering, partition
from jattn.kernels.common.custom_derivative import with_derivative
from jattn.softmax import Normalizer
from jattn.spec import Spec, with_parameters


class AttentionInputs(NamedTuple):
    """The differentiable inputs of attention: parameters of the spec, query, key and value.

    The same class holds their tangents or cotangents; None stands for 0.
    """

    params: Tree
    query: Array
    key: Array
    value: Array


class Residuals(NamedTuple):
    """The results of the forward function, see `AttentionVJP`, or their tangents.

    `kept` is the list of further results of `forward_with_weights`. `rounded` is `out` in the
    query's dtype: a kernel may have stored it separately from its rounding errors.
    """

    out: Tree
    rounded: Array
    normalizer: Normalizer
    all_finite: Any
    kept: Tree

    def finite(self) -> "Residuals":
        """Returns the residuals in the form that derivatives read and programs keep: without −inf
        for a query without keys, at which `jax_debug_infs` would stop."""
        return self._replace(normalizer=self.normalizer.finite())


class AttentionResults(NamedTuple):
    """The results out `[B, T, N, V]` and lse `[B, T, N]`, or their tangents or cotangents."""

    out: Tree
    lse: Any


def _results(residuals: Residuals) -> AttentionResults:
    """Returns the parts of residuals that have tangents: out, and the normalizer's `log_total`,
    which stands for the sum of its two numbers."""
    return AttentionResults(residuals.out, residuals.normalizer.log_total)


def _normalizer_tangent(d_lse: Array) -> Any:
    """Returns the tangent of a normalizer, given the tangent of the sum of its two numbers."""
    return Normalizer(None, d_lse)  # pyright: ignore[reportArgumentType]


_At = tuple[Spec, AttentionInputs, Residuals]
_AtBoth = tuple[Spec, AttentionInputs, Residuals, AttentionResults]


class PerQuery(NamedTuple):
    """The arrays along the queries that a backward pass receives, each `[B, T, N, ...]`.

    With s the scores and p = exp((s − maximum) − log_total) the weights before dropout, the
    cotangent of s is p (drop(d_out vᵀ) − delta), where delta = rowsum(d_out · out) − d_lse.
    `maximum` and `log_total` are those of the `Normalizer`, with 0 in place of −inf.
    """

    query: Array
    d_out: Array
    maximum: Array
    log_total: Array
    delta: Array

    @classmethod
    def of(cls, query: Array, d_out: Array, normalizer: Normalizer, delta: Array) -> "PerQuery":
        return cls(query, d_out, *normalizer.finite(), delta)

    def with_normalizer(self, normalizer: Normalizer) -> "PerQuery":
        """Replaces the normalizer by another of the same rows; the tangent stays that of the old
        one."""
        maximum, log_total = normalizer.finite()
        tangent = self.log_total - jax.lax.stop_gradient(self.log_total)
        return self._replace(maximum=maximum, log_total=log_total + tangent)


def row_dots(x: Array, y: Array) -> Array:
    """Returns the sums of x · y along the last axis.

    Axes of size 1 are squeezed first: with them XLA's sum takes twenty times as long on CPUs.
    """
    ones = tuple(axis for axis in range(x.ndim - 1) if x.shape[axis] == 1)
    return jnp.expand_dims(jnp.sum(jnp.squeeze(x * y, ones), axis=-1), ones)


def _per_query(query: Array, residuals: Residuals, cotangents: AttentionResults) -> PerQuery:
    delta = row_dots(cotangents.out, residuals.out) - cotangents.lse
    return PerQuery(query, cotangents.out, *residuals.normalizer, delta)


class TangentInputs(NamedTuple):
    """The arrays along queries of `DerivativeFunctions.tangent`, each `[B, T, N, ...]`.

    They are the query, its tangent, and the output of the forward function.
    """

    query: Array
    tangent: Array
    out: Tree


class DerivativeFunctions(NamedTuple):
    """Functions made of JAX's own operations, which JAX differentiates in forward mode.

    tangent(platform, spec, d_params, inputs, key, d_key, value, d_value) -> (d_out, d_lse)
        The tangents `[B, T, N, V]` and `[B, T, N]` of the results, from those of the spec's
        `parameters`, the queries, the keys and the values. `inputs` is a `TangentInputs`.
    backward(platform, spec, per_query, key, value) -> (d_parameters, d_query, d_key, d_value)
        The backward function of an `AttentionVJP`.
    """

    tangent: Callable[..., Any]
    backward: Callable[..., Any]


class DifferentiableAttention(NamedTuple):
    """Attention with its derivatives, made of three functions of a kernel and `derivatives`.

    value(spec, *qkv) -> (out, lse)
    forward(spec, *qkv) -> Residuals
    backward(spec, per_query, key, value, all_finite, *kept) -> gradients in the dtype of sums, see
        `AttentionVJP`.
    """

    value: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    derivatives: DerivativeFunctions

    def __call__(self, spec: Spec, inputs: AttentionInputs) -> AttentionResults:
        """Computes F, differentiable by the inputs."""

        def value(spec: Spec, inputs: AttentionInputs) -> AttentionResults:
            return AttentionResults(*self.value(with_parameters(spec, inputs.params), *inputs[1:]))

        def rule(operands: Tree, tangents: Tree) -> tuple[AttentionResults, AttentionResults]:
            spec, inputs = operands
            residuals = self._residuals(spec, inputs)
            out = residuals.rounded.astype(residuals.out.dtype)
            results = AttentionResults(out, residuals.normalizer.lse)
            return results, self._jvp(spec, inputs, residuals.finite(), tangents[1])

        return with_derivative(value, rule)(spec, inputs)

    def _residuals(self, spec: Spec, inputs: AttentionInputs) -> Residuals:
        """Computes the results of the forward function.

        Weights depend on the normalizer only through the sum of its two numbers, so that only one
        of them has a tangent.
        """

        def value(spec: Spec, inputs: AttentionInputs) -> Residuals:
            return self.forward(with_parameters(spec, inputs.params), *inputs[1:])

        def rule(operands: Tree, tangents: Any) -> tuple[Residuals, Residuals]:
            spec, inputs = operands
            residuals = self._residuals(spec, inputs)
            d_out, d_lse = self._jvp(spec, inputs, residuals.finite(), tangents[1])
            d_rounded = d_out.astype(residuals.rounded.dtype)
            d_normalizer, nothing = _normalizer_tangent(d_lse), [None] * len(residuals.kept)
            return residuals, Residuals(d_out, d_rounded, d_normalizer, None, nothing)

        return with_derivative(value, rule)(spec, inputs)

    def _vjp(
        self,
        spec: Spec,
        inputs: AttentionInputs,
        residuals: Residuals,
        cotangents: AttentionResults,
    ) -> AttentionInputs:
        """Computes the gradients, in the dtypes of the inputs."""

        def value(
            spec: Spec, inputs: AttentionInputs, residuals: Residuals, cotangents: AttentionResults
        ) -> AttentionInputs:
            per_query = _per_query(inputs.query, residuals, cotangents)
            keys = (inputs.key, inputs.value)
            with_params = with_parameters(spec, inputs.params)
            gradients = self.backward(
                with_params, per_query, *keys, residuals.all_finite, *residuals.kept
            )
            return _cast(gradients, inputs)

        def rule(operands: _AtBoth, tangents: Any) -> tuple[AttentionInputs, AttentionInputs]:
            _, d_inputs, d_residuals, d_cotangents = tangents
            d_operands = _Tangents(d_inputs, _results(d_residuals), d_cotangents)
            return self._vjp(*operands), self._jvp_of_vjp(*operands, d_operands)

        return with_derivative(value, rule)(spec, inputs, residuals, cotangents)

    def _jvp(
        self, spec: Spec, inputs: AttentionInputs, residuals: Residuals, tangent: AttentionInputs
    ) -> AttentionResults:
        """Computes the tangents of the results."""
        if not jax.tree.leaves(tangent):
            return jax.tree.map(jnp.zeros_like, _results(residuals))

        def run(
            platform: str,
            spec: Spec,
            inputs: AttentionInputs,
            residuals: Residuals,
            tangent: AttentionInputs,
        ) -> AttentionResults:
            return self._compute_jvp(platform, spec, inputs, residuals, filled(tangent, inputs))

        nonzero = where_given(tangent)

        def transpose(rest: _At, cotangents: AttentionResults) -> AttentionInputs:
            return wanted(self._vjp(*rest, cotangents), nonzero)

        def derivative(
            rest: _At, tangent: AttentionInputs, d_rest: Any, d_tangent: AttentionInputs
        ) -> AttentionResults:
            _, d_inputs, d_residuals = d_rest
            return self._jvp_of_jvp(
                *rest, tangent, _Tangents(d_inputs, _results(d_residuals), d_tangent)
            )

        like = _results(residuals)
        rules = lowering.LinearRules(transpose, derivative)
        operands, dims = (spec, inputs, residuals, tangent), _Dims.of(spec, inputs, residuals)
        order = [*dims.inputs, *dims.residuals, *dims.inputs]
        cut = partition.partitioned_derivative(run, operands, order, dims.results)
        return lowering.linear(cut, like, rules, *operands)

    def _compute_jvp(
        self,
        platform: str,
        spec: Spec,
        inputs: AttentionInputs,
        residuals: Residuals,
        tangent: AttentionInputs,
    ) -> AttentionResults:
        """Computes `_jvp` in operations that JAX can differentiate."""
        rows = TangentInputs(inputs.query, tangent.query, residuals.out)
        keys = (inputs.key, tangent.key, inputs.value, tangent.value)
        with_params = with_parameters(spec, inputs.params)
        return AttentionResults(
            *self.derivatives.tangent(platform, with_params, tangent.params, rows, *keys)
        )

    def _jvp_of_vjp(
        self,
        spec: Spec,
        inputs: AttentionInputs,
        residuals: Residuals,
        cotangents: AttentionResults,
        tangents: "_Tangents",
    ) -> AttentionInputs:
        """Computes the tangents of `_vjp`, by its inputs and by its cotangents."""
        if not jax.tree.leaves(tangents):
            return jax.tree.map(jnp.zeros_like, inputs)

        def gradients(
            platform: str,
            spec: Spec,
            inputs: AttentionInputs,
            residuals: Residuals,
            cotangents: AttentionResults,
        ) -> AttentionInputs:
            per_query = _per_query(inputs.query, residuals, cotangents)
            with_params = with_parameters(spec, inputs.params)
            keys = (inputs.key, inputs.value)
            d_inputs = self.derivatives.backward(platform, with_params, per_query, *keys)
            return _cast(d_inputs, inputs)

        def run(
            platform: str,
            spec: Spec,
            inputs: AttentionInputs,
            residuals: Residuals,
            cotangents: AttentionResults,
            tangents: _Tangents,
        ) -> AttentionInputs:
            run = functools.partial(gradients, platform, spec)
            if not jax.tree.leaves((tangents.inputs, tangents.results)):
                return run(inputs, residuals, filled(tangents.operand, cotangents))
            return tangents.derivative_of(run, inputs, residuals, cotangents)

        nonzero = where_given(tangents)

        def transpose(rest: _AtBoth, cotangent: AttentionInputs) -> _Tangents:
            d_results = self._jvp(*rest[:3], cotangent)
            d_inputs = self._jvp_of_vjp(*rest, _Tangents(cotangent, d_results, _NOTHING))
            return _Tangents(
                wanted(d_inputs, nonzero.inputs), _NOTHING, wanted(d_results, nonzero.operand)
            )

        rules = lowering.LinearRules(transpose, _refuse_third_order)
        operands = (spec, inputs, residuals, cotangents, tangents)
        dims = _Dims.of(spec, inputs, residuals)
        order = [*dims.inputs, *dims.residuals, *dims.results]
        order += [*dims.inputs, *dims.results, *dims.results]
        cut = partition.partitioned_derivative(run, operands, order, dims.inputs)
        return lowering.linear(cut, inputs, rules, *operands)

    def _jvp_of_jvp(
        self,
        spec: Spec,
        inputs: AttentionInputs,
        residuals: Residuals,
        tangent: AttentionInputs,
        tangents: "_Tangents",
    ) -> AttentionResults:
        """Computes the tangents of `_jvp`, by its inputs and by its tangent."""
        if not jax.tree.leaves(tangents):
            return jax.tree.map(jnp.zeros_like, _results(residuals))

        def run(
            platform: str,
            spec: Spec,
            inputs: AttentionInputs,
            residuals: Residuals,
            tangent: AttentionInputs,
            tangents: _Tangents,
        ) -> AttentionResults:
            run = functools.partial(self._compute_jvp, platform, spec)
            return tangents.derivative_of(run, inputs, residuals, filled(tangent, inputs))

        nonzero = where_given(tangents)

        def transpose(rest: Any, cotangents: AttentionResults) -> _Tangents:
            spec, inputs, residuals, tangent = rest
            d_results = self._jvp(spec, inputs, residuals, tangent)
            first_order = _Tangents(tangent, d_results, _NOTHING)
            d_inputs = self._jvp_of_vjp(spec, inputs, residuals, cotangents, first_order)
            d_tangent = self._vjp(spec, inputs, residuals, cotangents)
            return _Tangents(
                wanted(d_inputs, nonzero.inputs), _NOTHING, wanted(d_tangent, nonzero.operand)
            )

        like = _results(residuals)
        rules = lowering.LinearRules(transpose, _refuse_third_order)
        operands = (spec, inputs, residuals, tangent, tangents)
        dims = _Dims.of(spec, inputs, residuals)
        order = [*dims.inputs, *dims.residuals, *dims.inputs]
        order += [*dims.inputs, *dims.results, *dims.inputs]
        cut = partition.partitioned_derivative(run, operands, order, dims.results)
        return lowering.linear(cut, like, rules, *operands)


class _Dims(NamedTuple):
    """The letters of the leaves of inputs, residuals and results, and of their tangents."""

    inputs: list[partition.Dims]
    residuals: list[partition.Dims]
    results: list[partition.Dims]

    @classmethod
    def of(cls, spec: Spec, inputs: AttentionInputs, residuals: Residuals) -> "_Dims":
        row, rows, keys = partition.BY_QUERY[:3], partition.BY_QUERY, partition.by_key(inputs.key)
        kept = [partition.BY_HEAD] * len(residuals.kept)
        return cls(
            [*partition.of_parameters(spec), rows, keys, keys],
            [rows, rows, row, row, (), *kept],
            [rows, row],
        )


_NOTHING = AttentionResults(None, None)


class _Tangents(NamedTuple):
    """The tangents in which `_jvp_of_vjp` and `_jvp_of_jvp` are linear. None stands for 0.

    inputs: the tangents of the inputs.
    results: the tangents of the results, which follow from those of the inputs. A transpose gives
        them no cotangent, because the cotangent of the inputs includes it.
    operand: the tangents of the operand in which the differentiated function is itself linear.
    """

    inputs: AttentionInputs
    results: AttentionResults
    operand: Tree

    def derivative_of(
        self,
        function: Callable[..., Any],
        inputs: AttentionInputs,
        residuals: Residuals,
        operand: Any,
    ) -> Any:
        """Returns the derivative of `function(inputs, residuals, operand)` along these tangents."""

        def at_results(inputs: AttentionInputs, results: AttentionResults, operand: Any) -> Any:
            normalizer = residuals.normalizer._replace(log_total=results.lse)
            return function(
                inputs, residuals._replace(out=results.out, normalizer=normalizer), operand
            )

        primals = (inputs, _results(residuals), operand)
        return jax.jvp(at_results, primals, filled(self, primals))[1]


def _is_none(x: Any) -> bool:
    return x is None


def filled(tangents: Any, like: Any) -> Any:
    """Returns tangents with zeros for None."""
    zero_for_none = lambda x, y: jnp.zeros_like(y) if x is None else x  # noqa: E731
    leaves = jax.tree.leaves(tangents, is_leaf=_is_none)
    leaves_like, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(zero_for_none, leaves, leaves_like))


def where_given(tangents: Tree) -> Tree:
    """Returns True for each given tangent; a rule that outlives a trace may not hold arrays."""
    return jax.tree.map(lambda x: True, tangents)


def wanted(values: Tree, like: Tree) -> Tree:
    """Returns the values for which `like` has a leaf, and None for the others."""
    wanted_leaves, structure = jax.tree.flatten(like, is_leaf=_is_none)
    pick = lambda x, y: x if y is not None else None  # noqa: E731
    return jax.tree.unflatten(structure, map(pick, jax.tree.leaves(values), wanted_leaves))


def _cast(gradients: Tree, inputs: AttentionInputs) -> AttentionInputs:
    """Casts gradients to the dtypes of the inputs."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), AttentionInputs(*gradients), inputs)


def _refuse_third_order(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "here are first and second derivatives; "
        "jattn.attention(..., implementation='reference') differentiates in every order"
    )
