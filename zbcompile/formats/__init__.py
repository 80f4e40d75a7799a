"""Reads and writes files: schedules, profiles, measured timelines, torch's schedule CSV, Chrome traces.

The readers treat a file as data from someone else: they bound sizes and counts before they allocate anything,
refuse unknown fields, and raise a `FormatError` that names the place of the fault.
"""
