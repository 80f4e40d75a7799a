"""What stages do once a step, asleep: the planned times of a profile, without weights or replicas."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from zbcompile.runtime.channels.channel import Key
from zbcompile.runtime.channels.sharded import ShardTicket
from zbcompile.runtime.sleeping import sleep_ns
from zbcompile.schedule.costs import Profile

__all__ = ["SleepingStages"]


class SleepingStages:
    """What stages of a profile do once a step, one after the other beside their rank: each sleeps.

    Parameters
    ----------
    profile
        The stages.
    own
        Numbers of those of this rank.
    rank
        This rank.
    """

    def __init__(self, profile: Profile, own: Collection[int], rank: int) -> None:
        self._costs = {s: profile.stages[s] for s in own if profile.stages[s].has_step_costs}
        self._rank, self._thread = rank, ThreadPoolExecutor(1, "zbcompile rehearsal")

    @property
    def stages(self) -> Collection[int]:
        """Those that cost anything once a step."""
        return self._costs

    def unshard(self, stage: int) -> ShardTicket:
        """Sleep as long as a gather."""
        return self._begin((stage, "unshard"), self._costs[stage].unshard_ns)

    def reduce(self, stage: int, gradients: Mapping[str, Tensor]) -> ShardTicket:
        """Sleep as long as a reduction."""
        return self._begin((stage, ""), self._costs[stage].reduce_ns)

    def reshard(self, stage: int) -> ShardTicket:
        """Do nothing once what was begun before is done."""
        return self._begin((stage, "reshard"), 0)

    def update(self) -> int:
        """Sleep as long as the optimizer's step of all stages; return how long it was, in ns."""
        begin = time.perf_counter_ns()
        sleep_ns(sum(cost.update_ns for cost in self._costs.values()))
        return time.perf_counter_ns() - begin

    def _begin(self, key: Key, duration_ns: int) -> ShardTicket:
        def call() -> dict[str, Tensor]:
            sleep_ns(duration_ns)
            return {}

        return ShardTicket(key, self._rank, call, self._thread)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
