"""What a rehearsal makes of the times that a step took."""

from __future__ import annotations

import pytest

from zbcompile.formats.measured_json import Measured
from zbcompile.runtime import rehearse
from zbcompile.schedule.ir import Action, Kind

pytestmark = pytest.mark.timeout(60)


def test_a_rehearsed_rank_begins_and_ends_with_its_own_work_and_not_with_messages() -> None:
    waits, works = Action(Kind.RECV_F, 1, 0, peer=0), Action(Kind.FORWARD, 1, 0)
    sends, reduces = Action(Kind.SEND_B, 1, 0, peer=0), Action(Kind.REDUCE_GRAD, 1, 0)
    row = ((waits, 0, 50), (works, 50, 90), (sends, 90, 200), (reduces, 90, 130))
    step = rehearse._Step(Measured((row,), "rehearsed"), (7,))
    assert step.makespan_ns == 137
    assert step.span_ns == 87
    assert step.measured.makespan_ns == 130
