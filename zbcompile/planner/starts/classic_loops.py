"""The orders of the literature for several stages per rank.

Looped placement: interleaved 1F1B (arXiv 2104.04473, section 2.2) and its zero-bubble form, as
torch.distributed.pipelining runs them. V placement, two stages per rank: ZB-V as torch runs it
(arXiv 2401.10241, section 6), V-Half and V-Min (arXiv 2405.15362), DualPipeV.
"""

from __future__ import annotations

from collections.abc import Callable

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.planner.starts.offset_keys import OffsetKeys, block_order

__all__ = ["dual_pipe_v", "interleaved", "v_half", "v_min", "zb_v"]

Row = list[tuple[int, int]]


def interleaved(p: int, v: int, m: int, *, zero_bubble: bool) -> Codes | None:
    """Return interleaved 1F1B: rounds of about p microbatches through a rank's stages in turn, then 1F1B.

    Parameters
    ----------
    p, v, m
        Ranks, stages per rank, microbatches.
    zero_bubble
        Whether backwards are split: one instead of two more warm-up F's per rank up the line, and W's that
        trail their B's by the rank's number.

    Returns
    -------
    Codes or None
        ``None`` if the microbatches do not divide into rounds.
    """
    rounds = max(1, m // p)
    if m % rounds:
        return None
    share = m // rounds
    rows = []
    for rank in range(p):
        warm_up = min((v - 1) * share + (1 if zero_bubble else 2) * (p - 1 - rank), m * v)
        forwards = [(k // share % v) * p + rank for k in range(m * v)]
        backwards = [(v - 1 - k // share % v) * p + rank for k in range(m * v)]
        row: Row = [(F, s) for s in forwards[:warm_up]]
        weights = 0
        for k, s in enumerate(backwards):
            row.extend((F, x) for x in forwards[warm_up + k : warm_up + k + 1])
            row.append((B if zero_bubble else BW, s))
            if zero_bubble and k >= rank:
                row.append((W, backwards[weights]))
                weights += 1
        if zero_bubble:
            row.extend((W, s) for s in backwards[weights:])
        rows.append(row)
    return rows


def zb_v(p: int, m: int) -> Codes:
    """Return ZB-V for equal times: every W follows its B until the cool-down, p * M_B held at most.

    With fewer than 2 p - 1 microbatches it is the order for so many, without those that there are not.
    """
    return [_zb_v_rank(p, rank, m) for rank in range(p)]


def _zb_v_rank(p: int, rank: int, m: int) -> Row:
    down, up = rank, 2 * p - 1 - rank
    count, warm = max(2 * p - 1, m), 2 * (p - rank) - 1
    steady = max(0, count - warm - rank)  # rounds with an F of the lower stage
    drain = max(0, max(count, warm + rank) - p - steady)
    parts: list[tuple[int, Row]] = [
        (warm, [(F, down)]),
        (rank, [(F, up), (F, down)]),
        (p - rank, [(F, up), (B, up), (W, up)]),
        (steady, [(F, down), (B, down), (W, down), (F, up), (B, up), (W, up)]),
        (drain, [(B, down), (W, down), (F, up), (B, up), (W, up)]),
        (rank, [(B, down), (B, up)]),
        (p - rank, [(B, down), (W, down)]),
        (m, [(W, up)]),
        (m, [(W, down)]),
    ]
    row: Row = []
    left = {(kind, s): m for kind in (F, B, W) for s in (down, up)}
    for times, part in parts:
        for _ in range(min(times, max(left[code] for code in part))):
            for code in part:
                if left[code]:
                    left[code] -= 1
                    row.append(code)
    return row


def v_half(instance: Instance) -> Codes:
    """Return V-Half's building block repeated: about half of 1F1B's memory."""
    middle = 4 if instance.num_ranks % 2 == 0 else 1
    return block_order(instance, OffsetKeys((2, 1), (2, 1), (1, middle, 2)))


def v_min(instance: Instance) -> Codes:
    """Return V-Min's building block repeated: about a third of 1F1B's memory."""
    middle = 3 if instance.num_ranks % 3 == 0 else 1
    return block_order(instance, OffsetKeys((1, 1), (1, 1), (1, middle, 1)))


def dual_pipe_v(p: int, m: int) -> Codes | None:
    """Return DualPipeV in its eight steps, the overlapped pairs one after the other.

    ``None`` if there are fewer than 2 p microbatches.
    """
    if m < 2 * p:
        return None
    return [_dual_pipe_v_rank(p, rank, m) for rank in range(p)]


def _dual_pipe_v_rank(p: int, rank: int, m: int) -> Row:
    down, up = rank, 2 * p - 1 - rank
    row: Row = [(F, down)] * (2 * (p - rank - 1))
    row += [(F, down), (F, up)] * (rank + 1)
    row += [(B, up), (W, up), (F, up)] * (p - rank - 1)
    row += [(F, down), (BW, up), (F, up), (BW, down)] * (m - 2 * p + rank + 1)
    row += [(BW, up), (F, up), (BW, down)] * (p - rank - 1)
    waiting: Row = []

    def backward(stage: int, split: bool) -> None:
        row.append((B if split else BW, stage))
        if split:
            waiting.append((W, stage))

    split, first = False, (rank + 1) // 2
    for k in range(rank + 1):
        split = split or (k == first and rank % 2 == 1)
        backward(up, split)
        split = split or (k == first and rank % 2 == 0)
        backward(down, split)
    for _ in range(p - rank - 1):
        if waiting:
            row.append(waiting.pop(0))
        backward(down, split)
    return row + waiting


V_ORDERS: tuple[tuple[str, Callable[[Instance], Codes | None]], ...] = (
    ("ZB-V", lambda instance: zb_v(instance.num_ranks, instance.num_microbatches)),
    ("V-Half", v_half),
    ("V-Min", v_min),
    ("DualPipeV", lambda instance: dual_pipe_v(instance.num_ranks, instance.num_microbatches)),
)
