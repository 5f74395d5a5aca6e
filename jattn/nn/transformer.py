"""The Transformer (Vaswani et al. 2017): its layers, encoder, decoder, and the two together."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jattn._advice import (
    DECODER_ADVICE,
    ENCODER_ADVICE,
    MODEL_CONSTRUCTOR_ADVICE,
    TRANSFORMER_ADVICE,
)
from jattn._advised import advised_by
from jattn.cache import Cache, DenseCache
from jattn.cache.base import CacheOptions
from jattn.checks import (
    check_choice,
    check_flag,
    check_function,
    check_number,
    check_rate,
    check_size,
)
from jattn.masks import Causal, Mask, MaskLike
from jattn.nn import pretrained
from jattn.nn._types import (
    CrossOptions,
    CrossStepOptions,
    Ids,
    Positions,
    RowLengths,
    RunOptions,
    SelfOptions,
    run_options,
)
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.embedding import (
    DEFAULT_INIT,
    OutputProjection,
    SinusoidalPositions,
    TokenEmbedding,
    embedded,
    position_vectors,
)
from jattn.nn.layers import GLOROT, Dropout, FeedForward, LayerNorm, RMSNorm, promote, relu
from jattn.nn.module import ConstructorSignature, Module, check_features, check_module


MakeAttention = Callable[..., MultiHeadAttention]
Normalization = Literal["layer", "rms"] | Callable[..., LayerNorm | RMSNorm]
_ATTENTIONS = ("self_attention", "cross_attention")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The keyword arguments that layers, stacks and `Transformer` have in common.

    dropout_rate: the rate of dropout on attention weights, inside the feed-forward network, on the
        result of each sublayer and on the embedded tokens.
    norm: "post" normalises the residual sums, as in the 2017 paper; "pre" normalises the input of
        each sublayer and the result of a stack; "sandwich" normalises each sublayer's result too
        (Ding et al. 2021), as in Gemma 2.
    normalization: "layer" (Ba et al. 2016), "rms" (Zhang and Sennrich 2019), or a function that
        makes the module, such as `functools.partial(RMSNorm, zero_centered=True)`.
    final_norm: whether the result of a stack of layers is normalised; by default except with
        `norm="post"`. PyTorch's `nn.Transformer` always normalises it.
    norm_epsilon: the number that normalisation adds to the variance.
    activation: the activation function of the feed-forward network.
    gated: whether the feed-forward network is gated, see `FeedForward`.
    use_bias: whether linear layers and layer normalisation have biases. False also holds for the
        attention modules; with True, `self_attention` and `cross_attention` set their own.
    self_attention, cross_attention: functions that make the attention modules, for instance
        `functools.partial(MultiHeadAttention, rotary=True, num_kv_heads=2)`. A stack also takes a
        list with one function for each of its layers.
    kernel_init: the initializer of all matrices except for embeddings.
    dtype: the dtype of the computation, by default that of inputs and parameters, promoted.
    param_dtype: the dtype of the parameters.

    >>> options = {"norm": "pre", "normalization": "rms", "activation": nnx.silu, "gated": True}
    >>> type(nn.Encoder(1, 8, 2, 16, **options, rngs=nnx.Rngs(0)).norm).__name__
    'RMSNorm'
    """

    dropout_rate: float = 0.1
    norm: Literal["post", "pre", "sandwich"] = "post"
    normalization: Normalization = "layer"
    final_norm: bool | None = None
    norm_epsilon: float = 1e-6
    activation: Callable[[Array], Array] = relu
    gated: bool = False
    use_bias: bool = True
    self_attention: MakeAttention | Sequence[MakeAttention] = MultiHeadAttention
    cross_attention: MakeAttention | Sequence[MakeAttention] = MultiHeadAttention
    kernel_init: Initializer = GLOROT
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    def __post_init__(self):
        check_choice("norm", self.norm, ("post", "pre", "sandwich"))
        if not callable(self.normalization):
            check_choice("normalization", self.normalization, ("layer", "rms"))
        check_flag("final_norm", self.final_norm, or_none=True)
        check_number("norm_epsilon", self.norm_epsilon, positive=True)
        check_flag("gated", self.gated)
        check_flag("use_bias", self.use_bias)
        check_rate("dropout_rate", self.dropout_rate)
        for name in ("activation", "self_attention", "cross_attention", "kernel_init"):
            value = getattr(self, name)
            for function in value if name in _ATTENTIONS and _is_list(value) else (value,):
                check_function(name, function)

    @property
    def dtypes(self) -> dict[str, Any]:
        """The keyword arguments for the dtypes of a module."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def matrices(self) -> dict[str, Any]:
        """The keyword arguments of modules with matrices."""
        return {"kernel_init": self.kernel_init, **self.dtypes}

    @property
    def attention(self) -> dict[str, Any]:
        """The keyword arguments of attention modules."""
        biases = {} if self.use_bias else {"use_bias": False}
        return {"dropout_rate": self.dropout_rate, **biases, **self.matrices}

    def of_layers(self, num_layers: int) -> list[dict[str, Any]]:
        """Returns the options of each layer of a stack, as keyword arguments."""
        options = [dict(vars(self)) for _ in range(num_layers)]
        for name in _ATTENTIONS:
            functions = getattr(self, name)
            if not _is_list(functions):
                continue
            if len(functions) != num_layers:
                raise ValueError(
                    f"{name}: expected one function for each of {num_layers} layers, got "
                    f"{len(functions)}"
                )
            for layer, function in zip(options, functions, strict=True):
                layer[name] = function
        return options

    def make_norm(self, features: int, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
        """Makes a normalisation of this width."""
        options = {"epsilon": self.norm_epsilon, "rngs": rngs, **self.dtypes}
        if callable(self.normalization):
            return self.normalization(features, **options)
        if self.normalization == "rms":
            return RMSNorm(features, **options)
        return LayerNorm(features, use_bias=self.use_bias, **options)

    def make_final_norm(self, features: int, rngs: nnx.Rngs) -> LayerNorm | RMSNorm | None:
        """Makes the normalisation of a stack's result; None if it is not normalised."""
        is_normalised = self.norm != "post" if self.final_norm is None else self.final_norm
        return self.make_norm(features, rngs) if is_normalised else None

    def make_feed_forward(self, features: int, hidden: int, rngs: nnx.Rngs) -> FeedForward:
        """Makes a feed-forward network of these widths."""
        return FeedForward(
            features,
            hidden,
            activation=self.activation,
            gated=self.gated,
            use_bias=self.use_bias,
            dropout_rate=self.dropout_rate,
            rngs=rngs,
            **self.matrices,
        )


class LayerArguments(TypedDict, total=False):
    """The fields of `LayerOptions` as keyword arguments."""

    dropout_rate: float
    norm: Literal["post", "pre", "sandwich"]
    normalization: Normalization
    final_norm: bool | None
    norm_epsilon: float
    activation: Callable[[Array], Array]
    gated: bool
    use_bias: bool
    self_attention: MakeAttention | Sequence[MakeAttention]
    cross_attention: MakeAttention | Sequence[MakeAttention]
    kernel_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype


class Residual(Module):
    """The residual connection around a sublayer.

    Post-norm is `norm(x + dropout(sublayer(x)))`, pre-norm `x + dropout(sublayer(norm(x)))`, and
    sandwich norm `x + dropout(output_norm(sublayer(norm(x))))`.

    >>> residual = nn.Residual(8, nn.LayerOptions(norm="pre"), rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 8))
    >>> residual.leave(x, jnp.tanh(residual.enter(x)), deterministic=True).shape
    (2, 5, 8)
    """

    def __init__(self, features: int, options: LayerOptions, *, rngs: nnx.Rngs):
        self.order = options.norm
        self.norm = options.make_norm(features, rngs)
        is_sandwich = options.norm == "sandwich"
        self.output_norm = options.make_norm(features, rngs) if is_sandwich else None
        self.dropout = Dropout(options.dropout_rate, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        sublayer: Callable[[Array], Array],
        **run: Unpack[RunOptions],
    ) -> Float[Array, "*B T D"]:
        return self.leave(x, sublayer(self.enter(x)), **run)

    def enter(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Returns the input of the sublayer: x with post-norm, else `norm(x)`."""
        return x if self.order == "post" else self.norm(x)

    def leave(
        self, x: Float[Array, "*B T D"], y: Float[Array, "*B T D"], **run: Unpack[RunOptions]
    ) -> Float[Array, "*B T D"]:
        """Returns the sum of x and the sublayer's result y, normalised with post-norm."""
        y = y if self.output_norm is None else self.output_norm(y)
        x, y = promote((x, self.dropout(y, **run)))
        x = x + y
        return self.norm(x) if self.order == "post" else x


class _Layer(Module):
    """Attention and a feed-forward network, each with a residual connection around it."""

    __signature__: Any = ConstructorSignature(LayerOptions)

    attends_to_memory = False

    @advised_by(MODEL_CONSTRUCTOR_ADVICE, LayerOptions)
    def __init__(
        self,
        features: int,
        num_heads: int,
        feed_forward: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        settings = LayerOptions(**options)
        check_module(rngs, features=features, feed_forward=feed_forward, **settings.dtypes)
        self.features = features
        attention = {"rngs": rngs, **settings.attention}
        make: Any = settings.of_layers(1)[0]
        self.self_attention = make["self_attention"](num_heads, features, **attention)
        self.self_attention_residual = Residual(features, settings, rngs=rngs)
        if self.attends_to_memory:
            self.cross_attention = make["cross_attention"](num_heads, features, **attention)
            self.cross_attention_residual = Residual(features, settings, rngs=rngs)
        self.feed_forward = settings.make_feed_forward(features, feed_forward, rngs)
        self.feed_forward_residual = Residual(features, settings, rngs=rngs)


class EncoderLayer(_Layer):
    """Self-attention and a feed-forward network, each with a residual connection around it.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.

    >>> layer, padding = nn.EncoderLayer(8, 2, 16, rngs=nnx.Rngs(0)), masks.Lengths(kv=3)
    >>> layer(jnp.ones((2, 5, 8)), mask=padding, deterministic=True).shape
    (2, 5, 8)
    """

    @advised_by(ENCODER_ADVICE, SelfOptions)
    def __call__(
        self, x: Float[Array, "*B S D"], **call: Unpack[SelfOptions]
    ) -> Float[Array, "*B S D"]:
        check_features("x", x, "S, D", "features", self.features)
        run = run_options(call)
        x = self.self_attention_residual(x, lambda x: self.self_attention(x, **call), **run)
        return self.feed_forward_residual(x, lambda x: self.feed_forward(x, **run), **run)


class LayerCache(NamedTuple):
    """The cache of a decoder layer.

    tokens: the cache of the self-attention.
    memory: the keys and values of the memory, from `MultiHeadAttention.project_memory`.
    """

    tokens: Cache
    memory: DenseCache

    def reorder(self, indices: Int[Array, " R"], *, memory: bool = True) -> "LayerCache":
        """Returns the cache of the rows `indices`, as a beam search needs it.

        `memory=False` leaves the memory unchanged, for rows that replace rows with the same memory.
        """
        return LayerCache(
            self.tokens.reorder(indices), self.memory.reorder(indices) if memory else self.memory
        )


class DecoderLayer(_Layer):
    """Causal self-attention, attention to the memory, and a feed-forward network.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.

    >>> layer = nn.DecoderLayer(8, 2, 16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8)), deterministic=True).shape
    (2, 5, 8)
    """

    attends_to_memory = True

    @advised_by(DECODER_ADVICE, CrossOptions)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"],
        **call: Unpack[CrossOptions],
    ) -> Float[Array, "*B T D"]:
        """`mask` is combined with the causal mask of the self-attention."""
        check_features("x", x, "T, D", "features", self.features)
        check_features("memory", memory, "S, D", "features", self.features)
        run, positions = run_options(call), call.get("positions")
        self_options = {"mask": causal_and(call.get("mask")), "positions": positions, **run}
        cross_options = {"mask": call.get("cross_mask"), "positions": positions, **run}
        cross_options["kv_positions"] = call.get("memory_positions")
        attend_memory = lambda x: self.cross_attention(x, memory, **cross_options)  # noqa: E731
        attend_self = lambda x: self.self_attention(x, **self_options)  # noqa: E731
        x = self.self_attention_residual(x, attend_self, **run)
        x = self.cross_attention_residual(x, attend_memory, **run)
        return self.feed_forward_residual(x, lambda x: self.feed_forward(x, **run), **run)

    @advised_by({}, CrossStepOptions)
    def step(
        self, x: Float[Array, "B T D"], cache: LayerCache, **call: Unpack[CrossStepOptions]
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Computes the layer for T further tokens; the keys in `mask` are the cache's slots."""
        check_features("x", x, "T, D", "features", self.features)
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: expected a LayerCache, got {type(cache).__name__}")
        order = {"valid": call.get("valid"), "positions": call.get("positions")}
        run, positions = run_options(call), cache.tokens.next_positions(x.shape[1], **order)
        self_options = {"mask": causal_and(call.get("mask")), **order, **run}
        cross_options = {"mask": call.get("cross_mask"), "positions": positions, **run}
        attend_memory = lambda x: self.cross_attention.attend_memory(  # noqa: E731
            x, cache.memory, **cross_options
        )
        residual = self.self_attention_residual
        y, tokens = self.self_attention(residual.enter(x), cache=cache.tokens, **self_options)
        x = residual.leave(x, y, **run)
        x = self.cross_attention_residual(x, attend_memory, **run)
        x = self.feed_forward_residual(x, lambda x: self.feed_forward(x, **run), **run)
        return x, LayerCache(tokens, cache.memory)


def causal_and(mask: MaskLike) -> Mask:
    """Returns the causal mask, combined with `mask` unless that is None."""
    return Causal() if mask is None else Causal() & mask


class _Stack(Module):
    """Several layers in sequence, and the normalisation of the result if the options have one."""

    __signature__: Any = ConstructorSignature(LayerOptions)

    layer: Callable[..., nnx.Module]

    @advised_by(MODEL_CONSTRUCTOR_ADVICE, LayerOptions)
    def __init__(
        self,
        num_layers: int,
        features: int,
        num_heads: int,
        feed_forward: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        settings = LayerOptions(**options)
        check_size("num_layers", num_layers, 0)
        sizes = (features, num_heads, feed_forward)
        self.layers = nnx.List(
            type(self).layer(*sizes, rngs=rngs, **layer) for layer in settings.of_layers(num_layers)
        )
        self.norm = settings.make_final_norm(features, rngs)

    def _run(self, x: Array, *memory: Array, **call: Any) -> Array:
        for layer in self.layers:
            x = layer(x, *memory, **call)
        return x if self.norm is None else self.norm(x)


class Encoder(_Stack):
    """A stack of `num_layers` encoder layers: maps `[*B, S, D]` to `[*B, S, D]`.

    >>> encoder = nn.Encoder(1, 8, 2, 16, rngs=nnx.Rngs(0))
    >>> encoder(jnp.ones((2, 5, 8)), deterministic=True).shape
    (2, 5, 8)
    """

    layer = EncoderLayer

    @advised_by(ENCODER_ADVICE, SelfOptions)
    def __call__(
        self, x: Float[Array, "*B S D"], **call: Unpack[SelfOptions]
    ) -> Float[Array, "*B S D"]:
        return self._run(x, **call)


class Decoder(_Stack):
    """A stack of `num_layers` decoder layers.

    Maps `[*B, T, D]` and the memory `[*B, S, D]` to `[*B, T, D]`.

    >>> decoder = nn.Decoder(1, 8, 2, 16, rngs=nnx.Rngs(0))
    >>> decoder(jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8)), deterministic=True).shape
    (2, 5, 8)
    """

    layer = DecoderLayer

    @advised_by(DECODER_ADVICE, CrossOptions)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"],
        **call: Unpack[CrossOptions],
    ) -> Float[Array, "*B T D"]:
        """`mask` is combined with the causal mask of the self-attention."""
        return self._run(x, memory, **call)

    def start(
        self,
        memory: Float[Array, "B S D"],
        length: int,
        *,
        memory_lengths: RowLengths = None,
        memory_positions: Positions = None,
        kind: type[Cache] = DenseCache,
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> list[LayerCache]:
        """Returns a cache for each layer, for `step` over up to `length` tokens, and the projected
        memory.

        `memory_lengths [B]` is the number of positions of each row before its padding; `kind`,
        `dtype` and `options` are those of `MultiHeadAttention.empty_cache`. The projected memory
        is stored in this `dtype` too.
        """
        layers: Any = self.layers
        return [
            LayerCache(
                layer.self_attention.empty_cache(len(memory), length, kind, dtype, **options),
                layer.cross_attention.project_memory(
                    memory, memory_lengths, memory_positions, dtype
                ),
            )
            for layer in layers
        ]

    @advised_by({}, CrossStepOptions)
    def step(
        self, x: Float[Array, "B T D"], caches: list[LayerCache], **call: Unpack[CrossStepOptions]
    ) -> tuple[Float[Array, "B T D"], list[LayerCache]]:
        """Returns the result for T further tokens `x`, and the extended caches."""
        return step_layers(self.layers, self.norm, x, caches, **call)


def step_layers(layers: Any, norm: Any, x: Array, caches: Any, **call: Any) -> tuple[Array, Any]:
    """Computes a step of each layer and the final norm; returns the result and new caches."""
    extended = []
    for layer, cache in zip(layers, caches, strict=True):
        x, extended_cache = layer.step(x, cache, **call)
        extended.append(extended_cache)
    return (x if norm is None else norm(x)), extended


def _is_joint(tie_embeddings: bool | str, source_vocabulary: int, target_vocabulary: int) -> bool:
    """Returns whether source and target share one embedding. Raises ValueError."""
    check_choice("tie_embeddings", tie_embeddings, (False, True, "all"))
    if tie_embeddings != "all":
        return False
    if source_vocabulary != target_vocabulary:
        raise ValueError(
            "tie_embeddings: 'all' expects source_vocabulary == target_vocabulary, got "
            f"{source_vocabulary} and {target_vocabulary}"
        )
    return True


class TransformerOptions(RunOptions, total=False):
    """The options of a call of `Transformer`."""

    source_mask: MaskLike
    target_mask: MaskLike
    cross_mask: MaskLike
    source_positions: Positions
    target_positions: Positions


class Transformer(Module):
    """The encoder-decoder Transformer, from source and target tokens to logits.

        model = Transformer(8000, 6000, rngs=nnx.Rngs(params=0))
        padding = masks.Lengths(kv=source_lengths)
        logits = model(source, target, source_mask=padding, cross_mask=padding,
                       rngs=nnx.Rngs(dropout=1))

    The logits at position t depend on the target tokens 0..t and on the source tokens that
    `source_mask` and `cross_mask` allow. Both masks must exclude source padding: no token is taken
    for padding by itself.

    Args:
        source_vocabulary, target_vocabulary: the numbers of tokens.
        features: D, the width of the model.
        num_heads, feed_forward: the number of heads and the inner width of every layer.
        encoder_layers, decoder_layers: the numbers of layers.
        positions: the vectors that are added to the embedded tokens: "sinusoidal", "learned",
            `SinusoidalPositions` with options, or None for no vectors.
        max_length: the number of learned positions of the source, and of the target.
        tie_embeddings: with True, the target embedding is also the output projection; with "all",
            it is also the source embedding, for a joint vocabulary.
        scale_embeddings: whether embedded tokens are multiplied by √D.
        logits_bias: whether the output projection has a bias; by default only without
            `tie_embeddings`.
        embedding_init: the initializer of token embeddings `[vocabulary, D]` and learned positions
            `[max_length, D]`.
        options: those of `LayerOptions`.

    Raises ValueError for sizes that do not fit together.

    >>> sizes = {"features": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    >>> model = nn.Transformer(9, 9, feed_forward=16, **sizes, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 7), int), jnp.ones((2, 5), int), deterministic=True).shape
    (2, 5, 9)
    """

    __signature__: Any = ConstructorSignature(LayerOptions)

    @advised_by(MODEL_CONSTRUCTOR_ADVICE, LayerOptions)
    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        *,
        features: int = 512,
        num_heads: int = 8,
        feed_forward: int = 2048,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        max_length: int = 512,
        positions: Literal["sinusoidal", "learned"] | SinusoidalPositions | None = "sinusoidal",
        tie_embeddings: bool | Literal["all"] = False,
        scale_embeddings: bool = True,
        logits_bias: bool | None = None,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        settings = LayerOptions(**options)
        check_module(
            rngs,
            **settings.dtypes,
            functions={"embedding_init": embedding_init},
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            features=features,
            num_heads=num_heads,
            feed_forward=feed_forward,
            max_length=max_length,
        )
        if not isinstance(positions, SinusoidalPositions):
            check_choice("positions", positions, ("sinusoidal", "learned", None))
        check_flag("logits_bias", logits_bias, or_none=True)
        check_size("encoder_layers", encoder_layers, 0)
        check_size("decoder_layers", decoder_layers, 0)
        is_joint = _is_joint(tie_embeddings, source_vocabulary, target_vocabulary)
        tables: Any = {"embedding_init": embedding_init, "rngs": rngs, **settings.dtypes}
        embedding = {"scale_embeddings": scale_embeddings, **tables}
        self.source_tokens = (
            None if is_joint else TokenEmbedding(source_vocabulary, features, **embedding)
        )
        tied_bias = bool(tie_embeddings and logits_bias)
        self.target_tokens = TokenEmbedding(
            target_vocabulary, features, use_bias=tied_bias, **embedding
        )
        self.source_positions = position_vectors(positions, max_length, features, tables)
        self.target_positions = position_vectors(positions, max_length, features, tables)
        self.dropout = Dropout(settings.dropout_rate, rngs=rngs)
        sizes = (features, num_heads, feed_forward)
        self.encoder = Encoder(encoder_layers, *sizes, rngs=rngs, **options)
        self.decoder = Decoder(decoder_layers, *sizes, rngs=rngs, **options)
        output: Any = {"use_bias": logits_bias is not False, "rngs": rngs, **settings.matrices}
        self.output = (
            None if tie_embeddings else OutputProjection(features, target_vocabulary, **output)
        )

    @classmethod
    def from_safetensors(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: Dtype | None = None,
        dropout_rate: float = 0.0,
        ignored: Iterable[str] = (),
        mesh: Mesh | None = None,
    ) -> "Transformer":
        """Constructs a model with the weights of Marian in a folder of the Hugging Face hub.

        `config.json` has the `model_type` marian. The arguments and errors are those of
        `DecoderOnly.from_safetensors`.
        """
        options: Any = {"dtype": dtype, "dropout_rate": dropout_rate}
        return pretrained.load(cls, folder, **options, ignored=ignored, mesh=mesh)

    @advised_by(TRANSFORMER_ADVICE, TransformerOptions)
    def __call__(
        self, source_ids: Ids, target_ids: Ids, **call: Unpack[TransformerOptions]
    ) -> Float[Array, "*B T vocabulary"]:
        """Returns the logits `[*B, T, target_vocabulary]` of source ids `[*B, S]` and target ids
        `[*B, T]`.

        The other arguments are those of the method `Transformer.features`.
        """
        return self.logits(self.features(source_ids, target_ids, **call))

    @advised_by(TRANSFORMER_ADVICE, TransformerOptions)
    def features(
        self, source_ids: Ids, target_ids: Ids, **call: Unpack[TransformerOptions]
    ) -> Float[Array, "*B T D"]:
        """Returns the decoder's output `[*B, T, D]`, the input of `logits`.

        A loss can compute the logits from it in chunks, so that it never holds all of them.

        Args:
            source_mask: the mask of the encoder's self-attention.
            target_mask: combined with the causal mask of the decoder's self-attention.
            cross_mask: the mask of the decoder's attention to the source.
            source_positions, target_positions: `[*B, S]` or `[S]`, and `[*B, T]` or `[T]`, for
                rows that hold several sequences; default `arange`.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: the source of dropout keys, from its stream `dropout`.
        """
        run, positions = run_options(call), call.get("source_positions")
        memory = self.encode(source_ids, mask=call.get("source_mask"), positions=positions, **run)
        return self._decoded(
            target_ids,
            memory,
            mask=call.get("target_mask"),
            cross_mask=call.get("cross_mask"),
            positions=call.get("target_positions"),
            memory_positions=positions,
            **run,
        )

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """Maps the result of `features` to logits, by the output projection or tied embedding."""
        return self.target_tokens.attend(features) if self.output is None else self.output(features)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """The kernel and the bias (or None) of `logits`."""
        return (self.target_tokens if self.output is None else self.output).arrays

    @advised_by({}, SelfOptions)
    def encode(self, source_ids: Ids, **call: Unpack[SelfOptions]) -> Float[Array, "*B S D"]:
        """Maps source ids `[*B, S]` to `[*B, S, D]`, the memory for `decode`."""
        tokens = self.target_tokens if self.source_tokens is None else self.source_tokens
        x = embedded(source_ids, tokens, self.source_positions, call.get("positions"))
        return self.encoder(self.dropout(x, **run_options(call)), **call)

    @advised_by({}, CrossOptions)
    def decode(
        self, target_ids: Ids, memory: Float[Array, "*B S D"], **call: Unpack[CrossOptions]
    ) -> Float[Array, "*B T vocabulary"]:
        """Maps target ids `[*B, T]` and the memory `[*B, S, D]` to logits.

        Logits are `[*B, T, target_vocabulary]`. `mask` is combined with the causal mask of the
        self-attention.
        """
        return self.logits(self._decoded(target_ids, memory, **call))

    def _decoded(
        self, target_ids: Ids, memory: Array, **call: Unpack[CrossOptions]
    ) -> Float[Array, "*B T D"]:
        positions = call.get("positions")
        x = embedded(target_ids, self.target_tokens, self.target_positions, positions)
        return self.decoder(self.dropout(x, **run_options(call)), memory, **call)

    @advised_by({}, CrossStepOptions)
    def step(
        self, target_ids: Ids, caches: list[LayerCache], **call: Unpack[CrossStepOptions]
    ) -> tuple[Float[Array, "B T vocabulary"], list[LayerCache]]:
        """Maps the next T target ids `[B, T]`, for any T, to logits and the extended caches.

            caches = model.decoder.start(model.encode(source_ids), length)
            logits, caches = model.step(prompt_ids, caches)
            logits, caches = model.step(next_ids, caches)

        `valid [B, T]` is False for padding, and `positions` are for caches created with
        `positions=True`. Masks are as in `decode`; keys in `mask` are the slots of the caches.
        """
        order = call.get("valid"), call.get("positions")
        positions = caches[0].tokens.next_positions(target_ids.shape[1], *order)
        x = embedded(target_ids, self.target_tokens, self.target_positions, positions)
        x, caches = self.decoder.step(self.dropout(x, **run_options(call)), caches, **call)
        return self.logits(x), caches
