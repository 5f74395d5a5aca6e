"""The steps, in the order in which they are read."""

from experiments.walkthrough.interactions import interaction, query_key_value, scaling
from experiments.walkthrough.masking import causal, dropout
from experiments.walkthrough.similarity import contexts, simple_self_attention, vectors
from experiments.walkthrough.step import Step


STEPS: tuple[Step, ...] = (
    vectors,
    contexts,
    simple_self_attention,
    interaction,
    query_key_value,
    scaling,
    causal,
    dropout,
)
