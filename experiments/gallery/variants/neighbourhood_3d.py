"""Neighbourhood attention in 3-D, with stride.

Each pixel of a video, here of 4 square frames, attends to 3 × 3 × 3 pixels of 3 frames. With
stride 2, the 2 × 2 × 2 queries of a cube share the window of one of them, so that tiles of queries
need the same keys.

Hassani, Zhou, Kane et al. 2025, Generalized Neighborhood Attention: Multi-dimensional Sparse
Attention at the Speed of Light. arXiv:2504.16922
"""

from experiments.gallery import neighbours
from experiments.gallery.variant import masked


VARIANT = masked(
    __doc__,
    lambda T: neighbours.mask((4, round((T / 4) ** 0.5), round((T / 4) ** 0.5)), 3, stride=2),
    lambda T: neighbours.allowed((4, round((T / 4) ** 0.5), round((T / 4) ** 0.5)), 3, stride=2),
    "pixels attend to later ones",
)
