"""A process that trains does not grow: the benchmark in a short form."""

from __future__ import annotations

import pytest

from benchmarks.growth import grown
from tests.support.clean_process import in_clean_process
from zbcompile.runtime.launch import spawn

EARLY, LATE = 20, 90


@pytest.mark.timeout(120)
def test_neither_tensors_nor_threads_nor_descriptors_nor_keys_of_the_store_grow() -> None:
    records = [in_clean_process(grown, 0, EARLY, LATE), *spawn(grown, 2, (EARLY, LATE), timeout_s=100)]
    keys = [(before.pop("store keys"), after.pop("store keys")) for before, after in records[1:]]
    assert all(abs(after - before) < 10 for before, after in keys), keys  # those of the last calls are there
    for before, after in records:
        for counts in (before, after):
            del counts["resident KiB"]  # the allocator's, not ours
        more = {name: (before[name], count) for name, count in after.items() if count > before[name]}
        assert not more
