"""The Transformer (Vaswani et al. 2017): its layers, encoder, decoder, and the two together."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int

from jattn._advice import (
    DECODER_ADVICE,
    ENCODER_ADVICE,
    MODEL_CONSTRUCTOR_ADVICE,
    TRANSFORMER_ADVICE,
)
from jattn._advised import advised_by
from jattn.cache import Cache, DenseCache
from jattn.checks import (
    check_choice,
    check_flag,
    check_function,
    check_number,
    check_rate,
    check_size,
)
from jattn.masks import Causal, Mask, MaskLike
from jattn.nn._types import (
    CacheOptions,
    Ids,
    Positions,
    RandomSource,
    RowLengths,
    Valid,
)
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.checks import check_features, check_module
from jattn.nn.embedding import (
    DEFAULT_INIT,
    OutputProjection,
    TokenEmbedding,
    embedded,
    position_vectors,
)
from jattn.nn.layers import GLOROT, Dropout, FeedForward, LayerNorm, RMSNorm, promote
from jattn.nn.module import ConstructorSignature, Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The keyword arguments that layers, stacks and `Transformer` have in common.

    dropout_rate: on attention weights, inside the feed-forward network, on what each sublayer
        adds and on the embedded tokens.
    norm: "post" normalises after adding, as the 2017 paper does; "pre" normalises what a sublayer
        reads, and at last what a stack returns.
    normalization: "layer" (Ba et al. 2016) or "rms" (Zhang and Sennrich 2019).
    final_norm: whether a stack normalises what it returns; None: pre-norm does. PyTorch's
        `nn.Transformer` always does.
    norm_epsilon: what normalisations add to the variance.
    activation: of the feed-forward network.
    gated: whether the feed-forward network is, see `FeedForward`.
    use_bias: whether matrices and layer normalisation have biases; True leaves it to
        `self_attention` and `cross_attention` what they do.
    self_attention, cross_attention: what makes the attention modules, for instance
        `functools.partial(MultiHeadAttention, rotary=True, num_kv_heads=2)`.
    kernel_init: of all matrices but the embeddings.
    dtype: of the computation; default: of inputs and parameters together.
    param_dtype: of the parameters.
    """

    dropout_rate: float = 0.1
    norm: Literal["post", "pre"] = "post"
    normalization: Literal["layer", "rms"] = "layer"
    final_norm: bool | None = None
    norm_epsilon: float = 1e-6
    activation: Callable[[Array], Array] = nnx.relu
    gated: bool = False
    use_bias: bool = True
    self_attention: Callable[..., MultiHeadAttention] = MultiHeadAttention
    cross_attention: Callable[..., MultiHeadAttention] = MultiHeadAttention
    kernel_init: Initializer = GLOROT
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    def __post_init__(self):
        check_choice("norm", self.norm, ("post", "pre"))
        check_choice("normalization", self.normalization, ("layer", "rms"))
        if self.final_norm is not None:
            check_flag("final_norm", self.final_norm)
        check_number("norm_epsilon", self.norm_epsilon, positive=True)
        check_flag("gated", self.gated)
        check_flag("use_bias", self.use_bias)
        check_rate("dropout_rate", self.dropout_rate)
        for name in ("activation", "self_attention", "cross_attention", "kernel_init"):
            check_function(name, getattr(self, name))

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def matrices(self) -> dict[str, Any]:
        return {"kernel_init": self.kernel_init, **self.dtypes}

    @property
    def attention(self) -> dict[str, Any]:
        """What attention modules are made with."""
        biases = {} if self.use_bias else {"use_bias": False}
        return {"dropout_rate": self.dropout_rate, **biases, **self.matrices}

    def make_norm(self, features: int, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
        """A normalisation of this width."""
        options = {"epsilon": self.norm_epsilon, "rngs": rngs, **self.dtypes}
        if self.normalization == "rms":
            return RMSNorm(features, **options)
        return LayerNorm(features, use_bias=self.use_bias, **options)

    def make_final_norm(self, features: int, rngs: nnx.Rngs) -> LayerNorm | RMSNorm | None:
        """What normalises the result of all layers, if anything does."""
        given = self.norm == "pre" if self.final_norm is None else self.final_norm
        return self.make_norm(features, rngs) if given else None

    def make_feed_forward(self, features: int, hidden: int, rngs: nnx.Rngs) -> FeedForward:
        """A feed-forward network of these widths."""
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
    norm: Literal["post", "pre"]
    normalization: Literal["layer", "rms"]
    final_norm: bool | None
    norm_epsilon: float
    activation: Callable[[Array], Array]
    gated: bool
    use_bias: bool
    self_attention: Callable[..., MultiHeadAttention]
    cross_attention: Callable[..., MultiHeadAttention]
    kernel_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype


class Residual(Module):
    """The way around a sublayer: `leave(x, sublayer(enter(x)))`.

    Post-norm is `norm(x + dropout(sublayer(x)))`, pre-norm `x + dropout(sublayer(norm(x)))`.
    """

    def __init__(self, features: int, options: LayerOptions, *, rngs: nnx.Rngs):
        self.order = options.norm
        self.norm = options.make_norm(features, rngs)
        self.dropout = Dropout(options.dropout_rate, rngs=rngs)

    def enter(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        return self.norm(x) if self.order == "pre" else x

    def leave(
        self,
        x: Float[Array, "*B T D"],
        y: Float[Array, "*B T D"],
        *,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        x, y = promote((x, self.dropout(y, deterministic=deterministic, rngs=rngs)))
        x = x + y
        return self.norm(x) if self.order == "post" else x


class EncoderLayer(Module):
    """Self-attention and a feed-forward network, each with a way around it.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.
    """

    __signature__: Any = ConstructorSignature(LayerOptions)

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
        given = LayerOptions(**options)
        check_module(rngs, features=features, feed_forward=feed_forward, **given.dtypes)
        self.features = features
        attention = {"rngs": rngs, **given.attention}
        self.self_attention = given.self_attention(num_heads, features, **attention)
        self.self_attention_residual = Residual(features, given, rngs=rngs)
        self.feed_forward = given.make_feed_forward(features, feed_forward, rngs)
        self.feed_forward_residual = Residual(features, given, rngs=rngs)

    @advised_by(ENCODER_ADVICE)
    def __call__(
        self,
        x: Float[Array, "*B S D"],
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B S D"]:
        check_features("x", x, "S, D", "features", self.features)
        run = {"deterministic": deterministic, "rngs": rngs}

        def attend(x: Array) -> Array:
            return self.self_attention(x, mask=mask, positions=positions, **run)

        return self._sublayers(x, attend, **run)

    def _sublayers(self, x: Array, attend: Callable[[Array], Array], **run: Any) -> Array:
        """The two sublayers with their ways around."""
        around = self.self_attention_residual
        x = around.leave(x, attend(around.enter(x)), **run)
        around = self.feed_forward_residual
        return around.leave(x, self.feed_forward(around.enter(x), **run), **run)


class LayerCache(NamedTuple):
    """What a decoder layer has seen: its own tokens, and the memory as it reads it."""

    tokens: Cache
    memory: DenseCache

    def reorder(self, indices: Int[Array, " R"], *, memory: bool = True) -> "LayerCache":
        """Rows picked by index; `memory=False` keeps the memory, where rows that are picked have
        the same as those that they replace."""
        kept = self.memory.reorder(indices) if memory else self.memory
        return LayerCache(self.tokens.reorder(indices), kept)


class DecoderLayer(Module):
    """Causal self-attention, attention to the memory, and a feed-forward network.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.
    """

    __signature__: Any = ConstructorSignature(LayerOptions)

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
        given = LayerOptions(**options)
        check_module(rngs, features=features, feed_forward=feed_forward, **given.dtypes)
        self.features = features
        attention = {"rngs": rngs, **given.attention}
        self.self_attention = given.self_attention(num_heads, features, **attention)
        self.self_attention_residual = Residual(features, given, rngs=rngs)
        self.cross_attention = given.cross_attention(num_heads, features, **attention)
        self.cross_attention_residual = Residual(features, given, rngs=rngs)
        self.feed_forward = given.make_feed_forward(features, feed_forward, rngs)
        self.feed_forward_residual = Residual(features, given, rngs=rngs)

    @advised_by(DECODER_ADVICE)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"],
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        positions: Positions = None,
        memory_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """`mask` is for the self-attention, which is causal in any case."""
        check_features("x", x, "T, D", "features", self.features)
        check_features("memory", memory, "S, D", "features", self.features)
        run = {"deterministic": deterministic, "rngs": rngs}
        where = {"positions": positions, "kv_positions": memory_positions}

        def attend_tokens(x: Array) -> Array:
            return self.self_attention(x, mask=causal_and(mask), positions=positions, **run)

        def attend_memory(x: Array) -> Array:
            return self.cross_attention(x, memory, mask=cross_mask, **where, **run)

        return self._sublayers(x, attend_tokens, attend_memory, **run)

    def step(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """As the call, for T further tokens; masks see the cache's slots."""
        check_features("x", x, "T, D", "features", self.features)
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: expected a LayerCache, got {type(cache).__name__}")
        run = {"deterministic": deterministic, "rngs": rngs}
        positions = cache.tokens.next_positions(x.shape[1], valid)
        tokens = cache.tokens

        def attend_tokens(x: Array) -> Array:
            nonlocal tokens
            options = {"mask": causal_and(mask), "valid": valid, **run}
            y, tokens = self.self_attention(x, cache=tokens, **options)
            return y

        def attend_memory(x: Array) -> Array:
            options = {"mask": cross_mask, "positions": positions, **run}
            return self.cross_attention.attend_memory(x, cache.memory, **options)

        x = self._sublayers(x, attend_tokens, attend_memory, **run)
        return x, LayerCache(tokens, cache.memory)

    def _sublayers(
        self,
        x: Array,
        attend_tokens: Callable[[Array], Array],
        attend_memory: Callable[[Array], Array],
        **run: Any,
    ) -> Array:
        """The three sublayers with their ways around."""
        around = self.self_attention_residual
        x = around.leave(x, attend_tokens(around.enter(x)), **run)
        around = self.cross_attention_residual
        x = around.leave(x, attend_memory(around.enter(x)), **run)
        around = self.feed_forward_residual
        return around.leave(x, self.feed_forward(around.enter(x), **run), **run)


def causal_and(mask: MaskLike) -> Mask:
    """What a mask leaves of the positions up to the query's own."""
    return Causal() if mask is None else Causal() & mask


class _Stack(Module):
    """Layers one after another; a last normalisation as `final_norm` says."""

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
        given = LayerOptions(**options)
        check_size("num_layers", num_layers, 0)
        sizes = (features, num_heads, feed_forward)
        self.layers = nnx.List(
            type(self).layer(*sizes, rngs=rngs, **options) for _ in range(num_layers)
        )
        self.norm = given.make_final_norm(features, rngs)

    def _run(self, x: Array, *memory: Array, **call: Any) -> Array:
        for layer in self.layers:
            x = layer(x, *memory, **call)
        return x if self.norm is None else self.norm(x)


class Encoder(_Stack):
    """`num_layers` of `EncoderLayer`, called like one: `[*B, S, D]` to `[*B, S, D]`."""

    layer = EncoderLayer

    @advised_by(ENCODER_ADVICE)
    def __call__(
        self,
        x: Float[Array, "*B S D"],
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B S D"]:
        run = {"deterministic": deterministic, "rngs": rngs}
        return self._run(x, mask=mask, positions=positions, **run)


class Decoder(_Stack):
    """`num_layers` of `DecoderLayer`, called like one.

    `[*B, T, D]` and the memory `[*B, S, D]` to `[*B, T, D]`.
    """

    layer = DecoderLayer

    @advised_by(DECODER_ADVICE)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"],
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        positions: Positions = None,
        memory_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """`mask` is for the self-attention, which is causal in any case."""
        masks = {"mask": mask, "cross_mask": cross_mask}
        where = {"positions": positions, "memory_positions": memory_positions}
        run = {"deterministic": deterministic, "rngs": rngs}
        return self._run(x, memory, **masks, **where, **run)

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
        """Caches for `step` over up to `length` tokens, with the memory projected once.

        `memory_lengths [B]` says how much of the memory is real; `kind`, `dtype` and `options` are
        those of `MultiHeadAttention.empty_cache`.
        """
        layers: Any = self.layers
        return [
            LayerCache(
                layer.self_attention.empty_cache(len(memory), length, kind, dtype, **options),
                layer.cross_attention.project_memory(memory, memory_lengths, memory_positions),
            )
            for layer in layers
        ]

    def step(
        self,
        x: Float[Array, "B T D"],
        caches: list[LayerCache],
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache]]:
        """As the call, for T further tokens, with the caches grown by them."""
        options = {"mask": mask, "cross_mask": cross_mask, "valid": valid}
        run = {"deterministic": deterministic, "rngs": rngs}
        layers: Any = self.layers
        grown = []
        for layer, cache in zip(layers, caches, strict=True):
            x, one = layer.step(x, cache, **options, **run)
            grown.append(one)
        return (x if self.norm is None else self.norm(x)), grown


class Transformer(Module):
    """The encoder-decoder Transformer, from source and target tokens to logits.

        model = Transformer(8000, 6000, rngs=nnx.Rngs(params=0))
        padding = masks.Lengths(kv=source_lengths)
        logits = model(source, target, source_mask=padding, cross_mask=padding,
                       rngs=nnx.Rngs(dropout=1))

    Position t of the logits has seen target tokens 0..t, and all of the source that `cross_mask`
    and `source_mask` leave. No mask is guessed: source padding is to be kept out of both.

    Args:
        source_vocabulary, target_vocabulary: numbers of tokens.
        features: D, the width of the model.
        num_heads, feed_forward: of every layer.
        encoder_layers, decoder_layers: how many.
        positions: "sinusoidal" or "learned" vectors added to the embedded tokens, or None.
        max_length: of learned positions, on each side.
        tie_embeddings: True makes the target embedding the output projection too (which then has
            no bias); "all" makes it the source embedding as well, for a joint vocabulary.
        embedding_init: of token embeddings and learned positions, `[rows, D]`.
        options: those of `LayerOptions`.

    Raises ValueError for sizes that do not go together.
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
        positions: Literal["sinusoidal", "learned"] | None = "sinusoidal",
        tie_embeddings: bool | Literal["all"] = False,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        given = LayerOptions(**options)
        check_module(
            rngs,
            **given.dtypes,
            functions={"embedding_init": embedding_init},
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            features=features,
            num_heads=num_heads,
            feed_forward=feed_forward,
            max_length=max_length,
        )
        check_choice("positions", positions, ("sinusoidal", "learned", None))
        check_size("encoder_layers", encoder_layers, 0)
        check_size("decoder_layers", decoder_layers, 0)
        check_choice("tie_embeddings", tie_embeddings, (False, True, "all"))
        if tie_embeddings == "all" and source_vocabulary != target_vocabulary:
            raise ValueError(
                "tie_embeddings: 'all' expects source_vocabulary == target_vocabulary, got "
                f"{source_vocabulary} and {target_vocabulary}"
            )
        tables = {"embedding_init": embedding_init, "rngs": rngs, **given.dtypes}
        self.source_tokens = (
            None
            if tie_embeddings == "all"
            else TokenEmbedding(source_vocabulary, features, **tables)
        )
        self.target_tokens = TokenEmbedding(target_vocabulary, features, **tables)
        self.source_positions = position_vectors(positions, max_length, features, tables)
        self.target_positions = position_vectors(positions, max_length, features, tables)
        self.dropout = Dropout(given.dropout_rate, rngs=rngs)
        sizes = (features, num_heads, feed_forward)
        self.encoder = Encoder(encoder_layers, *sizes, rngs=rngs, **options)
        self.decoder = Decoder(decoder_layers, *sizes, rngs=rngs, **options)
        self.output = (
            None
            if tie_embeddings
            else OutputProjection(features, target_vocabulary, rngs=rngs, **given.matrices)
        )

    @advised_by(TRANSFORMER_ADVICE)
    def __call__(
        self,
        source_ids: Ids,
        target_ids: Ids,
        *,
        source_mask: MaskLike = None,
        target_mask: MaskLike = None,
        cross_mask: MaskLike = None,
        source_positions: Positions = None,
        target_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T vocabulary"]:
        """Logits `[*B, T, target_vocabulary]` of source ids `[*B, S]` and target ids `[*B, T]`.

        The other arguments are those of `features`.
        """
        features = self.features(
            source_ids,
            target_ids,
            source_mask=source_mask,
            target_mask=target_mask,
            cross_mask=cross_mask,
            source_positions=source_positions,
            target_positions=target_positions,
            deterministic=deterministic,
            rngs=rngs,
        )
        return self.logits(features)

    def features(
        self,
        source_ids: Ids,
        target_ids: Ids,
        *,
        source_mask: MaskLike = None,
        target_mask: MaskLike = None,
        cross_mask: MaskLike = None,
        source_positions: Positions = None,
        target_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """What `logits` reads: `[*B, T, D]`, for losses that do without all logits at once.

        Args:
            source_mask: of the encoder's self-attention.
            target_mask: of the decoder's self-attention, which is causal in any case.
            cross_mask: which source positions the target may read.
            source_positions, target_positions: `[*B, S]` and `[*B, T]` (or `[S]`, `[T]`), for
                packed rows; default `arange`.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: where dropout draws its keys, the stream `dropout`.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        memory = self.encode(source_ids, mask=source_mask, positions=source_positions, **run)
        return self._decoded(
            target_ids,
            memory,
            mask=target_mask,
            cross_mask=cross_mask,
            positions=target_positions,
            memory_positions=source_positions,
            **run,
        )

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """The output projection, or the tied embedding."""
        return self.target_tokens.attend(features) if self.output is None else self.output(features)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """Kernel and bias of `logits`."""
        if self.output is None:
            return self.target_tokens.embedding[...], None
        return self.output.arrays

    def encode(
        self,
        source_ids: Ids,
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B S D"]:
        """Source ids `[*B, S]` to the memory `[*B, S, D]` that `decode` reads."""
        run = {"deterministic": deterministic, "rngs": rngs}
        tokens = self.target_tokens if self.source_tokens is None else self.source_tokens
        x = embedded(source_ids, tokens, self.source_positions, positions)
        return self.encoder(self.dropout(x, **run), mask=mask, positions=positions, **run)

    def decode(
        self,
        target_ids: Ids,
        memory: Float[Array, "*B S D"],
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        positions: Positions = None,
        memory_positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T vocabulary"]:
        """Target ids `[*B, T]` and the memory `[*B, S, D]` to logits `[*B, T, target_vocabulary]`.

        `mask` is for the self-attention, which is causal in any case.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        masks = {"mask": mask, "cross_mask": cross_mask}
        where = {"positions": positions, "memory_positions": memory_positions}
        return self.logits(self._decoded(target_ids, memory, **masks, **where, **run))

    def _decoded(
        self, target_ids: Ids, memory: Array, *, positions: Positions, **call: Any
    ) -> Float[Array, "*B T D"]:
        x = embedded(target_ids, self.target_tokens, self.target_positions, positions)
        run = {name: call[name] for name in ("deterministic", "rngs")}
        return self.decoder(self.dropout(x, **run), memory, positions=positions, **call)

    def step(
        self,
        target_ids: Ids,
        caches: list[LayerCache],
        *,
        mask: MaskLike = None,
        cross_mask: MaskLike = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "B T vocabulary"], list[LayerCache]]:
        """Further target ids `[B, T]`, any number, to logits and the caches grown by them.

            caches = model.decoder.start(model.encode(source_ids), length)
            logits, caches = model.step(prompt_ids, caches)
            logits, caches = model.step(next_ids, caches)

        `valid [B, T]` is False for padding; masks are as in `decode`, over the caches' slots.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        positions = caches[0].tokens.next_positions(target_ids.shape[1], valid)
        x = embedded(target_ids, self.target_tokens, self.target_positions, positions)
        options = {"mask": mask, "cross_mask": cross_mask, "valid": valid, **run}
        x, caches = self.decoder.step(self.dropout(x, **run), caches, **options)
        return self.logits(x), caches
