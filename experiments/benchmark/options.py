"""Checks the options of the command line: those that go together, and the device."""

import argparse

import jax

from experiments.runs.ending import UserError, one_line


_CASES, _ENGINES, _GROWING, _GYM = "cases", "engines", "growing", "gym"
# Options that only some modes use: by the name of an option, its modes and the error message.
_MODES = {
    "growing": ((_GROWING,), "--growing does not go with --gym"),
    "cases": ((_CASES, _ENGINES), "--cases goes with neither --growing nor --gym"),
    "which": ((_CASES, _ENGINES, _GROWING), "--pass does not go with --gym"),
    "only": ((_GYM,), "--only goes with --gym"),
    "lengths": ((_GROWING, _GYM), "--lengths goes with --growing or --gym"),
    "dtype": (
        (_ENGINES,),
        "--dtype goes with --peers without a name, and not with --growing or --gym",
    ),
}


def _mode(arguments: argparse.Namespace) -> str:
    if arguments.gym:
        return _GYM
    if arguments.growing:
        return _GROWING
    return _ENGINES if arguments.peers == [] else _CASES


def check_together(arguments: argparse.Namespace) -> None:
    """Checks that each option has an effect on what the others choose to measure.

    Raises:
        UserError: an option has no effect; the message says with which options it goes.
    """
    mode = _mode(arguments)
    for name, (modes, message) in _MODES.items():
        if getattr(arguments, name) and mode not in modes:
            raise UserError(message)


def use_device(name: str | None) -> None:
    """Makes JAX use the devices of this name, "cpu", "gpu" or "tpu"; without a name its own choice.

    Raises:
        UserError: JAX has no such devices.
    """
    if not name:
        return
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(name, name))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion if a backend has no plugin
        reason, _, _ = one_line(error).partition(" (set JAX_PLATFORMS")
        reason = reason or "JAX has no such backend"
        raise UserError(f"--device {name} is not available: {reason}") from error
