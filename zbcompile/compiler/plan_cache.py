"""Plans that were made before, found again by what they were made for.

A plan takes most of a start: stages are measured, and orders are searched up to the time limit. Its file is a
schedule file as any other, named by a hash of the stages' graphs, the options, the number of ranks, the
machine and the versions. A plan is kept when the model has been compiled with it; finding one therefore also
says that these graphs were compared with the model.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings

import torch

from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.variants import chosen_levels
from zbcompile.errors import CheckError, FormatError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.formats.files import read_text, write_text
from zbcompile.options import CompileOptions
from zbcompile.passes.split.recompute import AUTO
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.devices import Device
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["PlanCache"]


class PlanCache:
    """The plans in a folder, for the stages of one pipeline.

    Parameters
    ----------
    options
        With the folder; without one nothing is found or kept.
    num_ranks, call
        Of the pipeline.
    group
        The pipeline's processes and replicas; None for one process.

    Attributes
    ----------
    num_ranks
        As given.
    """

    def __init__(
        self, options: CompileOptions, num_ranks: int, call: CallForm, group: PipelineGroup | None
    ) -> None:
        self._options, self.num_ranks, self._call = options, num_ranks, call
        self._replicas = (1, 1) if group is None else (len(group.replicas), len(group.shards))
        self._found: Solution | None = None
        self._looked = False

    def knows(self, staged: StagedModel) -> bool:
        """Return whether there is a plan for such stages, which were compared with their model then."""
        return self.find(staged) is not None

    @property
    def found(self) -> bool:
        """Whether a plan was found, whose stages were compared with their model when it was made."""
        return self._found is not None

    def find(self, staged: StagedModel) -> Solution | None:
        """Return the plan for such stages; None where there is none, or, with a warning, a broken one."""
        if self._options.cache is None or self._looked:
            return self._found
        self._looked, path = True, self._path(staged)
        if os.path.lexists(path):
            try:
                found = schedule_json.loads(read_text(path), path).solution()
                self._check(found, path)
                self._found = found
            except (FormatError, CheckError, UsageError) as error:
                warnings.warn(f"a plan in the cache is broken, and made anew: {error}", stacklevel=2)
        return self._found

    def keep(self, staged: StagedModel, solution: Solution) -> None:
        """Write the plan that was made for the stages, unless it was found."""
        if self._options.cache is not None and self._found is None:
            os.makedirs(self._options.cache, exist_ok=True)
            write_text(self._path(staged), schedule_json.dumps(solution))

    def _check(self, solution: Solution, path: str) -> None:
        """Refuse a plan for another problem than this one, or whose certificate tells another time."""
        options, made = self._options, solution.problem
        problem = Problem.of(
            made.profile,
            made.placement,
            self._call.num_microbatches,
            options.memory_limit,
            options.objective,
            options.transport,
            accumulate=options.accumulate,
            kept_gradients=options.kept_gradients,
            microbatch_costs=options.costs_of(self._call.num_microbatches),
        )
        sizes = (made.num_stages, made.num_ranks)
        value_ns = checked_times(solution.schedule, made).value_ns
        same = sizes == (options.num_stages, self.num_ranks) and problem == made
        chosen_levels(solution)
        fixed = options.recompute != AUTO and any(solution.variants)
        if not same or fixed or value_ns != solution.certificate.value_ns:
            raise FormatError("the plan is for something else", where=path, fix="remove the file")

    def _path(self, staged: StagedModel) -> str:
        assert self._options.cache is not None
        parts = {
            **self._options.agreed_parts(),
            "graphs": [stage.signature_hash() for stage in staged.stages],
            "call": f"{self._call.signature.names} {self._call.signature.dims} {self._call.shapes}",
            "microbatches": self._call.num_microbatches,
            "ranks": self.num_ranks,
            "replicas and shards": self._replicas,
            "machine": None if isinstance(self._options.profile, Device) else _machine(),
            "versions": (sys.modules["zbcompile"].__version__, torch.__version__, platform.python_version()),
        }
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        return os.path.join(self._options.cache, f"{key[:32]}.plan.json")


def _machine() -> tuple[object, ...]:
    """Return what the times of a stage depend on."""
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        os.cpu_count(),
        torch.get_num_threads(),
        devices,
    )
