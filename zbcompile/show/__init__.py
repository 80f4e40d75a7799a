"""Timelines, memory and comparisons as a person wants to see them: terminal, SVG, HTML."""
