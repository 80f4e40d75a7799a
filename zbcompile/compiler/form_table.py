"""The forms of a pipeline's training steps: found for a batch, or compiled when it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zbcompile.compiler.call import Batch
from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.forms import TrainingForm, form_name, further_form
from zbcompile.compiler.model_guard import refuse_inputs_with_gradients
from zbcompile.compiler.runs import Counted, Run
from zbcompile.compiler.sharing import examples, regrouped, tell, whole_shapes
from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions
from zbcompile.runtime.group import PipelineGroup

__all__ = ["MAX_FORMS", "FormTable"]

MAX_FORMS = 8
"""Forms of training batches that stay compiled beside the first one."""


class FormTable:
    """The forms that are compiled, alike on all ranks; the least recently used one makes room for a new one.

    Parameters
    ----------
    options, group
        Of the pipeline.
    first
        The form of the batch that it was compiled for; it stays.

    Attributes
    ----------
    first
        As given.
    before_compiling
        Called before a form is compiled, on all ranks.
    """

    def __init__(self, options: CompileOptions, group: PipelineGroup | None, first: TrainingForm) -> None:
        self._options, self._group, self.first = options, group, first
        self._forms = {first.name: first}
        self.before_compiling: Callable[[], None] = lambda: None

    @property
    def names(self) -> list[str]:
        """Of all forms, the one that was used last at the end."""
        return list(self._forms)

    def parts(self, batch: Batch, agreed: Mapping[str, object]) -> list[tuple[TrainingForm, Run]]:
        """Cut a batch into runs of microbatches, each with its form. All ranks come here.

        Parameters
        ----------
        batch
            What this process was given of it.
        agreed
            What else must be the same on all ranks, by name.

        Raises
        ------
        ShapeError, UsageError
            The batch cannot be meant, differs from other ranks', or lacks what a stage of this rank takes.
        """
        signature, group, first = self.first.call.signature, self._group, self.first.call
        values = signature.values(batch, partial=group is not None)
        refuse_inputs_with_gradients(signature.names, values)
        runs = signature.runs(values, signature.lengths(values, first.rows))
        if self._options.other_shapes == "refuse" and not all(map(first.fits, runs)):
            k = signature.first_difference(values) or 0
            raise signature.differs(k, values[k])
        if group is None:
            return self._with_forms(runs, [(len(run.pieces), run.rows, run.shapes) for run in runs])
        if group.pipeline_rank == 0 and not runs:
            raise UsageError(
                "rank 0 tells the others the shape of the batch, and was given none of it",
                fix="give rank 0 the inputs of the model",
            )
        names = [next((n for n, f in self._forms.items() if f.call.fits(run)), None) for run in runs]
        told = tell(group, signature, values, names, agreed)
        if None in told:
            wanted = whole_shapes(group, signature, values, runs)
        else:
            calls = [self._forms[name].call for name in told if name is not None]
            wanted = [(call.num_microbatches, call.rows, call.shapes) for call in calls]
        parts = self._with_forms(regrouped(signature, values, runs, wanted), wanted)
        for form, run in parts:
            _check_present(form, run, group.pipeline_rank)
        return parts

    def _with_forms(self, runs: Sequence[Run], wanted: Sequence[Counted]) -> list[tuple[TrainingForm, Run]]:
        """Give every run its form; those that are new are compiled, and the oldest make room for them."""
        parts = []
        for run, (count, _, shapes) in zip(runs, wanted, strict=True):
            name = form_name(count, shapes)
            form = self._forms.pop(name, None)
            if form is None:
                self.before_compiling()
                example = examples(run, shapes, self.first.call.flat_example)
                call = CallForm(self.first.call.signature, example)
                form = further_form(self._options, self._group, [self.first, *self._forms.values()], call)
            self._forms[name] = form
            parts.append((form, run))
        used = {self.first.name, *(form.name for form, _ in parts)}
        oldest = [name for name in self._forms if name not in used]
        for name in oldest[: max(0, len(self._forms) - 1 - MAX_FORMS)]:
            self._forms.pop(name).runner.close()
        return parts

    def keep_common(self, names: Sequence[Sequence[str]]) -> None:
        """Keep the forms that all ranks have, in rank 0's order; ``names`` are those of every rank."""
        kept = [name for name in names[0] if all(name in row for row in names)]
        for name in set(self._forms) - set(kept):
            self._forms.pop(name).runner.close()
        self._forms = {name: self._forms[name] for name in kept}

    def close(self) -> None:
        """Release all runners."""
        for form in self._forms.values():
            form.runner.close()


def _check_present(form: TrainingForm, run: Run, rank: int) -> None:
    """Refuse a run that lacks a tensor which a stage of this process takes."""
    rank_of, names = form.spec.placement.rank_of, form.call.signature.names
    for stage in form.staged.stages:
        for port in stage.inputs if rank_of[stage.index] == rank else ():
            if port.source[0] == "batch" and run.pieces[0][port.source[1]] is None:
                raise UsageError(
                    f"stage {stage.index} runs on this rank and takes a tensor that it was not given",
                    where=f"rank {rank}, {names[port.source[1]]}",
                    fix="give it on this rank; only what no stage of a rank takes can be left out",
                )
