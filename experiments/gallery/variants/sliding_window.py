"""Sliding window with sinks (StreamingLLM).

Each token attends to a window of tokens before it, and to the first four tokens of the text. These
are the attention sinks: without them, a model that was trained on whole texts fails as soon as the
first tokens leave the window. Query i attends to key j if

    j ≤ i "and" (j ≥ i − W "or" j < 4)

Here W is an eighth of the text.

Xiao, Tian, Chen, Han, Lewis 2024, Efficient Streaming Language Models with Attention Sinks.
arXiv:2309.17453
"""

import numpy as np

from experiments.gallery import plain
from experiments.gallery.variant import Language, masked
from jattn import masks


def mask(T: int) -> masks.Mask:
    return masks.Causal() & (masks.Window(left=T // 8) | masks.Prefix(4))


def allowed(T: int) -> np.ndarray:
    is_near, is_sink = plain.distance(T) <= T // 8, np.arange(T) < 4
    return plain.causal(T) & (is_near | is_sink)


VARIANT = masked(__doc__, mask, allowed, Language())
