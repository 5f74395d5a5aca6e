"""The configuration of a run (`Config`), and presets to start from (`PRESETS`).

    toy        the built-in corpus, in a few minutes on two CPU cores; expected: at least 99 %
               of 1,000 held-out sentences translated exactly (99.9 % with seed 0). RNNsearch, with
               `architecture=rnnsearch` and `learning_rate=2e-3`, is as good, but translates none of
               the sentences with deeper clauses
    tiny       the same in seconds, for tests; learns little
    multi30k   the tutorial Transformer for real pairs (pytorch-seq2seq, part 6), whose published
               test figures are perplexity 5.316 and BLEU 36.52 after 10 epochs; here with smoothed
               labels and the mean of three checkpoints, without which it is two BLEU worse
    multi30k-bpe
               for the best translations of these pairs: byte-pair encoding, a wider network, the
               schedule of Vaswani et al. 2017 with a short warm-up, and the mean of the last five
               epochs; less than an hour on two CPU cores
    rnnsearch  the recurrent translator of Bahdanau, Cho and Bengio 2014 in the tutorial's sizes
               (pytorch-seq2seq, part 3)
    base       the base model of Vaswani et al. 2017, for text of millions of pairs

Every field can be changed on the command line with `--set NAME=VALUE`.
"""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from experiments.runs import settings


@dataclass(frozen=True, kw_only=True, config=settings.CHECKED)
class Config(settings.RunSettings):
    """A configuration: with the text, it decides everything that a run computes.

    RNNsearch has one recurrent layer on each side; it ignores `tie_embeddings` and the fields from
    `num_heads` to `rotary`. The Transformer ignores `hidden`.

    Attributes:
        seed: the seed of the corpus, the parameters, the order of the data and dropout.
        architecture: "transformer" or "rnnsearch".
        features: the width of the model, D; in RNNsearch the width of the embedded words.
        hidden: the width of RNNsearch's recurrent states.
        num_heads: attention heads in each layer; must divide `features`.
        feed_forward: the inner width of the feed-forward networks.
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder.
        norm: "pre" or "post": the place of layer normalization.
        positions: the position embeddings added to the word embeddings, "sinusoidal" or "learned".
        rotary: whether self-attention applies rotary position embeddings as well.
        embedding_init: the initialization of word embeddings and learned positions: "normal" with
            variance 1 / `features`, or "glorot" (uniform, by both sides of the table), which is
            smaller for words and so gives learned positions more relative weight.
        tie_embeddings: whether the target embedding is also the output projection.
        max_length: the greatest length of a sentence in tokens, `<eos>` counted. Longer training
            pairs are dropped.
        dropout_rate: the dropout rate, in [0, 1).
        dtype: the dtype of the computation, "float32" or "bfloat16", which is fastest on
            accelerators; parameters, sums and the loss are always float32.
        sentences: training pairs of the built-in corpus; other text is used whole.
        held_out: pairs in each of validation, test and deeper test of the built-in corpus.
        tokenizer: "words", or "bpe" for byte-pair encoding: pieces of words, with which hardly any
            token is unknown.
        vocabulary_size: the greatest size of a vocabulary, the four specials counted.
        joint_vocabulary: whether source and target have one vocabulary, learned from both. Without
            it each vocabulary has up to `vocabulary_size` tokens. The embeddings are separate in
            both cases.
        lower: whether text is lower-cased.
        minimum_count: words rarer than this in the training text are unknown words; with "bpe",
            pairs rarer than this are not merged.
        tokens_per_batch: places per batch and side; 0 if `rows_per_batch` is given.
        rows_per_batch: rows per batch, each a sentence pair or, with `packed_width`, several; 0 if
            `tokens_per_batch` is given.
        max_shapes: the greatest number of distinct batch shapes, each of which is compiled.
        packed_width: the width of a row that several sentence pairs share; 0 for one padded pair
            in each row.
        accumulation_steps: the number of equal micro-batches into which a batch is split, whose
            gradients are summed: the same update in less memory.
        epochs: passes over the training text; 0 if `steps` is given.
        steps: updates; 0 if `epochs` is given.
        learning_rate: the peak of the schedule.
        schedule: the schedule after the warm-up: "constant", "cosine" (down to almost zero) or
            "inverse_sqrt" (Vaswani et al. 2017).
        warmup_steps: updates over which the rate rises linearly.
        beta2: Adam's decay rate of the second moment.
        epsilon: Adam's epsilon.
        clip_norm: the greatest norm of the gradient; 0 for no limit.
        label_smoothing: the share of probability spread over the whole vocabulary.
        report_every: steps between lines of metrics.
        checkpoint_every: steps between checkpoints.
        patience: epochs without a lower validation loss after which training stops; the run then
            keeps the parameters of the lowest loss. 0 trains to the end and keeps the last ones.
        averaged_checkpoints: the number of last checkpoints whose mean parameters the run keeps;
            1 keeps the last parameters.
    """

    seed: settings.Seed = 0

    architecture: Literal["transformer", "rnnsearch"] = "transformer"
    features: settings.Width = 512
    hidden: settings.Width = 512
    num_heads: settings.Width = 8
    feed_forward: settings.Width = 2048
    encoder_layers: settings.Layers = 6
    decoder_layers: settings.Layers = 6
    norm: Literal["pre", "post"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    rotary: bool = False
    embedding_init: Literal["normal", "glorot"] = "normal"
    tie_embeddings: bool = False
    max_length: settings.Length = 100
    dropout_rate: settings.Share = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"

    sentences: Annotated[int, Field(ge=1, le=10**6)] = 100_000
    held_out: Annotated[int, Field(ge=1, le=10**5)] = 1000
    tokenizer: Literal["words", "bpe"] = "words"
    vocabulary_size: Annotated[int, Field(gt=4, le=2**22)] = 8000
    joint_vocabulary: bool = False
    lower: bool = True
    minimum_count: settings.Count = 1
    tokens_per_batch: settings.Whole = 0
    rows_per_batch: settings.Whole = 0
    max_shapes: settings.Few = 4
    packed_width: Annotated[int, Field(ge=0, le=2**16)] = 0
    accumulation_steps: settings.Count = 1

    epochs: settings.Whole = 0
    steps: settings.Whole = 0
    learning_rate: settings.Rate = 5e-4
    schedule: Literal["constant", "cosine", "inverse_sqrt"] = "constant"
    warmup_steps: settings.Count = 1
    beta2: settings.Share = 0.98
    epsilon: settings.Rate = 1e-9
    clip_norm: settings.Limit = 1.0
    label_smoothing: settings.Share = 0.1

    report_every: settings.Count = 50
    checkpoint_every: settings.Count = 500
    patience: settings.Whole = 0
    averaged_checkpoints: settings.Few = 1

    def __post_init__(self) -> None:
        for first, second in (("epochs", "steps"), ("tokens_per_batch", "rows_per_batch")):
            if (getattr(self, first) > 0) == (getattr(self, second) > 0):
                raise ValueError(f"expected exactly one of {first} and {second} above 0")
        if self.patience > 0 and self.averaged_checkpoints > 1:
            raise ValueError(
                "expected at most one of patience above 0 and averaged_checkpoints above 1"
            )
        if self.features % self.num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of features={self.features}, got {self.num_heads}"
            )

        if self.packed_width and self.architecture == "rnnsearch":
            raise ValueError("packed_width: expected 0 with architecture='rnnsearch'")


def differences(saved: Config, requested: Config) -> list[str]:
    """Lists the fields in which two configurations differ, such as `features: 128, not 256`."""
    fields = [(name, getattr(saved, name), getattr(requested, name)) for name in SETTINGS]
    return [f"{name}: {old}, not {new}" for name, old, new in fields if old != new]


SETTINGS = tuple(field.name for field in dataclasses.fields(Config))


PRESETS = {
    "toy": Config(
        features=128,
        hidden=256,
        num_heads=8,
        feed_forward=256,
        encoder_layers=2,
        decoder_layers=2,
        norm="pre",  # learns faster than "post" and needs no careful warm-up
        rotary=True,  # learns in a third fewer steps; sines generalize to deeper constructions
        dropout_rate=0.0,  # no sentence occurs often enough to be memorized
        max_length=64,
        tokens_per_batch=2048,
        max_shapes=3,
        steps=1200,
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=200,
    ),
    "tiny": Config(
        features=16,
        num_heads=2,
        feed_forward=32,
        encoder_layers=1,
        decoder_layers=1,
        norm="pre",
        dropout_rate=0.1,
        max_length=32,
        sentences=300,
        held_out=20,
        tokens_per_batch=512,
        max_shapes=1,
        steps=12,
        learning_rate=1e-2,
        schedule="cosine",
        warmup_steps=2,
        report_every=4,
        checkpoint_every=6,
    ),
    "multi30k": Config(
        features=256,
        num_heads=8,
        feed_forward=512,
        encoder_layers=3,
        decoder_layers=3,
        positions="learned",
        embedding_init="glorot",
        minimum_count=2,
        rows_per_batch=128,
        epochs=10,
        beta2=0.999,
        epsilon=1e-8,
        report_every=10,
        checkpoint_every=100,
        averaged_checkpoints=3,
    ),
    "multi30k-bpe": Config(
        features=256,
        num_heads=8,
        feed_forward=1024,
        encoder_layers=3,
        decoder_layers=3,
        tie_embeddings=True,
        tokenizer="bpe",
        joint_vocabulary=True,
        minimum_count=2,
        tokens_per_batch=2520,
        packed_width=72,
        epochs=20,
        learning_rate=3.1e-3,  # (features · warmup_steps)^-1/2
        schedule="inverse_sqrt",
        warmup_steps=400,
        report_every=93,
        checkpoint_every=186,  # an epoch: the last five are averaged
        averaged_checkpoints=5,
    ),
    "rnnsearch": Config(
        architecture="rnnsearch",
        features=256,
        hidden=512,
        dropout_rate=0.5,
        sentences=20_000,
        minimum_count=2,
        rows_per_batch=128,
        epochs=10,
        learning_rate=1e-3,
        beta2=0.999,
        epsilon=1e-8,
        label_smoothing=0.0,
        report_every=10,
        checkpoint_every=100,
    ),
    "base": Config(
        tie_embeddings=True,
        max_length=256,
        tokenizer="bpe",
        vocabulary_size=37_000,
        joint_vocabulary=True,
        tokens_per_batch=25_000,
        max_shapes=8,
        steps=100_000,
        learning_rate=7e-4,  # (features · warmup_steps)^-1/2
        schedule="inverse_sqrt",
        warmup_steps=4000,
        checkpoint_every=1000,
    ),
}
