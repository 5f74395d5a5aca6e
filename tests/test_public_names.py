"""The public surface: which names there are, their documentation, and their signatures.

pyright reads this file too. `assert_type` says what it must find there, and a comment that ignores
an error is itself an error where pyright finds none.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal, ParamSpecKwargs, Unpack, assert_type, get_origin

import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array

import jattn
from jattn import (
    cache,
    compat,
    generation,
    linear,
    masks,
    mechanisms,
    nn,
    normalizers,
    parallel,
    positions,
    scores,
    viz,
)
from jattn.explanation import Explanation
from jattn.nn.recurrent import RecurrentArguments
from jattn.nn.transformer import LayerArguments


MODULES = [jattn, cache, compat, generation, linear, masks, mechanisms, nn, normalizers, parallel]
MODULES += [positions, scores, viz]
NAMES = [(module, name) for module in MODULES for name in module.__all__]
B, T, N, H, D = 2, 5, 3, 4, 12


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_shows_its_public_names_and_leaves_none_out(module):
    """Names that a module defines are public, begin with an underscore, or are listed here."""
    internal = {
        masks: {"as_span", "extents", "kinds", "shifted", "span"},
        scores: {"as_score", "distance", "in_order"},
        normalizers: {"as_normalizer"},
        cache: {"check_cache", "picked_rows"},
    }
    public = set(module.__all__)
    assert dir(module) == sorted(public) and len(public) == len(module.__all__)
    assert not any(name.startswith("_") for name in public)
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if isinstance(value, type) or inspect.isfunction(value)
    }
    assert defined - public <= internal.get(module, set())


def test_every_public_name_exists_and_is_documented():
    for module, name in NAMES:
        value = getattr(module, name)
        if isinstance(value, ModuleType | Callable):
            bases = inspect.getmro(value)[1:] if inspect.isclass(value) else ()
            doc = value.__doc__
            assert doc and doc not in {base.__doc__ for base in bases}, name
            assert not doc.startswith(f"{name}("), name  # what dataclasses write by themselves


def test_a_name_that_is_not_there_raises():
    with pytest.raises(AttributeError, match="'jattn' has no attribute 'typo'"):
        _ = jattn.typo  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"'jattn\.nn' has no attribute 'typo'"):
        _ = nn.typo  # pyright: ignore[reportAttributeAccessIssue]


def callables() -> Iterator[tuple[str, Any]]:
    """All public functions, classes, and methods that jattn defines."""
    for module, name in NAMES:
        value = getattr(module, name)
        if value in (nn.AttentionWeights, generation.LanguageModel) or not callable(value):
            continue  # a type of Flax's variables, which users only name, and a protocol
        yield f"{module.__name__}.{name}", value
        for member in dir(value) if inspect.isclass(value) else ():
            method = inspect.getattr_static(value, member)
            if isinstance(method, classmethod | staticmethod):
                method = method.__func__
            is_ours = inspect.isfunction(method) and method.__module__.startswith("jattn")
            if is_ours and (member == "__call__" or not member.startswith("_")):
                yield f"{module.__name__}.{name}.{member}", method


def test_signatures_say_what_is_taken_and_what_layers_return():
    for name, function in callables():
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                is_any = parameter.annotation in (parameter.empty, Any)
                assert parameter.name == "operands" or not is_any, name
            if parameter.kind is parameter.VAR_KEYWORD:
                listed = get_origin(parameter.annotation) is Unpack
                assert listed or isinstance(parameter.annotation, ParamSpecKwargs), name
        if name.startswith("jattn.nn.") and name.endswith(".__call__"):
            assert signature.return_annotation not in (signature.empty, Any), name


def test_signatures_of_classes_are_those_of_their_constructors():
    class Wider(nn.EncoderLayer):
        def __init__(self, features: int, *, rngs: nnx.Rngs):
            super().__init__(features, 1, 4 * features, rngs=rngs)

    class Pre(nn.EncoderLayer):
        def __init__(self, features: int, norm: Literal["pre"] = "pre", **options: Any):
            super().__init__(features, 1, features, norm=norm, **options)

    layer = nnx.eval_shape(lambda: nn.FeedForward(D, 7, rngs=nnx.Rngs(0)))
    for shown, names in (
        (nn.FeedForward, ["features", "hidden", "activation"]),
        (nn.WeightsTap, []),
        (layer, ["x", "deterministic", "rngs"]),
        (Wider, ["features", "rngs"]),
        (Pre, ["features", "norm", "dropout_rate"]),
    ):
        assert [*inspect.signature(shown).parameters][:3] == names
    assert inspect.signature(nn.FeedForward).parameters["dropout_rate"].default == 0.0


def test_options_are_shown_one_by_one():
    layers = (nn.EncoderLayer, nn.DecoderLayer, nn.Encoder, nn.Decoder, nn.Transformer)
    recurrent = (nn.GRU, nn.RecurrentEncoder, nn.RecurrentDecoder, nn.Maxout, nn.RNNsearch)
    for options, arguments, *users in (
        (nn.LayerOptions, LayerArguments, *layers),
        (nn.DecoderOnlyOptions, LayerArguments, nn.DecoderOnly),
        (nn.RecurrentOptions, RecurrentArguments, *recurrent),
    ):
        wanted = inspect.signature(options).parameters
        assert {name: x.annotation for name, x in wanted.items()} == arguments.__annotations__
        for user in users:
            shown = inspect.signature(user).parameters
            assert {name: shown[name] for name in wanted} == dict(wanted)


def functions():
    q = k = v = jnp.ones((B, T, N, H))
    assert_type(jattn.attention(q, k, v, mask=masks.Causal()), Array)
    assert_type(jattn.attention(q, k, v, return_lse=True), tuple[Array, Array])
    assert_type(jattn.attention_weights(q, k, score=scores.SoftCap(2.0)), Array)
    assert_type(jattn.explain(q, k, v, mask=masks.Causal()), Explanation)
    assert_type(masks.Causal() & masks.Window(left=2), masks.Mask)
    assert_type(jattn.chosen_blocks(q, k, 2, 2), masks.Blocks)
    assert_type(positions.rotary(q, jnp.arange(T)), Array)
    dense = cache.DenseCache.create(B, T, N, H)
    out, new_cache = jattn.cached_attention(q, k, v, dense, mask=masks.Causal())
    assert_type(out, Array)
    assert_type(new_cache, cache.DenseCache)
    both, _ = jattn.cached_attention(q, k, v, dense, return_lse=True)
    assert_type(both, tuple[Array, Array])


def layers():
    rngs, x = nnx.Rngs(0), jnp.ones((B, T, D))
    layer = nn.MultiHeadAttention(N, D, score=scores.SoftCap(2.0), rngs=rngs)
    assert_type(layer(x), Array)
    empty = layer.empty_cache(B, T)
    assert_type(empty, cache.DenseCache)
    out, new_cache = layer(x, cache=empty, mask=masks.Causal())
    assert_type(out, Array)
    assert_type(new_cache, cache.DenseCache)
    assert_type(layer.empty_cache(B, T, cache.RollingCache, chunk=2), cache.RollingCache)
    assert_type(layer.attend_memory(x, layer.project_memory(x)), Array)
    assert_type(nn.SingleHeads(layer)(x), Array)
    assert_type(nn.WeightsTap()(x), Array)
    assert_type(nn.capture_weights(layer, x), dict[str, Array])
    with nn.capture_weights(layer) as weights:
        assert_type(weights, dict[str, Array])
    assert_type(nn.Encoder(1, D, N, 7, norm="pre", dropout_rate=0.0, rngs=rngs)(x), Array)
    decoder = nn.Decoder(1, D, N, 7, dropout_rate=0.0, rngs=rngs)
    assert_type(decoder(x, x, cross_mask=masks.Window(left=2)), Array)
    assert_type(decoder.start(x, T), list[nn.LayerCache])


def models():
    rngs, ids = nnx.Rngs(0), jnp.ones((B, T), jnp.int32)
    transformer = nn.Transformer(9, 8, features=D, num_heads=N, encoder_layers=1, rngs=rngs)
    assert_type(transformer(ids, ids, source_mask=masks.Causal(), deterministic=True), Array)
    language = nn.DecoderOnly(9, features=D, num_heads=N, num_layers=1, rngs=rngs)
    assert_type(language(ids, mask=masks.Window(left=2), deterministic=True), Array)
    logits, caches = language.step(ids, language.start(B, T), deterministic=True)
    assert_type(logits, Array)
    assert_type(caches, list[cache.Cache])
    rnnsearch = nn.RNNsearch(9, 8, features=5, hidden=6, rngs=rngs)
    assert_type(rnnsearch(ids, ids, source_lengths=jnp.array([3, 5])), Array)


@pytest.mark.parametrize("sample", [functions, layers, models], ids=lambda sample: sample.__name__)
def test_what_has_types_also_runs(sample):
    with warnings.catch_warnings(action="error"):
        nnx.eval_shape(sample)


def test_arguments_that_are_not_there_are_refused():
    def wrong():
        rngs, x, q = nnx.Rngs(0), jnp.ones((B, T, D)), jnp.ones((B, T, N, H))
        layer = nn.MultiHeadAttention(N, D, rngs=rngs)
        decoder = nn.Decoder(1, D, N, 7, rngs=rngs)
        dense = cache.DenseCache.create(B, T, N, H)
        yield lambda: jattn.cached_attention(q, q, q, dense, typo=0)  # pyright: ignore[reportCallIssue]
        yield lambda: jattn.explain(q, q, q, typo=0)  # pyright: ignore[reportCallIssue]
        yield lambda: jattn.multiplicative_attention(x, x, x, x, typo=0)  # pyright: ignore[reportCallIssue]
        yield lambda: nn.LayerNorm(D, typo=0, rngs=rngs)  # pyright: ignore[reportCallIssue]
        yield lambda: nn.Encoder(1, D, N, 7, typo=0, rngs=rngs)  # pyright: ignore[reportCallIssue]
        yield lambda: nn.GRU(D, D, typo=0, rngs=rngs)  # pyright: ignore[reportCallIssue]
        yield lambda: decoder(x, x, typo=0)  # pyright: ignore[reportCallIssue]
        yield lambda: nn.SingleHeads(layer)(x, typo=0)  # pyright: ignore[reportCallIssue]
        yield lambda: nn.capture_weights(layer, x, typo=0)  # pyright: ignore[reportCallIssue]

    def refused():
        for call in wrong():
            with pytest.raises(TypeError, match="typo"):
                call()

    nnx.eval_shape(refused)
