"""The site: every page is in the navigation and has a test, and its words are those of the code."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import zbcompile
from tests.docs.blocks import blocks_of
from tests.docs.pages import PAGES
from tests.support.places import ROOT
from zbcompile import errors
from zbcompile.cli.main import COMMANDS, main
from zbcompile.formats.schemas import SCHEMAS, schema_text
from zbcompile.planner.portfolio import PORTFOLIO
from zbcompile.schedule.ir import PLACEMENTS
from zbcompile.schedule.semantics import SEND_MODES

DOCS = ROOT / "docs"
OUTSIDE = {
    "RESULTS.md": ROOT / "benchmarks" / "RESULTS.md",
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    "CHANGELOG.md": ROOT / "CHANGELOG.md",
}
SOURCES = {page: OUTSIDE.get(page, DOCS / page) for page in PAGES}


def page(name: str) -> str:
    return SOURCES[name].read_text()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation_and_in_the_list_of_tests() -> None:
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(OUTSIDE)
    navigation = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(navigation) == len(set(navigation))
    assert set(navigation) == written == set(PAGES)


def test_every_test_of_a_page_exists() -> None:
    for name, tests in PAGES.items():
        assert tests, name
        for test in tests:
            if test == "blocks":
                assert any(block.runs for block in blocks_of(SOURCES[name])), name
                continue
            file, _, function = test.partition("::")
            text = (Path(__file__).parent / file).resolve().read_text()
            assert not function or f"def {function}(" in text, (name, test)


def test_links_lead_somewhere() -> None:
    for name, source in (*SOURCES.items(), ("README.md", ROOT / "README.md")):
        text = re.sub(r"^```.*?^```", "", source.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            there = (source.parent / path).resolve() if path else source
            assert there.exists(), (name, target)
            assert not anchor or anchor in anchors(there.read_text()), (name, target)


def test_files_that_pages_name_exist() -> None:
    roots = (ROOT, ROOT / "zbcompile", ROOT / "zbcompile" / "planner", ROOT / "tests")
    for name in PAGES:
        if name in ("CHANGELOG.md", "RESULTS.md"):
            continue
        for path in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|json|sh))`", page(name)):
            assert any((root / path).exists() for root in roots), (name, path)


def test_messages_and_docstrings_name_pages_that_exist() -> None:
    for folder in ("zbcompile", "passes", "examples", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for named in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
                assert (ROOT / named).exists(), (path, named)


def test_every_public_name_has_its_reference() -> None:
    described = re.findall(r"^::: ([\w.]+)", page("reference/api.md"), re.M)
    names = {entry.rpartition(".")[2] for entry in described}
    assert set(zbcompile.__all__) <= names
    assert "zbcompile.errors" in described
    for entry in described:
        module, _, name = entry.rpartition(".")
        file = ROOT / f"{entry.replace('.', '/')}.py"
        if file.exists():
            continue
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        kinds = (ast.ClassDef, ast.FunctionDef)
        (node,) = [n for n in tree.body if isinstance(n, kinds) and n.name == name]
        assert ast.get_docstring(node), entry
    assert all(getattr(errors, name).__doc__ for name in errors.__all__)


def test_every_command_has_a_section_with_its_example() -> None:
    text = page("reference/cli.md")
    for command in COMMANDS:
        section = text.partition(f"\n## {command.name}\n")[2].partition("\n## ")[0]
        assert f"\nzbcompile {command.name} " in section or f"\nzbcompile {command.name}\n" in section
        assert f"](#{command.name})" in text


def test_exit_codes_are_the_errors_own() -> None:
    codes = {getattr(errors, name).exit_code for name in errors.__all__ if name.endswith("Error")}
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", page("reference/cli.md"), re.M)}
    assert codes <= table
    assert table == {0, 1, 2, 3, 130}


def test_every_send_mode_is_defined() -> None:
    assert {mode.name for mode in SEND_MODES} <= set(
        re.findall(r"^\| `(\w+)` \|", page("reference/send-modes.md"), re.M)
    )


def test_placements_are_those_of_the_code() -> None:
    said = set(re.findall(r"^\| `(\w+)", page("concepts/placements.md"), re.M))
    assert set(PLACEMENTS) <= said


def test_every_part_and_method_of_the_planner_is_described() -> None:
    search, proofs = page("planner/search.md"), page("planner/proofs.md")
    for part in PORTFOLIO:
        assert f"`{part.name}`" in search, part.name
    proved = set(re.findall(r"`(\w+)`", proofs.partition("## All bounds")[2]))
    source = "".join(path.read_text() for path in (ROOT / "zbcompile/planner/bounds").glob("*.py"))
    assert set(re.findall(r'method="(\w+)"', source)) <= proved


def names_in(value: object) -> set[str]:
    if isinstance(value, dict):
        own = set(value.get("properties", {}))
        return own.union(*(names_in(part) for part in value.values()))
    return set().union(*(names_in(part) for part in value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_every_field_of_a_format_is_described(name: str) -> None:
    said = set(re.findall(r"`\.?(\w+)(?:\[\])?`", page("reference/files.md")))
    fields = names_in(json.loads(schema_text(name))) - {"format", "version"}
    assert not fields - said


def test_words_are_in_order_and_said_once() -> None:
    words = re.findall(r"^\| ([^|]+?) \|", page("concepts/words.md"), re.M)[2:]
    plain = [word.lower().replace("_", "") for word in words if not word[0].isdigit()]
    assert len(words) > 30
    assert plain == sorted(set(plain))


def test_names_of_torch_exist() -> None:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import microbatch, schedules

    text = page("coming-from/torch.md")
    names = set(
        re.findall(r"`(Schedule\w+|PipelineStage|SplitPoint|get_schedule_class|TensorChunkSpec)\b", text)
    )
    assert len(names) >= 9
    for name in names:
        assert any(hasattr(module, name) for module in (pipelining, schedules, microbatch)), name
    assert hasattr(schedules._PipelineScheduleRuntime, "_load_csv")


@pytest.mark.parametrize("name", ["torch", "torchtitan", "megatron", "deepspeed"])
def test_our_arguments_in_the_tables_exist(name: str) -> None:
    known = set(inspect.signature(zbcompile.compile).parameters)
    ours = [row.split(" | ")[1] for row in re.findall(r"^\| .+", page(f"coming-from/{name}.md"), re.M)]
    for cell in ours:
        for argument in re.findall(r"`(\w+)=", cell):
            assert argument in known, (name, argument)
    for attribute in re.findall(r"`pipeline\.(\w+)", page(f"coming-from/{name}.md")):
        assert hasattr(zbcompile.Pipeline, attribute), attribute


def test_what_the_watchdog_says_is_in_the_code() -> None:
    text = page("howto/hang.md")
    code = "".join(path.read_text() for path in (ROOT / "zbcompile" / "runtime").glob("*.py"))
    for words in (
        "is in no action that it knows of",
        "a circle, closed by rank",
        "stalled: rank",
        "its connection closed",
    ):
        assert words in text
        assert words in code


def test_every_example_is_on_its_page() -> None:
    text = page("examples.md")
    scripts = {path.name for path in (ROOT / "examples").glob("*") if path.suffix in (".py", ".ipynb")}
    assert scripts == {
        name for name, target in re.findall(r"\[([\w.]+)\]\((\S+)\)", text) if "examples" in target
    }
    used = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in scripts:
        stem = name.partition(".")[0]
        assert re.search(rf"examples[./]{stem}\b|load_example\(\"{stem}\"\)|\b{stem}\b", used), name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page(name), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), (name, target)


def test_pictures_are_what_the_tool_draws(tmp_path: Path) -> None:
    for name, fuse in (("fused", "always"), ("split", "auto")):
        plan, picture = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
        costs = str(DOCS / "pictures" / "equal.json")
        assert main(["plan", costs, "--cap", "1p", "--fuse", fuse, "--quiet", "-o", str(plan)]) == 0
        assert main(["show", str(plan), "--width", "90", "--svg", str(picture)]) == 0
        assert picture.read_bytes() == (DOCS / "pictures" / f"{name}.svg").read_bytes()
