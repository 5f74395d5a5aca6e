"""The decoder-only Transformer: a language model such as GPT and Llama."""

import dataclasses
import functools
from typing import Any, Literal, Unpack

from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

from jattn._advice import DECODER_ONLY_ADVICE, MODEL_CONSTRUCTOR_ADVICE
from jattn._advised import advised_by
from jattn.cache import Cache, DenseCache
from jattn.checks import check_choice, check_flag, check_size
from jattn.masks import MaskLike
from jattn.nn._types import CacheOptions, Ids, Positions, RandomSource, Valid
from jattn.nn.checks import check_features, check_integers, check_module
from jattn.nn.embedding import (
    DEFAULT_INIT,
    AxialRotary,
    LearnedPositions,
    OutputProjection,
    Rotary,
    TokenEmbedding,
    embedded,
    position_vectors,
)
from jattn.nn.layers import Dropout
from jattn.nn.module import ConstructorSignature, Module
from jattn.nn.transformer import EncoderLayer, LayerArguments, LayerOptions, causal_and


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyOptions(LayerOptions):
    """The options of `LayerOptions`, with pre-norm by default; `cross_attention` is not used."""

    norm: Literal["post", "pre"] = "pre"


class DecoderOnlyLayer(EncoderLayer):
    """Causal self-attention and a feed-forward network, each with a way around it.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.
    """

    @advised_by(DECODER_ONLY_ADVICE)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """`mask` goes beside the causal one."""
        run = {"deterministic": deterministic, "rngs": rngs}
        return super().__call__(x, mask=causal_and(mask), positions=positions, **run)

    def step(
        self,
        x: Float[Array, "B T D"],
        cache: Cache,
        *,
        mask: MaskLike = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """As the call, for T further tokens; masks see the cache's slots."""
        check_features("x", x, "T, D", "features", self.features)
        run = {"deterministic": deterministic, "rngs": rngs}
        grown = cache

        def attend(x: Array) -> Array:
            nonlocal grown
            options = {"mask": causal_and(mask), "valid": valid, **run}
            y, grown = self.self_attention(x, cache=cache, **options)
            return y

        return self._sublayers(x, attend, **run), grown


class DecoderOnly(Module):
    """A decoder-only Transformer, from tokens to logits over the token that follows each.

        gpt = DecoderOnly(50257, features=768, num_heads=12, feed_forward=3072, num_layers=12,
                          positions="learned", scale_embeddings=False, activation=nnx.gelu,
                          rngs=nnx.Rngs(0))
        llama = DecoderOnly(128256, features=4096, num_heads=32, num_kv_heads=8,
                            feed_forward=14336, num_layers=32, positions=Rotary(base=500000.0),
                            normalization="rms", activation=nnx.silu, gated=True, use_bias=False,
                            tie_embeddings=False, scale_embeddings=False, rngs=nnx.Rngs(0))

    After Radford et al. 2019 and Touvron et al. 2023. `jattn.generate` writes text with it.

    Args:
        vocabulary: how many tokens there are.
        features: D, the width of the model.
        num_heads, feed_forward: of every layer.
        num_layers: how many.
        num_kv_heads, head_dim: of the attention, as in `MultiHeadAttention`.
        positions: "rotary", or a `Rotary` with options, turns queries and keys; "learned" or
            "sinusoidal" vectors are added to the embedded tokens; None adds nothing, so that the
            causal mask alone tells the order.
        max_length: of learned positions.
        tie_embeddings: whether the embedding is the output projection too.
        scale_embeddings: whether embedded tokens are multiplied by √D, as in Vaswani et al. 2017.
            False is for the weights of GPT-2 and Llama.
        embedding_init: of the embedding and of learned positions, `[rows, D]`.
        options: those of `DecoderOnlyOptions`. What else the attention can do is said there:
            `self_attention=functools.partial(MultiHeadAttention, sinks=True)`. The arguments above
            go before those of such a function.

    Raises ValueError for sizes that do not go together.
    """

    __signature__: Any = ConstructorSignature(DecoderOnlyOptions)

    @advised_by(MODEL_CONSTRUCTOR_ADVICE, DecoderOnlyOptions)
    def __init__(
        self,
        vocabulary: int,
        *,
        features: int = 512,
        num_heads: int = 8,
        feed_forward: int = 2048,
        num_layers: int = 6,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        max_length: int = 1024,
        positions: Literal["rotary", "learned", "sinusoidal"]
        | Rotary
        | AxialRotary
        | None = "rotary",
        tie_embeddings: bool = True,
        scale_embeddings: bool = True,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        given = DecoderOnlyOptions(**options)
        check_module(
            rngs,
            **given.dtypes,
            functions={"embedding_init": embedding_init},
            vocabulary=vocabulary,
            features=features,
            num_heads=num_heads,
            feed_forward=feed_forward,
            num_layers=num_layers,
            max_length=max_length,
        )
        check_flag("tie_embeddings", tie_embeddings)
        rotary = _rotary(positions)
        added = positions if isinstance(positions, str) and rotary is None else None
        tables = {"embedding_init": embedding_init, "rngs": rngs, **given.dtypes}
        self.vocabulary = vocabulary
        self.tokens = TokenEmbedding(
            vocabulary, features, scale_embeddings=scale_embeddings, **tables
        )
        self.positions = position_vectors(added, max_length, features, tables)
        self.dropout = Dropout(given.dropout_rate, rngs=rngs)
        wanted = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "rotary": rotary}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        attention = functools.partial(given.self_attention, **wanted)
        given = dataclasses.replace(given, self_attention=attention)
        every: Any = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        self.layers = nnx.List(
            DecoderOnlyLayer(features, num_heads, feed_forward, rngs=rngs, **every)
            for _ in range(num_layers)
        )
        self.norm = given.make_final_norm(features, rngs)
        output = {"use_bias": given.use_bias, "rngs": rngs, **given.matrices}
        self.output = None if tie_embeddings else OutputProjection(features, vocabulary, **output)

    @advised_by(DECODER_ONLY_ADVICE)
    def __call__(
        self,
        tokens: Ids,
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T vocabulary"]:
        """Logits `[*B, T, vocabulary]` of tokens `[*B, T]`; the arguments are those of
        `features`."""
        run = {"deterministic": deterministic, "rngs": rngs}
        return self.logits(self.features(tokens, mask=mask, positions=positions, **run))

    def features(
        self,
        tokens: Ids,
        *,
        mask: MaskLike = None,
        positions: Positions = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        """What `logits` reads: `[*B, T, D]`, for losses that do without all logits at once.

        Args:
            tokens: integers `[*B, T]`.
            mask: beside the causal one, such as `masks.Segments` for packed documents.
            positions: `[*B, T]` or `[T]`, default `arange(T)`.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: where dropout draws its keys, the stream `dropout`.
        """
        run = {"deterministic": deterministic, "rngs": rngs}
        x = self.dropout(embedded(tokens, self.tokens, self.positions, positions), **run)
        for layer in self.layers:
            x = layer(x, mask=mask, positions=positions, **run)
        return x if self.norm is None else self.norm(x)

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """The output projection, or the tied embedding."""
        return self.tokens.attend(features) if self.output is None else self.output(features)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """Kernel and bias of `logits`."""
        if self.output is None:
            return self.tokens.embedding[...], None
        return self.output.arrays

    def start(
        self,
        batch: int,
        length: int,
        kind: type[Cache] = DenseCache,
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> list[Cache]:
        """Empty caches, one for each layer, for `step` over up to `length` tokens in each row.

        `kind`, `dtype` and `options` are those of `MultiHeadAttention.empty_cache`.

        Raises ValueError for more tokens than there are learned positions.
        """
        check_size("length", length)
        if isinstance(self.positions, LearnedPositions) and length > self.positions.max_length:
            most = self.positions.max_length
            raise ValueError(f"length: expected length <= max_length={most}, got {length}")
        layers: Any = self.layers
        return [
            layer.self_attention.empty_cache(batch, length, kind, dtype, **options)
            for layer in layers
        ]

    def step(
        self,
        tokens: Ids,
        caches: list[Cache],
        *,
        mask: MaskLike = None,
        valid: Valid = None,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> tuple[Float[Array, "B T vocabulary"], list[Cache]]:
        """Further tokens `[B, T]`, any number, to logits and the caches grown by them.

            caches = model.start(2, 512)
            logits, caches = model.step(prompt, caches)
            logits, caches = model.step(next_tokens, caches)

        `valid [B, T]` is False for padding; `mask` is as in the call, over the caches' slots.
        """
        layers: Any = self.layers
        _check_caches(caches, len(layers))
        check_integers("tokens", tokens)
        run = {"deterministic": deterministic, "rngs": rngs}
        positions = caches[0].next_positions(tokens.shape[-1], valid)
        x = self.dropout(embedded(tokens, self.tokens, self.positions, positions), **run)
        grown = []
        for layer, cache in zip(layers, caches, strict=True):
            x, one = layer.step(x, cache, mask=mask, valid=valid, **run)
            grown.append(one)
        return self.logits(x if self.norm is None else self.norm(x)), grown


def _rotary(positions: Any) -> Rotary | AxialRotary | None:
    """What turns queries and keys, if anything does."""
    if isinstance(positions, Rotary | AxialRotary):
        return positions
    check_choice("positions", positions, ("rotary", "learned", "sinusoidal", None))
    return Rotary() if positions == "rotary" else None


def _check_caches(caches: Any, count: int) -> None:
    """Raises unless there is a cache for each layer."""
    if not isinstance(caches, list | tuple) or not all(isinstance(x, Cache) for x in caches):
        raise TypeError(f"caches: expected a list of caches of jattn.cache, got {caches!r}")
    if len(caches) != count:
        raise ValueError(f"caches: expected one for each of {count} layers, got {len(caches)}")
