"""Draws timelines, memory and comparisons for people: on the terminal, as SVG and as HTML."""
