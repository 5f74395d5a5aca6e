"""The error for code that cannot be compiled on this machine."""


class Unbuilt(OSError):
    """Raised by a kernel's functions, while they are traced, if the code that they need for a call
    cannot be compiled on this machine."""
