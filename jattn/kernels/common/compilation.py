"""The error for code that cannot be compiled on this machine."""


class CompilationFailed(OSError):
    """The code that a kernel's functions need for a call cannot be compiled on this machine.

    The functions raise this error while they are traced.
    """
