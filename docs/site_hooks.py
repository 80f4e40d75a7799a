"""Pages of the repository that lie outside docs/ join the site, and links to files outside docs/ find them.

A page in docs/ links as the repository lies, so that the links also work where the sources are read:
``[RESULTS.md](../benchmarks/RESULTS.md)``. In the site ``benchmarks/RESULTS.md`` is the page ``RESULTS.md``,
and a file of ``examples/`` lies beside the pages as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "benchmarks/RESULTS.md": "RESULTS.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Path in the repository -> path in the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages above and the examples."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in (".py", ".json", ".ipynb"):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that follow the repository into links that follow the site."""
    where = page.file.src_uri
    at = next((source for source, place in PAGES.items() if place == where), f"docs/{where}")

    def in_site(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(at), found[2]))
        if not (ROOT / target).exists():
            return found[0]  # mkdocs warns of it
        place = PAGES.get(target, target.removeprefix("docs/"))
        link = os.path.relpath(place, os.path.dirname(where) or ".")
        return f"{found[1]}{link}{found[3] or ''})"

    return _LINK.sub(in_site, markdown)
