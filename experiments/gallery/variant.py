"""What a file of the gallery says about one variant of attention."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.walkthrough.formulas import Formula
from jattn.masks import Causal, Mask


Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Language:
    """The needs of a variant to be a causal language model; see `training.VariantAttention`.

    Attributes:
        initial: `initial(N, H)` returns the first values of the inputs that are learned parameters.
        per_token: `per_token(N, H)` returns the shapes, without the axis of tokens, of inputs that
            a layer computes from its own input.
        is_rotary: whether queries and keys are rotated by their positions.
        q_heads: the number of queries and keys of each head.
    """

    initial: Callable[[int, int], Arrays] = lambda N, H: {}
    per_token: Callable[[int, int], dict[str, tuple[int, ...]]] = lambda N, H: {}
    is_rotary: bool = True
    q_heads: int = 1


@dataclasses.dataclass(frozen=True)
class Variant:
    """One variant of attention.

    Attributes:
        text: a title, a description in which indented lines are formulas, and as its last
            paragraph the paper.
        inputs: `inputs(key, T)` draws the arguments of the other functions by name; T is 64, 1,024
            or 4,096. Gradients are computed for all float arrays.
        attention: the variant by `jattn`, whose output is `[*B, T, N, V]`.
        dense: the formula in plain `jax.numpy`, with a matrix of all pairs for each head or, for
            a recurrence, a loop over the tokens.
        language: what it needs to be a causal language model, or why it cannot be one.
        mask: `mask(T)` returns the mask by which jattn skips tiles; None if it skips none.
        weights: computes the weights `[N, T, S]` from the inputs; None: see `drawn_weights`.
    """

    text: str | None
    inputs: Callable[[Array, int], Arrays]
    attention: Callable[..., Array]
    dense: Callable[..., Array]
    language: Language | str
    mask: Callable[[int], Mask] | None = None
    weights: Callable[..., Array] | None = None

    @property
    def title(self) -> str:
        """The first line of the text, without its full stop."""
        return inspect.cleandoc(self.text or "").partition("\n")[0].rstrip(".")

    @property
    def paper(self) -> str:
        """The last paragraph of the text."""
        return " ".join(inspect.cleandoc(self.text or "").rpartition("\n\n")[2].split())

    @property
    def blocks(self) -> list[str | Formula]:
        """The paragraphs and formulas between title and paper."""
        paragraphs = inspect.cleandoc(self.text or "").split("\n\n")[1:-1]
        return [
            Formula(tuple(map(str.strip, x.splitlines())))
            if x.startswith("    ")
            else " ".join(x.split())
            for x in paragraphs
        ]

    def drawn_weights(self, inputs: Mapping[str, Any]) -> Array:
        """Returns the weights `[N, T, S]` for the picture.

        Without `weights`, they are the output for one-hot values, as attention is linear in values:
        if the value of key s is the one-hot vector of s, the output of a query is its weights.
        """
        if self.weights is not None:
            return self.weights(**inputs)
        S, N, _ = inputs["v"].shape
        one_hot = jnp.broadcast_to(jnp.eye(S)[:, None], (S, N, S))
        return jnp.swapaxes(self.attention(**{**inputs, "v": one_hot}), 0, 1)


def causal(T: int) -> Mask:
    """Returns the causal mask, for `Variant.mask`."""
    return Causal()


def masked(
    text: str | None,
    mask: Callable[[int], Mask],
    allowed: Callable[[int], np.ndarray],
    language: Language | str,
) -> Variant:
    """Returns the variant that differs from softmax attention only in its mask.

    `allowed(T)` returns, independently of `mask(T)`, the matrix `[T, T]` of allowed pairs.
    """

    def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
        return jattn.attention(q, k, v, mask=mask(len(q)))

    def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
        return plain.mean(plain.softmax(plain.scores(q, k), allowed(len(q))), v)

    return Variant(text, plain.heads, attention, dense, language, mask)
