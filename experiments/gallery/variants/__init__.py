"""The variants, in the order of the page: to add one, write its file and add its name here."""

import importlib

from experiments.gallery.variant import Variant


GROUPS = {
    "Scores": "alibi t5 soft_cap qk_norm cosine distance forgetting",
    "Masks": "prefix_lm sliding_window dilated block_diffusion tree",
    "Normalizers": "off_by_one sigmoid squared_relu sparsemax entmax top_k stick_breaking",
    "Heads and keys": "differential talking_heads latent persistent_memory",
    "Blocks chosen by queries": "moba nsa",
    "Linear attention": "linear retnet gated_linear random_features",
    "Pictures, proteins and graphs": (
        "neighbourhood_1d neighbourhood_2d neighbourhood_3d swin pair_bias graphormer"
    ),
}
NAMES = tuple(name for names in GROUPS.values() for name in names.split())


def load(name: str) -> Variant:
    """Returns the variant of the file `name`."""
    return importlib.import_module(f"experiments.gallery.variants.{name}").VARIANT
