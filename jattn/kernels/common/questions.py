"""Questions about the weights of attention, and their answers."""

from typing import Any, NamedTuple

from jaxtyping import Array

from jattn._pytree import pytree_dataclass, static_field
from jattn.spec import Spec


@pytree_dataclass
class Question:
    """A question about the weights of a spec: the sum of each row over the pairs that the mask of
    the spec `keys` allows, and over the weights above a threshold."""

    spec: Spec
    keys: Spec | None = None
    threshold: float | None = static_field(default=None)


class QueryStatistics(NamedTuple):
    """The answers for each query, `[B, N, T]`.

    `place` is −1 if no key is attended. `on_keys` and `above` are None if not requested.
    """

    entropy: Any
    greatest: Any
    place: Any
    distance: Any
    on_keys: Array | None
    above: Array | None
