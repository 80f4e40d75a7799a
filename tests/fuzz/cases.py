"""Command lines for the fuzzer: commands with their options, sound and unsound, and the files they name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.fuzz import documents
from tests.fuzz.documents import NASTY
from zbcompile.formats.schemas import SCHEMAS

__all__ = ["REDIRECTIONS", "Case", "make_case"]

Make = Callable[[random.Random], str]

REDIRECTIONS = (
    "",
    "",
    ">&-",
    "<&-",
    "2>&-",
    ">&- 2>&-",
    ">/dev/full",
    "2>/dev/full",
    "| true",
    "1</dev/null",
)


@dataclass(frozen=True)
class Case:
    """One run of the command line.

    Attributes
    ----------
    words
        The arguments.
    files
        What stands in the working directory before.
    stdin
        What a pipe would carry.
    environment
        Variables beside the usual ones.
    encoding
        Of standard output.
    redirection
        Of a real process.
    """

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes
    environment: Mapping[str, str]
    encoding: str
    redirection: str


def make_case(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    files: dict[str, bytes] = {}
    stdin = [b""]

    def put(name: str, text: str) -> str:
        """Store a file, or give it to standard input, and return how the command line names it."""
        data = text.encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            stdin[0] = data
            return "-"
        if rng.random() < 0.02:
            return rng.choice(("absent.json", "/", "", "folder", "/dev/null", "a\x1b[2J.json", "x" * 300))
        files[name] = data
        return name

    command, words = rng.choices(_COMMANDS, _WEIGHTS)[0](rng, put)
    line = [command, *words]
    if rng.random() < 0.03:
        line.insert(
            rng.randrange(len(line) + 1), rng.choice((*NASTY, "--", "-h", "--version", "-", "@x", "--no"))
        )
    if rng.random() < 0.02:
        del line[rng.randrange(len(line))]
    return Case(
        tuple(word.replace("\x00", "0") for word in line),
        files,
        stdin[0],
        _environment(rng),
        rng.choice(("utf-8", "utf-8", "utf-8", "ascii", "latin-1")),
        rng.choice(REDIRECTIONS),
    )


def _environment(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.7:
        return {}
    choices = {
        "COLUMNS": ("1", "0", "-5", "40", "200", "1000000000", "9" * 40, "\u00b2", "x"),
        "LINES": ("1", "x", "\u00b2"),
        "TERM": ("dumb", "xterm-256color", "", "nonsense"),
        "FORCE_COLOR": ("1",),
        "NO_COLOR": ("1", ""),
        "COLORTERM": ("truecolor",),
    }
    names = rng.sample(sorted(choices), rng.choice((1, 2)))
    return {name: rng.choice(choices[name]) for name in names}


def _maybe(rng: random.Random, share: float, *words: str) -> list[str]:
    return list(words) if rng.random() < share else []


def _value(rng: random.Random, *sound: str) -> str:
    """Return a value of an option, mostly one that makes sense."""
    return rng.choice(sound) if rng.random() < 0.95 else rng.choice(NASTY)


def _cap(rng: random.Random) -> str:
    return _value(rng, "1p", "1.5p", "2p", "4GiB", "8e9", "none", "1000", "0", "1p,none", "3 parsecs")


def _output(rng: random.Random) -> list[str]:
    """Return ``-o`` with a place that can or cannot be written."""
    places = ("out", "out", "folder/out", "old", "link", "-", "/dev/null")
    wrong = (
        "missing/out",
        "folder",
        "readonly",
        "/dev/full",
        "",
        "folder/",
        "n" * 300,
        "\x1b[2J",
        "/dev/fd/77",
    )
    return _maybe(rng, 0.4, "-o", rng.choice(places if rng.random() < 0.7 else wrong))


def _schedule_words(rng: random.Random, put: Callable[[str, str], str]) -> list[str]:
    text, ending = documents.schedule(rng)
    words = [put(f"s.{ending}" if ending else "s", text)]
    if rng.random() < 0.15:
        words += ["--profile", put("p.json", documents.profile(rng))]
    costs = "--profile" in words or (ending == "json" and rng.random() < 0.8)
    words += _maybe(rng, 0.2 * costs, "--cap", _cap(rng))
    words += _maybe(rng, 0.1 * costs, "--accumulate", _value(rng, "order", "memory"))
    words += _maybe(rng, 0.1 * costs, rng.choice(("--kept-gradients", "--no-kept-gradients")))
    return words + _maybe(rng, 0.15 * costs, "--transport", _value(rng, "async", "rendezvous", "batched"))


def _show(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = _schedule_words(rng, put)
    words += _maybe(rng, 0.3, "--json")
    if rng.random() < 0.15:
        words += ["--measured", put("m.json", documents.measured(rng))]
    times = ("0ns", "1us", "10ms", "30%", "100%", "1.5s", "1e99s", "0%")
    words += _maybe(rng, 0.1, "--from", _value(rng, *times)) + _maybe(rng, 0.1, "--to", _value(rng, *times))
    words += _maybe(rng, 0.2, "--width", _value(rng, "1", "13", "20", "80", "200", "500"))
    words += _maybe(rng, 0.1, rng.choice(("--memory", "--no-memory", "--messages", "--no-messages")))
    words += _maybe(rng, 0.1, "--ranks", _value(rng, "0", "0-1", "all", "1,0", "3-1", "0-99999"))
    words += _maybe(rng, 0.1, "--follow", _value(rng, "0", "1", "2", "-1", "99999999"))
    words += _maybe(rng, 0.1, rng.choice(("--fold", "--no-fold")))
    words += _maybe(rng, 0.05, "--against", words[0])
    for option in ("--svg", "--html"):
        if rng.random() < 0.07:
            words += [
                option,
                rng.choice(("picture", "folder/picture", "missing/picture", "readonly", "-", "")),
            ]
    return "show", words


def _check(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = _schedule_words(rng, put)
    return "check", words + _maybe(rng, 0.25, "--certificate") + _maybe(rng, 0.3, "--json")


_CHANGES = (
    *("memory=+20%", "memory=+1", "memory=+1GiB", "memory=least", "memory=none", "link=2x", "link=0-1:+10us"),
    *("split=all", "split=none", "split=rule", "placement=v", "placement=looped", "placement=0,1,1,0"),
    *(
        "microbatches=+1",
        "microbatches=+1048576",
        "barrier=step",
        "barrier=none",
        "barrier=none:1MiB",
        "memory=+99999%",
        "link=9-9:2x",
        "split=",
        "=",
        "plan.json",
    ),
)


def _explain(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = _schedule_words(rng, put)
    words += _maybe(rng, 0.3, "--json")
    if rng.random() < 0.2:
        words += ["--what-if", _value(rng, *_CHANGES), *_maybe(rng, 0.2, "--what-if")]
        return "explain", [*words, "--time-limit", _value(rng, "0.02", "0.05")]
    if rng.random() < 0.1:
        words += ["--measured", put("m.json", documents.measured(rng))]
    words += _maybe(rng, 0.2, "--rank", _value(rng, "0", "1", "2", "1048576"))
    words += _maybe(rng, 0.2, "--at", _value(rng, "0ns", "1us", "10ms", "30%", "100%"))
    return "explain", words + _maybe(rng, 0.2, "--bubbles", _value(rng, "0", "1", "100"))


def _diff(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    texts = [documents.schedule(rng), documents.schedule(rng)]
    if rng.random() < 0.4:
        texts[1] = texts[0]
    names = [f"{name}.{ending}" if ending else name for name, (_, ending) in zip("st", texts, strict=True)]
    files = [put(name, text) for name, (text, _) in zip(names, texts, strict=True)]
    return "diff", files + _maybe(rng, 0.3, "--json")


def _completion(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    return "completion", _maybe(rng, 0.9, _value(rng, "bash", "zsh", "fish", "tcsh"))


def _convert(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = _schedule_words(rng, put)
    if rng.random() < 0.1:
        words[0] = put("m.json", documents.measured(rng))
    words += ["--to", _value(rng, "schedule", "csv", "csv-compute", "text", "chrome")]
    words += _maybe(rng, 0.3, rng.choice(("--communication", "--no-communication")))
    return "convert", words + _output(rng)


def _short_form(rng: random.Random) -> list[str]:
    """Return costs on the command line."""
    times, sizes = ("3us", "1ms,2ms", "0ns", "18.5 ms", "1"), ("1", "2GiB", "1,.5", "0B", "2G")
    words = [word for name in ("--f", "--b", "--w") for word in (name, _value(rng, *times))]
    words += _maybe(rng, 0.3, "--bw", _value(rng, *times)) + _maybe(rng, 0.3, "--comm", _value(rng, *times))
    for name in ("--activation", "--weight-activation", "--static"):
        words += _maybe(rng, 0.3, name, _value(rng, *sizes))
    return words + _maybe(rng, 0.9, "--ranks", _value(rng, "1", "2", "3"))


def _problem_words(rng: random.Random, put: Callable[[str, str], str]) -> list[str]:
    words = [put("p.json", documents.profile(rng))] if rng.random() < 0.85 else _short_form(rng)
    words += _maybe(rng, 0.3, "--cap", _cap(rng))
    places = ("linear", "auto", "auto", "v", "v:2", "looped:2", "0,1,1,0", "0,1", "0,0,0")
    words += _maybe(rng, 0.25, "--placement", _value(rng, *places))
    words += _maybe(rng, 0.15, "--ranks", _value(rng, "1", "2", "3", "5000"))
    words += _maybe(rng, 0.4, "--microbatches", _value(rng, "1", "2", "3", "4", "5", "6", "12", "1048576"))
    words += _maybe(rng, 0.15, "--microbatch-costs", _value(rng, "1,2", "1,.5,2x3,1", "1", "1,,2", "1e9,1"))
    words += _maybe(rng, 0.15, "--objective", _value(rng, "span", "makespan"))
    words += _maybe(rng, 0.2, "--transport", _value(rng, "async", "rendezvous", "batched"))
    words += _maybe(rng, 0.15, "--accumulate", _value(rng, "order", "memory"))
    words += _maybe(rng, 0.1, rng.choice(("--kept-gradients", "--no-kept-gradients")))
    words += _maybe(rng, 0.2, "--seed", _value(rng, "0", "7", "2147483647"))
    return words


def _plan(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = [*_problem_words(rng, put), "--time-limit", _value(rng, "0.05", "0.1", "0.3", "1e-9")]
    words += _maybe(rng, 0.2, "--fuse", _value(rng, "auto", "never", "always"))
    return "plan", words + _maybe(rng, 0.3, "--quiet") + _output(rng)


def _compare(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    words = [*_problem_words(rng, put), "--time-limit", _value(rng, "0.02", "0.05")]
    return "compare", words + _maybe(rng, 0.4, "--json")


def _schema(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    return "schema", _maybe(rng, 0.9, _value(rng, *SCHEMAS, "nothing"))


def _profile(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    put("model.py", documents.factory(rng))
    names = (
        "model.py:make",
        "model.py:other",
        "model.py",
        "nothing.here:make",
        "absent.py:make",
        "json:loads",
        ":",
    )
    words = [_value(rng, *names), "--stages", _value(rng, "1", "2", "1048576", "0")]
    words += _maybe(rng, 0.5, "--device", _value(rng, "H100", "CPU", "abacus"))
    return "profile", words + _maybe(rng, 0.2, "--microbatches", _value(rng, "4", "0")) + _output(rng)


def _bisect(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    put("model.py", documents.factory(rng))
    names = ("model.py:make", "model.py:other", "absent.py:make", ":")
    words = [_value(rng, *names), "--stages", _value(rng, "1", "2", "1048576", "0")]
    words += [
        _value(rng, "1", "2", "1048576", "0"),
        *_maybe(rng, 0.3, "--backend", _value(rng, "eager", "x")),
    ]
    words += _maybe(rng, 0.3, "--recompute", _value(rng, "none", "full", "some"))
    return "bisect", words + _maybe(rng, 0.3, "--split-points", _value(rng, "1", "a,,b", ","))


def _rehearse(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    """Orders without costs, or broken ones: none of them starts a process."""
    words = [put("s.txt", "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0BW0\nrank 1: 1F0 1BW0\n")]
    words += _maybe(rng, 0.3, "--steps", _value(rng, "1", "0"))
    words += _maybe(rng, 0.3, "--measured", rng.choice(("out", "missing/out", "-", "folder")))
    return "rehearse", words + _maybe(rng, 0.3, "--calibrated", rng.choice(("out", "other", "readonly")))


def _demo(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    wrong = (["--steps", "0"], ["--memory-limit", "much"], ["--memory-limit", ""], ["--help"], ["x"])
    return "demo", rng.choice(wrong)


def _nothing(rng: random.Random, put: Callable[[str, str], str]) -> tuple[str, list[str]]:
    return rng.choice((*NASTY, "--help", "--version", "pla", "help", "--frob")), _maybe(rng, 0.3, "x")


_COMMANDS = (
    *(_show, _check, _convert, _plan, _compare, _schema, _profile, _bisect, _rehearse, _demo, _nothing),
    *(_explain, _diff, _completion),
)
_WEIGHTS = (22, 17, 19, 14, 3, 3, 2, 1, 3, 2, 3, 11, 5, 1)
