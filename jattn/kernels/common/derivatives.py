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
`DerivativeFunctions`: jvp is its `tangent`, and the tangents of jvp and vjp are JAX's forward-mode
derivatives of its `tangent` and its `backward`. These two functions read the residuals, which are
the results of the forward function, so the residuals have tangents too.
"""

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

    `weights` is a list of the weights from `forward_with_weights`, or empty. `rounded` is `out` in
    the query's dtype, which the caller gets; derivatives use `out`.
    """

    out: Tree
    rounded: Array
    normalizer: Normalizer
    all_finite: Any
    weights: Tree

    def without_minus_infinity(self) -> "Residuals":
        """Returns the residuals in the form that derivatives read and programs keep: without −inf
        for a query without keys, at which `jax_debug_infs` would stop."""
        return self._replace(normalizer=self.normalizer.without_minus_infinity())


class AttentionResults(NamedTuple):
    """The tangents or cotangents of the results: out `[B, T, N, V]` and lse `[B, T, N]`."""

    out: Tree
    lse: Any


def _results(residuals: Residuals) -> AttentionResults:
    """Returns the parts of residuals that have tangents: out, and the normalizer's `log_total`,
    which stands for the sum of its two numbers."""
    return AttentionResults(residuals.out, residuals.normalizer.log_total)


def _as_normalizer(d_lse: Array) -> Normalizer:
    """Returns the tangent of a normalizer: that of `log_total` stands for that of the sum."""
    return Normalizer(None, d_lse)  # pyright: ignore[reportArgumentType]


class PerQuery(NamedTuple):
    """The arrays along the queries that a backward pass receives, each `[B, T, N, ...]`.

    With s the scores and p = exp((s − maximum) − log_total) the weights before dropout, the
    cotangent of s is p (drop(d_out vᵀ) − delta), where delta = rowsum(d_out · out) − d_lse. With
    another normalizer than the softmax, delta is 0.
    `maximum` and `log_total` are those of the `Normalizer`, with 0 in place of −inf.
    """

    query: Array
    d_out: Array
    maximum: Array
    log_total: Array
    delta: Array

    @classmethod
    def of(cls, query: Array, d_out: Array, normalizer: Normalizer, delta: Array) -> "PerQuery":
        return cls(query, d_out, *normalizer.without_minus_infinity(), delta)

    def with_normalizer(self, normalizer: Normalizer) -> "PerQuery":
        """Replaces the normalizer by another of the same rows; the tangent stays that of the old
        one."""
        maximum, log_total = normalizer.without_minus_infinity()
        tangent = self.log_total - jax.lax.stop_gradient(self.log_total)
        return self._replace(maximum=maximum, log_total=log_total + tangent)


def row_dots(x: Array, y: Array) -> Array:
    """Returns the sums of x · y along the last axis.

    Axes of size 1 are squeezed first: with them XLA's sum takes twenty times as long on CPUs.
    """
    ones = tuple(axis for axis in range(x.ndim - 1) if x.shape[axis] == 1)
    return jnp.expand_dims(jnp.sum(jnp.squeeze(x * y, ones), axis=-1), ones)


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


class _Point(NamedTuple):
    """The arguments at which derivatives are taken, with the results of the forward function."""

    spec: Spec
    inputs: AttentionInputs
    residuals: Residuals

    @property
    def letters(self) -> tuple[list[partition.Dims], list[partition.Dims], list[partition.Dims]]:
        """The letters of the leaves of inputs, residuals and results, and of their tangents."""
        row, rows = partition.BY_QUERY[:3], partition.BY_QUERY
        keys = partition.by_key(self.inputs.key)
        weights = [partition.BY_HEAD] * len(self.residuals.weights)
        return (
            [*partition.of_parameters(self.spec), rows, keys, keys],
            [rows, rows, row, row, (), *weights],
            [rows, row],
        )

    def per_query(self, cotangents: AttentionResults) -> PerQuery:
        """Returns the arrays along queries for a backward pass."""
        delta = row_dots(cotangents.out, self.residuals.out) - cotangents.lse
        if self.spec.normalizer is not None:
            delta = jnp.zeros_like(delta)
        return PerQuery(self.inputs.query, cotangents.out, *self.residuals.normalizer, delta)

    def spec_with_parameters(self) -> Spec:
        """Returns the spec with the parameters of the inputs."""
        return with_parameters(self.spec, self.inputs.params)


class DifferentiableAttention(NamedTuple):
    """Attention with its derivatives, made of three functions of a kernel and `derivatives`.

    value(spec, *qkv) -> (out, normalizer)
    forward(spec, *qkv) -> Residuals
    backward(spec, per_query, key, value, all_finite, *weights) -> gradients in the dtype of sums,
        see `AttentionVJP`.
    """

    value: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    derivatives: DerivativeFunctions

    def __call__(self, spec: Spec, inputs: AttentionInputs) -> tuple[Array, Normalizer]:
        """Computes out and the normalizer, differentiable by the inputs."""

        def value(spec: Spec, inputs: AttentionInputs) -> tuple[Array, Normalizer]:
            return self.value(with_parameters(spec, inputs.params), *inputs[1:])

        def rule(operands: tuple[Spec, Any], tangents: Tree) -> tuple[Tree, Tree]:
            residuals = self._residuals(*operands)
            out = residuals.rounded.astype(residuals.out.dtype)
            point = _Point(*operands, residuals.without_minus_infinity())
            d_out, d_lse = self._jvp(point, tangents[1])
            return (out, residuals.normalizer), (d_out, _as_normalizer(d_lse))

        return with_derivative(value, rule)(spec, inputs)

    def _residuals(self, spec: Spec, inputs: AttentionInputs) -> Residuals:
        """Computes the results of the forward function.

        Weights depend on the normalizer only through the sum of its two numbers, so that only one
        of them has a tangent.
        """

        def value(spec: Spec, inputs: AttentionInputs) -> Residuals:
            return self.forward(with_parameters(spec, inputs.params), *inputs[1:])

        def rule(operands: tuple[Spec, Any], tangents: Any) -> tuple[Residuals, Residuals]:
            residuals = self._residuals(*operands)
            point = _Point(*operands, residuals.without_minus_infinity())
            d_out, d_lse = self._jvp(point, tangents[1])
            d_rounded = d_out.astype(residuals.rounded.dtype)
            nothing = [None] * len(residuals.weights)
            return residuals, Residuals(d_out, d_rounded, _as_normalizer(d_lse), None, nothing)

        return with_derivative(value, rule)(spec, inputs)

    def _vjp(self, point: _Point, cotangents: AttentionResults) -> AttentionInputs:
        """Computes the gradients, in the dtypes of the inputs."""

        def value(point: _Point, cotangents: AttentionResults) -> AttentionInputs:
            _, (_, _, key, value), residuals = point
            operands = (
                point.per_query(cotangents),
                key,
                value,
                residuals.all_finite,
                *residuals.weights,
            )
            gradients = self.backward(point.spec_with_parameters(), *operands)
            return _cast(gradients, point.inputs)

        def rule(operands: Any, tangents: Any) -> tuple[AttentionInputs, AttentionInputs]:
            point, cotangents = operands
            d_gradients = self._jvp_of_vjp(point, cotangents, _Tangents.of(*tangents))
            return self._vjp(point, cotangents), d_gradients

        return with_derivative(value, rule)(point, cotangents)

    def _jvp(self, point: _Point, tangent: AttentionInputs) -> AttentionResults:
        """Computes the tangents of the results."""
        if not jax.tree.leaves(tangent):
            return jax.tree.map(jnp.zeros_like, _results(point.residuals))

        def run(platform: str, *operands: Any) -> AttentionResults:
            *point, tangent = operands
            return self._tangent(platform, _Point(*point), filled(tangent, point[1]))

        def transpose(rest: Any, cotangents: AttentionResults) -> AttentionInputs:
            return self._vjp(_Point(*rest), cotangents)

        def derivative(rest: Any, tangent: Any, d_rest: Any, d_tangent: Any) -> AttentionResults:
            tangents = _Tangents.of(_Point(*d_rest), d_tangent)
            return self._jvp_of_jvp(_Point(*rest), tangent, tangents)

        inputs, residuals, results = point.letters
        operands, letters = (*point, tangent), [*inputs, *residuals, *inputs]
        cut = partition.partitioned_derivative(run, operands, letters, results)
        rules = lowering.LinearRules(transpose, derivative)
        return lowering.linear(cut, _results(point.residuals), rules, *operands)

    def _tangent(self, platform: str, point: _Point, tangent: AttentionInputs) -> AttentionResults:
        """Computes `_jvp` in operations that JAX can differentiate."""
        rows = TangentInputs(point.inputs.query, tangent.query, point.residuals.out)
        keys = (point.inputs.key, tangent.key, point.inputs.value, tangent.value)
        spec = point.spec_with_parameters()
        results = self.derivatives.tangent(platform, spec, tangent.params, rows, *keys)
        return AttentionResults(*results)

    def _gradients(
        self, platform: str, point: _Point, cotangents: AttentionResults
    ) -> AttentionInputs:
        """Computes `_vjp` in operations that JAX can differentiate."""
        operands = point.per_query(cotangents), point.inputs.key, point.inputs.value
        gradients = self.derivatives.backward(platform, point.spec_with_parameters(), *operands)
        return _cast(gradients, point.inputs)

    def _jvp_of_vjp(
        self, point: _Point, cotangents: AttentionResults, tangents: "_Tangents"
    ) -> AttentionInputs:
        """Computes the tangents of `_vjp`, by its inputs and by its cotangents."""

        def transpose(point: _Point, cotangents: Any, cotangent: Any) -> tuple[Any, Any]:
            d_results = self._jvp(point, cotangent)
            tangents = _Tangents(cotangent, d_results, _NOTHING)
            return self._jvp_of_vjp(point, cotangents, tangents), d_results

        inputs, _, results = point.letters
        letters = results, inputs
        return _second_order(
            self._gradients, transpose, point, cotangents, tangents, point.inputs, letters
        )

    def _jvp_of_jvp(
        self, point: _Point, tangent: AttentionInputs, tangents: "_Tangents"
    ) -> AttentionResults:
        """Computes the tangents of `_jvp`, by its inputs and by its tangent."""

        def transpose(point: _Point, tangent: Any, cotangents: Any) -> tuple[Any, Any]:
            first_order = _Tangents(tangent, self._jvp(point, tangent), _NOTHING)
            d_inputs = self._jvp_of_vjp(point, cotangents, first_order)
            return d_inputs, self._vjp(point, cotangents)

        inputs, _, results = point.letters
        like, letters = _results(point.residuals), (inputs, results)
        return _second_order(self._tangent, transpose, point, tangent, tangents, like, letters)


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

    @classmethod
    def of(cls, d_point: _Point, d_operand: Tree) -> "_Tangents":
        return cls(d_point.inputs, _results(d_point.residuals), d_operand)


def _second_order(
    function: Callable[..., Any],
    transpose: Callable[..., tuple[Any, Any]],
    point: _Point,
    operand: Tree,
    tangents: _Tangents,
    like: Tree,
    letters: tuple[list[partition.Dims], list[partition.Dims]],
) -> Any:
    """Returns the derivative of `function(platform, point, operand)`, as one operation.

    Args:
        function: is linear in `operand`, in which None stands for 0.
        transpose: `transpose(point, operand, cotangent)` returns the cotangents of the inputs and
            of the operand.
        tangents: the direction.
        like: has the types of the results.
        letters: the letters of the leaves of the operand and of the results.
    """
    if not jax.tree.leaves(tangents):
        return jax.tree.map(jnp.zeros_like, like)

    def run(platform: str, *operands: Any) -> Any:
        *point, operand, tangents = operands
        spec, inputs, residuals = point
        like_operand = inputs if isinstance(operand, AttentionInputs) else _results(residuals)
        if not jax.tree.leaves((tangents.inputs, tangents.results)):
            return function(platform, _Point(*point), filled(tangents.operand, like_operand))

        def at_results(inputs: AttentionInputs, results: AttentionResults, operand: Any) -> Any:
            normalizer = residuals.normalizer._replace(log_total=results.lse)
            moved = residuals._replace(out=results.out, normalizer=normalizer)
            return function(platform, _Point(spec, inputs, moved), operand)

        primals = (inputs, _results(residuals), filled(operand, like_operand))
        return jax.jvp(at_results, primals, filled(tangents, primals))[1]

    def transposed(rest: Any, cotangent: Any) -> _Tangents:
        *point, operand = rest
        d_inputs, d_operand = transpose(_Point(*point), operand, cotangent)
        return _Tangents(d_inputs, _NOTHING, d_operand)

    inputs, residuals, results = point.letters
    of_operand, of_results = letters
    operands = (*point, operand, tangents)
    order = [*inputs, *residuals, *of_operand, *inputs, *results, *of_operand]
    cut = partition.partitioned_derivative(run, operands, order, of_results)
    rules = lowering.LinearRules(transposed, _refuse_third_order)
    return lowering.linear(cut, like, rules, *operands)


def filled(tangents: Any, like: Any) -> Any:
    """Returns tangents with zeros for None."""
    zero_for_none = lambda x, y: jnp.zeros_like(y) if x is None else x  # noqa: E731
    leaves = jax.tree.leaves(tangents, is_leaf=lambda x: x is None)
    leaves_like, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(zero_for_none, leaves, leaves_like))


def _cast(gradients: Tree, inputs: AttentionInputs) -> AttentionInputs:
    """Casts gradients to the dtypes of the inputs."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), AttentionInputs(*gradients), inputs)


def _refuse_third_order(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "here are first and second derivatives; "
        "jattn.attention(..., implementation='reference') differentiates in every order"
    )
