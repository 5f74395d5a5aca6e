"""Flax NNX modules on jattn's functions."""

from jattn.nn.additive import AdditiveAttention
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.capture import AttentionWeights, WeightsTap, capture_weights
from jattn.nn.decoder_only import DecoderOnly, DecoderOnlyLayer, DecoderOnlyOptions
from jattn.nn.embedding import (
    AxialRotary,
    LearnedPositions,
    OutputProjection,
    Rotary,
    SinusoidalPositions,
    TokenEmbedding,
)
from jattn.nn.latent_attention import MultiHeadLatentAttention
from jattn.nn.layers import LOGICAL_AXES, Dropout, FeedForward, LayerNorm, RMSNorm
from jattn.nn.recurrent import (
    GRU,
    Maxout,
    RecurrentDecoder,
    RecurrentEncoder,
    RecurrentOptions,
    RecurrentState,
    RNNsearch,
)
from jattn.nn.single_heads import SingleHeads
from jattn.nn.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    LayerCache,
    LayerOptions,
    Residual,
    Transformer,
)
from jattn.nn.variables import LearnedNormalizer, LearnedScore


__all__ = [
    "GRU",
    "LOGICAL_AXES",
    "AdditiveAttention",
    "AttentionWeights",
    "AxialRotary",
    "Decoder",
    "DecoderLayer",
    "DecoderOnly",
    "DecoderOnlyLayer",
    "DecoderOnlyOptions",
    "Dropout",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LayerCache",
    "LayerNorm",
    "LayerOptions",
    "LearnedNormalizer",
    "LearnedPositions",
    "LearnedScore",
    "Maxout",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "OutputProjection",
    "RMSNorm",
    "RNNsearch",
    "RecurrentDecoder",
    "RecurrentEncoder",
    "RecurrentOptions",
    "RecurrentState",
    "Residual",
    "Rotary",
    "SingleHeads",
    "SinusoidalPositions",
    "TokenEmbedding",
    "Transformer",
    "WeightsTap",
    "capture_weights",
]
__dir__ = __all__.copy
