"""The base of the modules: a Flax module whose class has a signature.

Flax's metaclass answers `inspect.signature`, and so `help`, with `(*args, **kwargs)`.
"""

import inspect
from typing import Any

from flax import nnx


class ConstructorSignature:
    """A descriptor for `__signature__`: the signature of the class's `__init__`.

    `options` is the dataclass or function whose keyword arguments `__init__` takes as `**options`;
    the signature lists them one by one, with their defaults, except for those in `hidden`.
    """

    def __init__(self, options: Any = None, hidden: tuple[str, ...] = ()):
        self.options, self.hidden = options, hidden

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # an instance has the signature of `__call__`
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        _, *shown = inspect.signature(owner.__init__).parameters.values()
        if self.options is not None and shown and shown[-1].kind is inspect.Parameter.VAR_KEYWORD:
            del shown[-1]
            named = {parameter.name for parameter in shown}.union(self.hidden)
            options = inspect.signature(self.options).parameters.values()
            shown += [x for x in options if x.kind is x.KEYWORD_ONLY and x.name not in named]
        return inspect.Signature(shown)


class Module(nnx.Module):
    """A Flax module with a signature."""

    __signature__: Any = ConstructorSignature()
