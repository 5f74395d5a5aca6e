"""What a kernel is: a file of `jattn.kernels` with the two functions of `Kernel`."""

from typing import Protocol

from jattn.kernels.common.vjp import AttentionVJP
from jattn.spec import Shapes, Spec


class Kernel(Protocol):
    """One way of computing attention. A module is one if it has these functions."""

    def supports(self, spec: Spec, shapes: Shapes) -> str | None:
        """None, or why it cannot compute this call. Asked while the call is traced.

        It looks at structure and shapes. A kernel that is traced with the program (see
        `registry.Row.when`) also looks at the machine, as nobody asks it later: cuDNN does.
        """
        ...

    def functions(self, platform: str) -> AttentionVJP:
        """Its functions for one of the platforms of its row."""
        ...
