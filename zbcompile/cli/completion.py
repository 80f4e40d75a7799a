"""``zbcompile completion``: a script that completes commands, options and choices in a shell.

All of it comes from the parser's own description, so that a new option is completed without a line here.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.formats.streams import write_output

__all__ = ["SHELLS", "add_options", "run", "script"]

SHELLS = ("bash", "zsh", "fish")
_FISH = "complete -c zbcompile"


@dataclass(frozen=True, slots=True)
class _Option:
    """An option: its words, its help, and what may follow it (None: nothing; empty: a word or a file)."""

    words: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class _Command:
    """A command: its options, and the choices of its arguments (empty: files)."""

    name: str
    help: str
    options: tuple[_Option, ...]
    arguments: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "bash: source the script, or put it where bash-completion looks. zsh: save it as _zbcompile in a "
        "folder of fpath. fish: save it as ~/.config/fish/completions/zbcompile.fish."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def run(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    write_output(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the script that completes the command line in a shell."""
    commands = list(_commands())
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands() -> Iterator[_Command]:
    """Yield all commands as the parser describes them."""
    parser = importlib.import_module("zbcompile.cli.main").build_parser()
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, own in action.choices.items():
            options = tuple(_option(a) for a in own._actions if a.option_strings)
            chosen = (tuple(map(str, a.choices or ())) for a in own._actions if not a.option_strings)
            yield _Command(name, helps[name], options, tuple(word for words in chosen for word in words))


def _option(action: argparse.Action) -> _Option:
    values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
    return _Option(tuple(action.option_strings), _plain(action.help or ""), values)


def _plain(text: str) -> str:
    """Return a help text in one line."""
    return " ".join(text.replace("%%", "%").split())


def _zsh_text(text: str) -> str:
    """Return a text for single quotes and brackets of zsh."""
    return text.replace("'", "'\\''").replace("[", "(").replace("]", ")")


def _fish_text(text: str) -> str:
    """Return a text for single quotes of fish."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _bash(commands: Sequence[_Command]) -> str:
    """Return a function for ``complete``; what has no words of its own is completed as a file."""
    lines = [
        "_zbcompile() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{" ".join(c.name for c in commands)} --help --version"',
        "    else",
        '        case "${COMP_WORDS[1]} $before" in',
    ]
    for command in commands:
        chosen: dict[tuple[str, ...], list[str]] = {}
        for option in command.options:
            if option.values is not None:
                chosen.setdefault(option.values, []).extend(f'"{command.name} {w}"' for w in option.words)
        for values, names in chosen.items():
            lines.append(f'            {"|".join(names)}) words="{" ".join(values)}" ;;')
    lines += ["            *)", '                case "${COMP_WORDS[1]}" in']
    for command in commands:
        words = " ".join((*command.arguments, *(word for o in command.options for word in o.words)))
        lines.append(f'                    {command.name}) words="{words}" ;;')
    lines += [
        "                esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _zbcompile zbcompile",
    ]
    return "\n".join(lines) + "\n"


def _zsh(commands: Sequence[_Command]) -> str:
    """Return a function for ``compdef``."""
    lines = ["#compdef zbcompile", "_zbcompile() {", "    local -a commands=("]
    lines += [f"        '{c.name}:{_zsh_text(c.help)}'" for c in commands]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
        '    case "$words[2]" in',
    ]
    for command in commands:
        specs = [
            f"'{word}[{_zsh_text(option.help)}]{_zsh_value(option)}'"
            for option in command.options
            for word in option.words
        ]
        rest = f"'*:argument:({' '.join(command.arguments)})'" if command.arguments else "'*:file:_files'"
        lines.append(f"        {command.name}) shift words; (( CURRENT-- )); _arguments \\")
        lines += [f"            {spec} \\" for spec in specs]
        lines.append(f"            {rest} ;;")
    return "\n".join([*lines, "    esac", "}", '_zbcompile "$@"']) + "\n"


def _zsh_value(option: _Option) -> str:
    if option.values is None:
        return ""
    return f":value:({' '.join(option.values)})" if option.values else ":value:_files"


def _fish(commands: Sequence[_Command]) -> str:
    """Return a ``complete`` line per command and option."""
    lines = []
    for command in commands:
        seen = f"__fish_seen_subcommand_from {command.name}"
        help_text = _fish_text(command.help)
        lines.append(f"{_FISH} -n __fish_use_subcommand -f -a {command.name} -d '{help_text}'")
        if command.arguments:
            lines.append(f"{_FISH} -n '{seen}' -f -a '{' '.join(command.arguments)}'")
        for option in command.options:
            names = " ".join(
                f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in option.words
            )
            value = "" if option.values is None else " -r"
            value += f" -f -a '{' '.join(option.values)}'" if option.values else ""
            lines.append(f"{_FISH} -n '{seen}' {names}{value} -d '{_fish_text(option.help)}'")
    return "\n".join(lines) + "\n"
