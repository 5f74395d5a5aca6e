"""The steps, in reading order."""

from experiments.walkthrough.alignments import alignment
from experiments.walkthrough.contexts import contexts
from experiments.walkthrough.cores import cores
from experiments.walkthrough.depth import positions, residual_and_norm
from experiments.walkthrough.heads import additive, heads
from experiments.walkthrough.interactions import interaction, query_key_value, scaling
from experiments.walkthrough.masking import causal, dropout
from experiments.walkthrough.recurrence import cache, recurrence
from experiments.walkthrough.similarity import simple_self_attention, vectors
from experiments.walkthrough.step import Step
from experiments.walkthrough.transformer import transformer


STEPS: tuple[Step, ...] = (
    vectors,
    recurrence,
    simple_self_attention,
    interaction,
    query_key_value,
    scaling,
    causal,
    dropout,
    heads,
    additive,
    positions,
    residual_and_norm,
    transformer,
    contexts,
    alignment,
    cache,
    cores,
)
