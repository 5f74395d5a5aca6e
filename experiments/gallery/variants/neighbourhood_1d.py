"""Neighbourhood attention in 1-D, with stride and dilation.

Along a sequence, each token attends to the 16 nearest tokens at even distances (dilation 2). Four
such queries in a row share the keys of their middle one (stride 4). At both ends the window is
moved inwards, so that there is no padding.

Hassani, Zhou, Kane et al. 2025, Generalized Neighborhood Attention: Multi-dimensional Sparse
Attention at the Speed of Light. arXiv:2504.16922
"""

from experiments.gallery import neighbours
from experiments.gallery.variant import masked


VARIANT = masked(
    __doc__,
    lambda T: neighbours.mask((T,), window=16, stride=4, dilation=2),
    lambda T: neighbours.allowed((T,), window=16, stride=4, dilation=2),
    "tokens attend to later ones",
)
