"""Prefix LM.

All tokens attend to the whole prefix, which is the input. The tokens after it, which are generated,
also attend to each other causally:

    "query" i "attends to key" j "if" j < P "or" j ≤ i

Here the prefix is a quarter of the text.

Raffel, Shazeer, Roberts et al. 2020, Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer. arXiv:1910.10683
"""

import numpy as np

from experiments.gallery import plain
from experiments.gallery.variant import masked
from jattn import masks


def mask(T: int) -> masks.Mask:
    return masks.Causal() | masks.Prefix(T // 4)


def allowed(T: int) -> np.ndarray:
    return plain.causal(T) | (np.arange(T) < T // 4)


REASON = "the tokens of the prefix see the characters that they would have to predict"
VARIANT = masked(__doc__, mask, allowed, REASON)
