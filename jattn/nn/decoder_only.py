"""The decoder-only Transformer: a language model such as GPT and Llama."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any, Literal, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jattn._advice import DECODER_ONLY_ADVICE, MODEL_CONSTRUCTOR_ADVICE
from jattn._advised import advised_by
from jattn.cache import Cache, DenseCache
from jattn.cache.base import CacheOptions
from jattn.checks import check_array, check_choice, check_flag, check_number, check_size, shown
from jattn.nn import pretrained
from jattn.nn._types import Ids, SelfOptions, StepOptions, run_options
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
from jattn.nn.module import (
    ConstructorSignature,
    Module,
    check_features,
    check_module,
)
from jattn.nn.transformer import EncoderLayer, LayerArguments, LayerOptions, causal_and, step_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyOptions(LayerOptions):
    """The options of `LayerOptions`, with pre-norm by default; `cross_attention` is not used.

    >>> nn.DecoderOnlyOptions().norm, nn.LayerOptions().norm
    ('pre', 'post')
    """

    norm: Literal["post", "pre", "sandwich"] = "pre"


class DecoderOnlyLayer(EncoderLayer):
    """Causal self-attention and a feed-forward network, each with a residual connection around it.

    `feed_forward` is the network's inner width; `options` are those of `LayerOptions`.

    >>> layer = nn.DecoderOnlyLayer(8, 2, 16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8)), deterministic=True).shape
    (2, 5, 8)
    """

    @advised_by(DECODER_ONLY_ADVICE, SelfOptions)
    def __call__(
        self, x: Float[Array, "*B T D"], **call: Unpack[SelfOptions]
    ) -> Float[Array, "*B T D"]:
        """`mask` is combined with the causal mask."""
        call["mask"] = causal_and(call.get("mask"))
        return super().__call__(x, **call)

    @advised_by({}, StepOptions)
    def step(
        self, x: Float[Array, "B T D"], cache: Cache, **call: Unpack[StepOptions]
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Computes the layer for T further tokens; the keys in `mask` are the cache's slots."""
        check_features("x", x, "T, D", "features", self.features)
        call["mask"] = causal_and(call.get("mask"))
        run, residual = run_options(call), self.self_attention_residual
        y, cache = self.self_attention(residual.enter(x), cache=cache, **call)
        x = residual.leave(x, y, **run)
        return self.feed_forward_residual(x, lambda x: self.feed_forward(x, **run), **run), cache


Encoding = Literal["rotary", "learned", "sinusoidal"] | Rotary | AxialRotary | None


def _rotation(positions: Encoding) -> Rotary | AxialRotary | None:
    """Returns the rotation of queries and keys, None if positions have none. Raises ValueError."""
    if isinstance(positions, Rotary | AxialRotary):
        return positions
    check_choice("positions", positions, ("rotary", "learned", "sinusoidal", None))
    return Rotary() if positions == "rotary" else None


class DecoderOnly(Module):
    """A decoder-only Transformer, from tokens to the logits of the token after each of them.

        gpt = DecoderOnly(50257, features=768, num_heads=12, feed_forward=3072, num_layers=12,
                          positions="learned", scale_embeddings=False, activation=nnx.gelu,
                          rngs=nnx.Rngs(0))
        llama = DecoderOnly(128256, features=4096, num_heads=32, num_kv_heads=8,
                            feed_forward=14336, num_layers=32, positions=Rotary(base=500000.0),
                            normalization="rms", activation=nnx.silu, gated=True, use_bias=False,
                            tie_embeddings=False, scale_embeddings=False, rngs=nnx.Rngs(0))

    After Radford et al. 2019 and Touvron et al. 2023. `jattn.generate` generates text with it.

    Args:
        vocabulary: the number of tokens.
        features: D, the width of the model.
        num_heads, feed_forward: the number of heads and the inner width of every layer.
        num_layers: the number of layers.
        num_kv_heads, head_dim: options of the attention, as in `MultiHeadAttention`.
        positions: "rotary", or a `Rotary` with options, rotates queries and keys; "learned" or
            "sinusoidal" vectors are added to the embedded tokens; with None the model learns about
            order only through the causal mask.
        max_length: the number of learned positions.
        tie_embeddings: whether the embedding is also the output projection.
        scale_embeddings: whether embedded tokens are multiplied by √D, as in Vaswani et al. 2017;
            GPT-2 and Llama do not.
        logits_bias: whether the output projection has a bias; by default only with `use_bias` and
            without `tie_embeddings`.
        logit_cap: a soft cap of the logits, cap · tanh(logits / cap), as in Gemma 2.
        embedding_init: the initializer of the embedding `[vocabulary, D]` and of learned positions
            `[max_length, D]`.
        options: those of `DecoderOnlyOptions`. `self_attention` sets further options of the
            attention, as `functools.partial(MultiHeadAttention, sinks=True)` does; num_kv_heads,
            head_dim and positions override the options that it sets.

    Raises ValueError for sizes that do not fit together.

    >>> sizes = {"features": 8, "num_heads": 2, "feed_forward": 16, "num_layers": 1}
    >>> model = nn.DecoderOnly(9, **sizes, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5), int), deterministic=True).shape
    (2, 5, 9)
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
        positions: Encoding = "rotary",
        tie_embeddings: bool = True,
        scale_embeddings: bool = True,
        logits_bias: bool | None = None,
        logit_cap: float | None = None,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
        **options: Unpack[LayerArguments],
    ):
        settings = DecoderOnlyOptions(**options)
        check_module(
            rngs,
            **settings.dtypes,
            functions={"embedding_init": embedding_init},
            vocabulary=vocabulary,
            features=features,
            num_heads=num_heads,
            feed_forward=feed_forward,
            num_layers=num_layers,
            max_length=max_length,
        )
        check_flag("tie_embeddings", tie_embeddings)
        check_flag("logits_bias", logits_bias, or_none=True)
        if logit_cap is not None:
            check_number("logit_cap", logit_cap, positive=True)
        rotary = _rotation(positions)
        added = positions if isinstance(positions, str) and rotary is None else None
        tables = {"embedding_init": embedding_init, "rngs": rngs, **settings.dtypes}
        self.vocabulary = vocabulary
        tied_bias = bool(tie_embeddings and logits_bias)
        self.tokens = TokenEmbedding(
            vocabulary, features, scale_embeddings=scale_embeddings, use_bias=tied_bias, **tables
        )
        self.positions = position_vectors(added, max_length, features, tables)
        self.dropout = Dropout(settings.dropout_rate, rngs=rngs)
        attention_options = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "rotary": rotary}
        given_options = {name: x for name, x in attention_options.items() if x is not None}
        layers: Any = settings.of_layers(num_layers)
        for layer in layers:
            layer["self_attention"] = functools.partial(layer["self_attention"], **given_options)
        self.layers = nnx.List(
            DecoderOnlyLayer(features, num_heads, feed_forward, rngs=rngs, **layer)
            for layer in layers
        )
        self.norm = settings.make_final_norm(features, rngs)
        self.logit_cap = logit_cap
        use_bias = settings.use_bias if logits_bias is None else logits_bias
        output = {"use_bias": use_bias, "rngs": rngs, **settings.matrices}
        self.output = None if tie_embeddings else OutputProjection(features, vocabulary, **output)

    @classmethod
    def from_safetensors(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: Dtype | None = None,
        dropout_rate: float = 0.0,
        length: int | None = None,
        ignored: Iterable[str] = (),
        mesh: Mesh | None = None,
    ) -> "DecoderOnly":
        """Constructs a model with the weights in a folder of the Hugging Face hub's layout.

            model = nn.DecoderOnly.from_safetensors(folder)
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            prompt = jnp.array([tokenizer.encode("Once upon a time").ids])
            tokens = jattn.generate(model, prompt, max_tokens=20).tokens

        The folder has `config.json`, with the `model_type` llama, mistral, qwen2, qwen3, gemma,
        gemma2, gemma3_text or gpt2, and `model.safetensors`, or the files that
        `model.safetensors.index.json` lists. Tensors `self_attn.sinks` `[N]` are attention sinks.

        Args:
            folder: the path of the folder.
            dtype: the dtype of the parameters; by default that of the embedding in the file.
            dropout_rate: the rate of dropout, in place of those in the config.
            length: the number of tokens for which dynamic rotary scaling chooses frequencies.
            ignored: names of options in the config that do not change the logits.
            mesh: the device mesh on which parameters are placed, by their logical axes under
                `nnx.logical_axis_rules`; by default they are on the default device.

        Raises:
            FileNotFoundError: for a missing file.
            ImportError: without the package safetensors, in `pip install "jattn[weights]"`.
            NotImplementedError: for a `model_type` or an option that is not supported.
            ValueError: for missing and unexpected tensors, for tensors of a wrong shape, and for
                damaged files.
        """
        options: Any = {"dtype": dtype, "dropout_rate": dropout_rate, "length": length}
        return pretrained.load(cls, folder, **options, ignored=ignored, mesh=mesh)

    @advised_by(DECODER_ONLY_ADVICE, SelfOptions)
    def __call__(self, tokens: Ids, **call: Unpack[SelfOptions]) -> Float[Array, "*B T vocabulary"]:
        """Returns the logits `[*B, T, vocabulary]` of `tokens [*B, T]`; see `features`."""
        return self.logits(self.features(tokens, **call))

    @advised_by(DECODER_ONLY_ADVICE, SelfOptions)
    def features(self, tokens: Ids, **call: Unpack[SelfOptions]) -> Float[Array, "*B T D"]:
        """Returns the last layer's normalised output `[*B, T, D]`, the input of `logits`.

        A loss can compute the logits from it in chunks, so that it never holds all of them.

        Args:
            tokens: integers `[*B, T]`.
            mask: combined with the causal mask; `masks.Segments` for rows of several documents.
            positions: `[*B, T]` or `[T]`, default `arange(T)`.
            deterministic: True switches dropout off; None leaves it to `train()` and `eval()`.
            rngs: the source of dropout keys, from its stream `dropout`.
        """
        x = embedded(tokens, self.tokens, self.positions, call.get("positions"))
        x = self.dropout(x, **run_options(call))
        for layer in self.layers:
            x = layer(x, **call)
        return x if self.norm is None else self.norm(x)

    def logits(self, features: Float[Array, "*B T D"]) -> Float[Array, "*B T vocabulary"]:
        """Maps the result of `features` to logits, by the output projection or tied embedding."""
        output = self.tokens.attend if self.output is None else self.output
        logits, cap = output(features), self.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @property
    def projection(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """The kernel and the bias (or None) of `logits`, before the soft cap."""
        return (self.tokens if self.output is None else self.output).arrays

    def start(
        self,
        batch: int,
        length: int,
        kind: type[Cache] = DenseCache,
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> list[Cache]:
        """Returns empty caches, one for each layer, for `step` over up to `length` tokens per row.

        `kind`, `dtype` and `options` are those of `MultiHeadAttention.empty_cache`.

        Raises ValueError if `length` is greater than the number of learned positions.
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

    @advised_by({}, StepOptions)
    def step(
        self, tokens: Ids, caches: list[Cache], **call: Unpack[StepOptions]
    ) -> tuple[Float[Array, "B T vocabulary"], list[Cache]]:
        """Maps the next T tokens `[B, T]`, for any T, to logits and the extended caches.

            model.eval()  # no dropout, as deterministic=True
            caches = model.start(2, 512)
            logits, caches = model.step(prompt, caches)
            logits, caches = model.step(next_tokens, caches)

        `valid [B, T]` is False for padding; `mask` is as in the call, over the caches' slots.
        `positions`, `[B, T]` or `[T]`, are for caches created with `positions=True`; the default
        is each token's number in its batch row.
        """
        if not isinstance(caches, list | tuple) or not all(isinstance(x, Cache) for x in caches):
            raise TypeError(
                f"caches: expected a list of caches of jattn.cache, got {shown(caches)}"
            )
        count = len(self.layers)
        if len(caches) != count:
            raise ValueError(f"caches: expected one for each of {count} layers, got {len(caches)}")
        check_array("tokens", tokens, "[B, T]", "integer", rank=2)
        B = len(caches[0].lengths)
        if tokens.shape[0] != B:
            got = list(tokens.shape)
            raise ValueError(f"tokens: expected [B, T] with B = {B} as in the caches, got {got}")
        valid, positions = call.get("valid"), call.get("positions")
        positions = caches[0].next_positions(tokens.shape[-1], valid, positions)
        x = embedded(tokens, self.tokens, self.positions, positions)
        x = self.dropout(x, **run_options(call))
        x, caches = step_layers(self.layers, self.norm, x, caches, **call)
        return self.logits(x), caches
