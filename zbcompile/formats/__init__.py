"""Files: schedules, profiles and measured timelines as JSON, torch's schedule CSV, Chrome traces.

What is read is data from someone else: sizes and counts are bounded before anything is allocated,
unknown fields are refused, and every fault is a `FormatError` that names the place.
"""
