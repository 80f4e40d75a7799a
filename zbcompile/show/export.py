"""Writes pictures as SVG and HTML through rich. They are self-contained: no font or script is fetched."""

from __future__ import annotations

import io
from typing import Literal

from rich.console import Console

from zbcompile.show.timeline import Picture

__all__ = ["ExportFormat", "export"]

ExportFormat = Literal["svg", "html"]

_FONTS = '"Fira Code", "DejaVu Sans Mono", "Cascadia Mono", Menlo, Consolas, monospace'
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-matrix text {{ white-space: pre; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: FONTS; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
""".replace("FONTS", _FONTS)
_HTML = """\
<!DOCTYPE html>
<html>
<head>
<meta charset="UTF-8">
<title>zbcompile show</title>
<style>
{stylesheet}
body {{ color: {foreground}; background-color: {background}; }}
pre {{ font-family: FONTS; line-height: 1.25; }}
</style>
</head>
<body>
<pre><code>{code}</code></pre>
</body>
</html>
""".replace("FONTS", _FONTS)


def export(picture: Picture, form: ExportFormat, width: int) -> str:
    """Return the picture as SVG or HTML, ``width`` columns wide. The same picture gives the same bytes."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    console.print(picture)
    if form == "svg":
        return console.export_svg(title="zbcompile show", code_format=_SVG, unique_id="zbcompile")
    return console.export_html(inline_styles=True, code_format=_HTML)
