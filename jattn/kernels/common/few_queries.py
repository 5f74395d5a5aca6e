"""What every kernel for a few queries on many keys asks of a call."""

from jattn import tuning
from jattn.spec import Shapes, Spec


def unsupported(spec: Spec, shapes: Shapes) -> str | None:
    """Why none of them takes a call; None if they may."""
    most = tuning.current().few_queries
    if shapes.T > most:
        return f"expected at most {most} queries at a time, got {shapes.T}"
    if spec.dropout_rate:
        return "dropout is for training"
    return None
