"""JAX's Pallas, imported where it is first used: that takes half as long as importing jattn."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from jax.experimental.pallas import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name: str) -> Any:
        """A public name of Pallas."""
        return getattr(importlib.import_module("jax.experimental.pallas"), name)
