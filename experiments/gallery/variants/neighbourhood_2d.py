"""Neighbourhood attention in 2-D.

Each pixel of a picture of √T × √T tokens attends to the 5 × 5 pixels around it. At the edges of the
picture the window is moved inwards, so that all queries have equally many keys.

Hassani, Walton, Li, Li, Shi 2023, Neighborhood Attention Transformer. arXiv:2204.07143
"""

from experiments.gallery import neighbours
from experiments.gallery.variant import masked


VARIANT = masked(
    __doc__,
    lambda T: neighbours.mask((round(T**0.5),) * 2, window=5),
    lambda T: neighbours.allowed((round(T**0.5),) * 2, window=5),
    "pixels attend to later ones",
)
