"""What may be asked about the weights of attention, and what the answers are called."""

from typing import Any, NamedTuple

from jaxtyping import Array

from jattn._pytree import pytree_dataclass, static_field
from jattn.spec import Spec


@pytree_dataclass
class Question:
    """What is asked about the weights of a spec: how much of each row lies on the pairs that the
    mask of another spec allows, and how much in weights above a threshold."""

    spec: Spec
    keys: Spec | None = None
    threshold: float | None = static_field(default=None)

    @property
    def transient(self) -> bool:
        """Whether functions of it are, see `spec.compiled`."""
        return self.spec.transient or (self.keys is not None and self.keys.transient)


class Rows(NamedTuple):
    """Of each query, `[B, N, T]`. `place` is −1 where no key is attended. `on_keys` and `above` are
    None where nobody asks for them."""

    entropy: Any
    greatest: Any
    place: Any
    distance: Any
    on_keys: Array | None
    above: Array | None
