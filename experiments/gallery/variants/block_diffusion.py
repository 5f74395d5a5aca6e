"""Block diffusion, with packed documents.

The first half of the tokens is a noisy copy of the text, the second half the text. Noisy block b
attends to itself and to clean blocks c < b; clean block b attends to clean blocks c ≤ b. Three
documents are packed into the text, and no query attends to another document.

Arriola, Gokaslan, Chiu et al. 2025, Block Diffusion: Interpolating Between Autoregressive and
Diffusion Language Models. arXiv:2503.09573
"""

import numpy as np

from experiments.gallery.variant import masked
from jattn import masks


BLOCK = 8


def mask(T: int) -> masks.Mask:
    def blocks(b, h, q, kv):
        q_block, kv_block = q % (T // 2) // BLOCK, kv % (T // 2) // BLOCK
        q_clean, kv_clean = q >= T // 2, kv >= T // 2
        return (kv_clean & (kv_block < q_block)) | ((kv_clean == q_clean) & (kv_block == q_block))

    documents = np.searchsorted([T // 8, T // 3], np.arange(T // 2), side="right")
    return masks.Predicate(blocks) & masks.Segments(np.tile(documents, 2).astype(np.int32))


def allowed(T: int) -> np.ndarray:
    in_block, empty = np.ones((BLOCK, BLOCK)), np.zeros((T // 2, T // 2))
    same = np.kron(np.eye(T // 2 // BLOCK), in_block)
    earlier = np.kron(np.tril(np.ones((T // 2 // BLOCK,) * 2), -1), in_block)
    document = (np.arange(T // 2)[:, None] >= [T // 8, T // 3]).sum(axis=1)
    blocks = np.block([[same, earlier], [empty, earlier + same]]) > 0
    return blocks & np.tile(document[:, None] == document, (2, 2))


REASON = "it is trained to denoise blocks, not to predict the next character"
VARIANT = masked(__doc__, mask, allowed, REASON)
