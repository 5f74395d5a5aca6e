"""A parameter of a score function, and the axes that decide how kernels sum its gradient."""

from typing import NamedTuple

from jaxtyping import Array

from jattn.spec import Spec, parameter_letters, parameters


class Parameter(NamedTuple):
    """A parameter of the score function.

    which: its index in `parameters(spec)`.
    sizes: its sizes for one head, by axis name.
    separate: the number of batch rows and of heads that have entries of their own.
    """

    which: int
    sizes: dict[str, int]
    separate: tuple[int, int]

    @classmethod
    def of(cls, spec: Spec, which: int) -> "Parameter":
        leaf, letters = parameters(spec)[which], parameter_letters(spec)[which]
        axis_letters = letters.replace("#", "").split() or [str(axis) for axis in range(leaf.ndim)]
        sizes = dict(zip(axis_letters, leaf.shape, strict=True))
        return cls(which, sizes, (sizes.pop("*B", 1), sizes.pop("N", 1)))

    @property
    def looked_up(self) -> bool:
        """Whether a tile may read any of its entries, not only those of its queries or keys."""
        return not set(self.sizes) <= {"T", "S"}

    @property
    def by_distance(self) -> bool:
        """Whether it has an entry for each distance, so that a tile reads one for each diagonal."""
        return "distances" in self.sizes

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a tile's gradient `[t, s]` that kernels do not sum over, at least one."""
        if self.by_distance:
            return 0, 1
        return tuple(axis for axis, x in enumerate("TS") if self.runs_along(x)) or (0,)

    def runs_along(self, letter: str) -> bool:
        """Returns whether the parameter has several entries along T or S."""
        return self.sizes.get(letter, 1) > 1

    def shared(self, B: int, N: int) -> tuple[int, int]:
        """Returns the number of batch rows and of heads of a call that share their entries."""
        batch, heads = self.separate
        return 1 if batch > 1 else B, 1 if heads > 1 else N

    def of_heads(self, sums: Array) -> Array:
        """Returns the gradient for each head, `[B, N, ...]`, from `sums [B, N, T]` over keys or
        `[B, N, S]` over queries."""
        if not any(map(self.runs_along, "TS")):
            sums = sums.sum(axis=2)
        return sums.reshape(*sums.shape[:2], *self.sizes.values())
