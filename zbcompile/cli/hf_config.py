"""Costs counted from a Hugging Face configuration: ``--hf-config llama.json --device H100 --ranks 8``.

The options and what is left out of them; `zbcompile.cli.hf_model` builds the model without weights.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zbcompile.cli.shared_options import positive, words
from zbcompile.cli.short_form import dealt
from zbcompile.errors import UsageError
from zbcompile.formats.fields import parse_json
from zbcompile.formats.files import read_text
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.streams import say
from zbcompile.schedule.devices import DEVICES, device_named

if TYPE_CHECKING:
    from zbcompile.cli.hf_model import Asked

__all__ = ["add_config_options", "config_profile", "refuse_without_config"]

_RANKS = 8
"""Ranks where none are asked for: the devices of a node."""

_SEQUENCE = 4096
"""Longest sequence where none is asked for."""

_OF_CONFIG = ("device", "sequence", "microbatch_size", "dtype")
_PIECES_PER_STAGE = 6
_known: dict[Asked, ProfileFile] = {}


def add_config_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options of a configuration.

    Parameters
    ----------
    several
        Whether ``--device`` takes several devices.
    """
    group = parser.add_argument_group(
        "costs counted from a configuration",
        "In place of a profile: the model is built without weights, cut for --ranks (8) and counted, with "
        "AdamW's state. --cap is the device's memory unless given. Needs torch and transformers, no network.",
    )
    group.add_argument("--hf-config", type=words, metavar="FILE", help="config.json of transformers")
    group.add_argument(
        "--device",
        type=words,
        metavar="NAME",
        nargs="+" if several else None,
        help=f"to count for: {', '.join(DEVICES)}",
    )
    group.add_argument(
        "--sequence", type=positive, metavar="S", help=f"tokens of a sequence (at most {_SEQUENCE})"
    )
    group.add_argument("--microbatch-size", type=positive, metavar="B", help="sequences of a microbatch (1)")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations (the configuration's)",
    )


def refuse_without_config(arguments: argparse.Namespace) -> None:
    """Refuse options of a configuration where there is none.

    Raises
    ------
    UsageError
        Names the option.
    """
    for name in _OF_CONFIG if arguments.hf_config is None else ():
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} says nothing without --hf-config", fix=f"leave {option} out")


def config_profile(arguments: argparse.Namespace) -> ProfileFile:
    """Return the counted costs of the stages of a configuration's model, with the device's memory as the cap.

    The same stages are counted once in a process.

    Raises
    ------
    UsageError
        The file is no configuration of a language model that transformers knows, an option does not fit it,
        or a package is missing.
    """
    if arguments.device is None:
        raise UsageError(
            "--device is missing", needed=", ".join(DEVICES), fix="write for instance --device H100"
        )
    device = device_named(arguments.device)
    path = arguments.hf_config
    config = parse_json(read_text(path), path)
    if not isinstance(config, dict):
        raise UsageError("not a configuration: expected an object", where=path)
    pieces = getattr(arguments, "stages", None)
    whole = len(dealt(arguments.ranks or _RANKS, arguments.placement))
    from zbcompile.cli.hf_model import Asked, counted

    asked = Asked(
        path,
        device.name,
        _PIECES_PER_STAGE * pieces if pieces else whole,
        bool(pieces),
        arguments.sequence,
        arguments.microbatch_size or 1,
        arguments.dtype,
        arguments.microbatches,
        getattr(arguments, "recompute", None) == "auto",
    )
    if asked not in _known:
        _known[asked] = counted(asked, config, most_tokens=_SEQUENCE)
        say(_known[asked].profile.source)
    return _known[asked]
