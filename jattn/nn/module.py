"""The base of the modules: a Flax module whose class shows how it is made.

Flax's metaclass answers `inspect.signature`, and so `help`, with `(*args, **kwargs)`.
"""

import inspect
from typing import Any

from flax import nnx


class ConstructorSignature:
    """The `__signature__` of a class: that of its `__init__`.

    `options` is the dataclass whose fields the `__init__` takes as `**options`; they are shown
    one by one, with their defaults.
    """

    def __init__(self, options: type | None = None):
        self.options = options

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # that of an instance is its `__call__`'s
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        _, *shown = inspect.signature(owner.__init__).parameters.values()
        if self.options is not None and shown and shown[-1].kind is inspect.Parameter.VAR_KEYWORD:
            del shown[-1]
            named = {parameter.name for parameter in shown}
            options = inspect.signature(self.options).parameters.values()
            shown += [option for option in options if option.name not in named]
        return inspect.Signature(shown)


class Module(nnx.Module):
    """A Flax module with a signature."""

    __signature__: Any = ConstructorSignature()
