"""What a run is made from: one frozen configuration, and the presets to start from.

    toy        the built-in corpus on two CPU cores in about three minutes; what must come out:
               at least 99 % of 1,000 held-out sentences translated exactly (99.9 % with seed 0);
               as well by RNNsearch with `architecture=rnnsearch` and `learning_rate=2e-3`, which
               translates none of the sentences with deeper clauses
    tiny       the same in seconds, for tests; learns little
    multi30k   the tutorial Transformer for real pairs (pytorch-seq2seq, part 6), whose published
               test figures are perplexity 5.316 and BLEU 36.52 after 10 epochs; here with smoothed
               labels and the mean of three checkpoints, without which it is two BLEU worse
    multi30k-bpe
               the same sizes on pieces of words, with what else helps on so few pairs
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
class Config(settings.Settings):
    """All that decides what a run computes, beside its text.

    RNNsearch has one recurrent layer on each side; it does not look at the fields from `num_heads`
    to `rotary` and `tie_embeddings`, nor the Transformer at `hidden`.

    Attributes:
        seed: of the corpus, the parameters, the order of the data and dropout.
        architecture: "transformer" or "rnnsearch".
        features: the width of the model, D; of RNNsearch that of the embedded words.
        hidden: the width of RNNsearch's recurrent states.
        num_heads: attention heads in each layer; must divide `features`.
        feed_forward: the inner width of the feed-forward networks.
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder.
        norm: "pre" or "post".
        positions: what is added to the embedded words, "sinusoidal" or "learned".
        rotary: whether self-attention rotates queries and keys by their positions as well.
        embedding_init: of the embedded words and of learned positions: "normal" with variance
            1 / `features`, or "glorot" (uniform, by both sides of the table), which is smaller
            for words and gives learned positions more weight beside them.
        tie_embeddings: whether the target embedding is the output projection too.
        max_length: the most tokens of a sentence, `<eos>` counted. Longer training pairs are
            dropped.
        dropout_rate: in [0, 1).
        dtype: of the computation, "float32" or "bfloat16", which accelerators are fastest in;
            parameters, sums and the loss are float32 in any case.
        sentences: pairs of the built-in corpus to train on; real text is taken whole.
        held_out: pairs in each of validation, test and deeper test of the built-in corpus.
        tokenizer: "words", or "bpe" for byte-pair encoding: pieces of words, which leave hardly
            anything unknown.
        vocabulary_size: the most tokens of a vocabulary, the four specials counted.
        joint_vocabulary: whether source and target have one vocabulary, learned from both. Without
            it each has the whole size to itself; the model shares no embedding between them.
        lower: whether text is brought to lower case.
        minimum_count: words rarer than this in the training text are unknown words; with "bpe",
            pairs rarer than this are not merged.
        tokens_per_batch: places per batch and side; 0 where `rows_per_batch` is given.
        rows_per_batch: sentence pairs per batch; 0 where `tokens_per_batch` is given.
        max_shapes: the most distinct shapes of batches, each of which is compiled.
        packed_width: places of a row that several sentence pairs share; 0 for a pair in each row,
            padded. A row of `rows_per_batch` is then one of these.
        accumulation_steps: a batch is taken in so many equal parts, whose gradients are summed: the
            same update in less memory.
        epochs: passes over the training text; 0 where `steps` is given.
        steps: updates; 0 where `epochs` is given.
        learning_rate: the highest of the schedule.
        schedule: after the warm-up "constant", "cosine" (down to almost zero) or
            "inverse_sqrt" (Vaswani et al. 2017).
        warmup_steps: updates over which the rate rises in equal parts.
        beta2: of Adam.
        epsilon: of Adam.
        clip_norm: the greatest norm of the gradient; 0 for no limit.
        label_smoothing: the share of probability spread over the whole vocabulary.
        report_every: steps between lines of metrics.
        checkpoint_every: steps between checkpoints.
        patience: epochs without a lower validation loss after which training stops; the parameters
            of the lowest are then those of the run. 0 trains to the end, and the last ones are.
        averaged_checkpoints: checkpoints, counted back from the last, whose mean parameters are
            those of the run. 1 takes the last alone.
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
        for one, other in (("epochs", "steps"), ("tokens_per_batch", "rows_per_batch")):
            if (getattr(self, one) > 0) == (getattr(self, other) > 0):
                raise ValueError(f"expected exactly one of {one} and {other} above 0")
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


def differences(saved: Config, given: Config) -> list[str]:
    """The fields in which two configurations differ, as texts such as `features: 128, not 256`."""
    pairs = [(name, getattr(saved, name), getattr(given, name)) for name in SETTINGS]
    return [f"{name}: {was}, not {now}" for name, was, now in pairs if was != now]


SETTINGS = tuple(field.name for field in dataclasses.fields(Config))


_TUTORIAL = Config(
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
)

PRESETS = {
    "toy": Config(
        features=128,
        hidden=256,
        num_heads=8,
        feed_forward=256,
        encoder_layers=2,
        decoder_layers=2,
        norm="pre",  # learns faster than "post" and needs no careful warm-up
        rotary=True,  # known constructions in a third fewer steps; sines carry over to deeper ones
        dropout_rate=0.0,  # no sentence is seen often enough to be learnt by heart
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
    "multi30k": _TUTORIAL,
    "multi30k-bpe": dataclasses.replace(
        _TUTORIAL,
        norm="pre",
        tie_embeddings=True,
        dropout_rate=0.2,
        tokenizer="bpe",
        joint_vocabulary=True,
        epochs=14,
        learning_rate=1.5e-3,
        schedule="cosine",
        warmup_steps=400,
        beta2=0.98,
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
