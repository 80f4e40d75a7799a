"""Writes pictures as SVG, and as HTML for notebooks. They are self-contained: nothing is fetched."""

from __future__ import annotations

import io

from rich.console import Console

from zbcompile.show.timeline import Picture

__all__ = ["export", "fragment"]

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
_FRAGMENT = (
    '<pre style="font-family: FONTS; line-height: 1.25; color: #c5c8c6; background: #1b1d21; padding: 1em; '
    'overflow-x: auto"><code style="font: inherit; color: inherit; background: none">{code}</code></pre>'
).replace("FONTS", _FONTS.replace('"', "'"))


def export(picture: Picture, width: int) -> str:
    """Return the picture as SVG, ``width`` columns wide. The same picture gives the same bytes."""
    return _drawn(picture, width).export_svg(title="zbcompile show", code_format=_SVG, unique_id="zbcompile")


def fragment(picture: Picture, width: int) -> str:
    """Return the picture as a piece of HTML with its own colours, for notebooks."""
    return _drawn(picture, width).export_html(inline_styles=True, code_format=_FRAGMENT)


def _drawn(picture: Picture, width: int) -> Console:
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
    return console
