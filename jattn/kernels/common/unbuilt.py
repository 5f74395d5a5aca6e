"""The error about what cannot be compiled on this machine."""


class Unbuilt(OSError):
    """What a kernel's functions need for a call cannot be compiled on this machine. They raise it
    while they are traced."""
