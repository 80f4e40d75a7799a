"""Every command and code block of the documentation runs, or says why it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import LANGUAGES, PageRun, blocks_of
from tests.docs.pages import PAGES, SETUPS
from tests.support.places import EXAMPLES, ROOT

DOCS = ROOT / "docs"
FILES = {
    "equal.json": {"equal.json": DOCS / "pictures" / "equal.json"},
    "plans": {
        "plan.json": EXAMPLES / "four-unequal-stages.schedule.json",
        "other.json": EXAMPLES / "four-unequal-stages.11GiB.schedule.json",
        "measured.json": EXAMPLES / "four-unequal-stages.measured.json",
    },
}
RUN = [page for page, tests in PAGES.items() if "blocks" in tests]
OWN = {"howto/questions.md", "howto/huggingface.md"}
"""Pages whose own tests run their blocks: plain fences with ``$ ``, one model for several blocks."""


@pytest.mark.parametrize("page", RUN)
@pytest.mark.timeout(200)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup = SETUPS.get(page, "")
    for name, source in FILES.get(setup, {}).items():
        shutil.copy(source, tmp_path / name)
    run = PageRun(page, tmp_path, "" if setup in FILES else setup)
    for block in blocks_of(DOCS / page):
        if block.runs or "file" in block.marks:
            run.run(block)


@pytest.mark.parametrize("page", [page for page in PAGES if (DOCS / page).exists()])
def test_a_block_that_does_not_run_says_why(page: str) -> None:
    for block in blocks_of(DOCS / page):
        if page in OWN:
            continue
        assert block.language in LANGUAGES, f"{page}:{block.line}: language {block.language!r}"
        if block.language == "text":
            continue
        reason = block.marks.get("not run", "")
        assert "blocks" in PAGES[page] or reason, f"{page}:{block.line} is not run"
        assert len(reason) > 10 or not reason
