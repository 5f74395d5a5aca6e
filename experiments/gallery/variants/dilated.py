"""Dilated sliding window (Longformer).

With gaps of d − 1 tokens between its keys, a window of W keys reaches d W tokens back. Query i
attends to key j if

    i − j ∈ {0, d, 2 d, …, d W}

Here d is 4, and d W is an eighth of the text.

Beltagy, Peters, Cohan 2020, Longformer: The Long-Document Transformer. arXiv:2004.05150
"""

import numpy as np

from experiments.gallery import plain
from experiments.gallery.variant import Language, masked
from jattn import masks


def mask(T: int) -> masks.Mask:
    return masks.Causal() & masks.Window(left=T // 8) & masks.Dilated(4)


def allowed(T: int) -> np.ndarray:
    distance = plain.distance(T)
    return (distance >= 0) & (distance <= T // 8) & (distance % 4 == 0)


VARIANT = masked(__doc__, mask, allowed, Language())
