"""The error for code that cannot be compiled; `import jattn` loads this file."""


class CompilationFailed(OSError):
    """The code that a kernel's functions need for a call cannot be compiled on this machine.

    The functions raise this error while they are traced.
    """
