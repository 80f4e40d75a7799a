"""500 inputs of ``make fuzz``; ``python -m tests.fuzz --first SEED --count 1`` runs one of them."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import failures
from tests.fuzz.cases import make_case

EACH = 50


@pytest.mark.parametrize("first", range(0, 500, EACH))
def test_whatever_it_is_given_it_ends_with_a_code_of_the_table(first: int) -> None:
    found = {seed: failures(seed) for seed in range(first, first + EACH)}
    wrong = {seed: [*why, make_case(seed).words] for seed, why in found.items() if why}
    assert not wrong
