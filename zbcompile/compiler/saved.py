"""Checkpoints on disk: all ranks write one folder, which is there as a whole or not at all.

The tensors stand in the format of ``torch.distributed.checkpoint``, under the names that the unpipelined
model and its optimizer give them: ``model.NAME``, ``optim.state.NAME.exp_avg``,
``optim.param_groups.NAME.lr``. The plan and the step's number stand beside them as JSON
(`formats.checkpoint_json`).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_entries
from torch.optim import Optimizer

from zbcompile.compiler.checkpoint import check_model, load_model, optimizer_parts, optimizer_state
from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.job import check_optimizers
from zbcompile.compiler.part_entries import PartPlanner, SavedPart, saved_parts
from zbcompile.compiler.parts import Part, Parts
from zbcompile.compiler.sampled import sampled_bytes
from zbcompile.compiler.sharding import local, split_like
from zbcompile.errors import PipelineError, UsageError
from zbcompile.formats import checkpoint_json, folders, schedule_json
from zbcompile.formats.checkpoint_json import PLAN_FILE, TRAINING_FILE, CheckpointFile
from zbcompile.formats.files import read_text, write_text
from zbcompile.formats.streams import reason
from zbcompile.runtime.checkpoint_reader import INDEX_FILE, CheckpointReader, is_data_file
from zbcompile.runtime.group import PipelineGroup

__all__ = ["Own", "checked", "load", "on_first", "save"]

MODEL, OPTIMIZER = "model.", "optim."
_SLOWEST_BYTES_PER_S = 10e6


@dataclass(frozen=True)
class Own:
    """What this process saves and loads.

    Attributes
    ----------
    tensors
        The model's tensors of this process, by name.
    trained
        What owns all parameters.
    parameters
        Names of the parameters that this process trains.
    parts
        Which tensors are parts of larger ones.
    """

    tensors: Mapping[str, Tensor]
    trained: nn.Module
    parameters: Collection[str]
    parts: Parts


def save(
    compiled: CompiledPipeline,
    own: Callable[[], Own],
    path: str | os.PathLike[str],
    optimizer: Optimizer | None,
    extra: object,
) -> None:
    """Write a checkpoint; all ranks come here.

    Parameters
    ----------
    compiled
        The pipeline.
    own
        Returns what this process saves, or raises.
    path, optimizer, extra
        As `Pipeline.save` gets them.
    """
    target, group = os.path.realpath(path), compiled.group
    with compiled.runner.call("save()") as call:
        with call.checks():
            compiled.refuse_unreduced("save()")
            if group is not None:
                check_optimizers(group, optimizer is not None, "save()")
            mine = checked(own(), compiled, "save()")
            state = _state(mine, optimizer) if group is None or group.writes else {}
            record = CheckpointFile(compiled.step_number, compiled.options.seed, extra)
            texts = {
                TRAINING_FILE: checkpoint_json.dumps(record),
                PLAN_FILE: schedule_json.dumps(compiled.plan.solution),
            }
            if group is None or group.rank == 0:
                folders.begin(target, _belongs)
            odd = _odd(mine, optimizer)
            extra_s = _extra_s(group, target, texts, state, mine.parts, odd)
        _write(group, folders.partial(target), state, extra_s)
        on_first(group, lambda: _finish(target, texts), target, extra_s)


def load(
    compiled: CompiledPipeline,
    own: Callable[[], Own],
    path: str | os.PathLike[str],
    optimizer: Optimizer | None,
) -> object:
    """Read a checkpoint into model, optimizer and step number: all of it, or nothing; all ranks come here.

    Parameters as in `save`.

    Returns
    -------
    object
        What was given as ``extra``.
    """
    folder, group = folders.present(os.path.realpath(path)), compiled.group
    with compiled.runner.call("load()") as call:
        with call.checks():
            compiled.refuse_unreduced("load()")
            if group is not None:
                check_optimizers(group, optimizer is not None, "load()")
            mine, record = checked(own(), compiled, "load()"), _record(folder)
            if record is not None:
                _check_seed(compiled, record)
            reader = CheckpointReader(folder)
            found, state = _read(reader, mine, optimizer is not None)
            check_model(mine.tensors, found, mine.parts)
            found = {name: mine.parts.cut(name, value) for name, value in found.items()}
            state = _split(state, mine)
            parts: dict[str, Any] = {}
            if optimizer is not None:
                parts = optimizer_parts(mine.trained, mine.parameters, optimizer, state)
            if group is not None:
                group.agree({"checkpoint": f"{reader.digest} {record}"})

        def take_effect() -> None:
            load_model(mine.tensors, found)
            if optimizer is not None:
                optimizer.load_state_dict(parts)
            if record is not None:
                compiled.step_number = record.step_number

        call.finish(take_effect)
    return None if record is None else record.extra


def checked(own: Own, compiled: CompiledPipeline, what: str) -> Own:
    """Return the same, unless nobody can tell parts from copies in this job of several pipelines."""
    group = compiled.group
    if group is not None and group.others:
        own.parts.require(what)
    return own


def _state(own: Own, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the entries of this process's part: copies are in those of the first that holds them."""
    state: dict[str, Any] = {MODEL + name: tensor.detach() for name, tensor in own.tensors.items()}
    cut = {MODEL + name: part for name, part in own.parts.of.items() if name in own.tensors}
    if optimizer is not None:
        found = optimizer_state(own.trained, own.parameters, optimizer)
        state |= {OPTIMIZER + key: value for key, value in found.items()}
        cut |= {OPTIMIZER + key: part for key, part, _ in _of_parts(own, found) if part is not None}
    kept = state if own.parts.is_first else {key: state[key] for key in cut}
    return saved_parts(kept, cut)


def _of_parts(own: Own, entries: Mapping[str, Any]) -> Iterator[tuple[str, Part | None, Tensor]]:
    """Yield an optimizer's tensors for parameters that are parts, and the part where they are parts, too."""
    for key, value in entries.items():
        kind, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        if kind == "state" and name in own.parts.of and isinstance(value, Tensor):
            yield key, own.parts.of[name] if value.shape == own.tensors[name].shape else None, value


def _odd(own: Own, optimizer: Optimizer | None) -> dict[str, str]:
    """Return hashes of what an optimizer has for parts in another shape, which all parts must share."""
    if optimizer is None or not own.parts.of:
        return {}
    entries = optimizer_state(own.trained, own.parameters, optimizer)
    return {
        key: hashlib.sha256(sampled_bytes(local(value))).hexdigest()[:16]
        for key, part, value in _of_parts(own, entries)
        if part is None
    }


def _extra_s(
    group: PipelineGroup | None,
    target: str,
    texts: Mapping[str, str],
    state: Mapping[str, Any],
    parts: Parts,
    odd: Mapping[str, str],
) -> float:
    """Compare what the ranks save; return the seconds that the largest part may take on a slow disk."""
    if group is None:
        return 0.0
    digest = hashlib.sha256(json.dumps([target, texts]).encode()).hexdigest()
    size = sum(value.nbytes for value in state.values() if isinstance(value, Tensor | SavedPart))
    mine = json.dumps([digest, size, parts.peers, odd])
    told = [json.loads(text) for text in group.gather(mine, "save()")]
    for rank, (theirs, _, peers, hashes) in enumerate(told):
        if theirs != told[0][0]:
            raise group.calls.common(
                PipelineError(
                    f"the ranks differ in what they save: rank {rank} from rank 0",
                    fix="call save() on every rank with the same path and extra, at the same step",
                )
            )
        for first in (ranks[0] for ranks in peers):
            key = next((key for key in hashes if told[first][3].get(key) != hashes[key]), None)
            if key is not None:
                raise group.calls.common(
                    PipelineError(
                        "the optimizer's state of a shard is neither a part of the whole parameter's nor the "
                        f"same on all shards: rank {rank} differs from rank {first}",
                        where=key,
                        fix="save without the optimizer, or use one with a state per entry, such as AdamW",
                    )
                )
    return float(max(size for _, size, _, _ in told)) / _SLOWEST_BYTES_PER_S


class _Writer(FileSystemWriter):
    """DCP's writer without the names of this run, so that the same state gives the same bytes."""

    def storage_meta(self) -> StorageMeta | None:
        return None


def _write(group: PipelineGroup | None, folder: str, state: Mapping[str, Any], extra_s: float) -> None:
    def write() -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that one process saves alone
                save_entries(
                    dict(state),
                    storage_writer=_Writer(folder),
                    planner=PartPlanner(flatten_state_dict=False),
                    process_group=None if group is None else group.control,
                    no_dist=group is None,
                )
        except CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            return f"rank {rank}: {reason(first) if isinstance(first, OSError) else first}"
        return ""

    failure = write() if group is None else group.alone(write, "saves its part", extra_s)
    if failure:
        _raise(group, failure, folder)


def _finish(target: str, texts: Mapping[str, str]) -> None:
    """Check on rank 0 that the parts of all ranks are there, and put them into their place."""
    folder = folders.partial(target)
    CheckpointReader(folder)
    for name, text in texts.items():
        write_text(os.path.join(folder, name), text)
    folders.finish(target)


def on_first(
    group: PipelineGroup | None, action: Callable[[], None], where: str, extra_s: float = 0.0
) -> None:
    """Finish saving on rank 0 while the others wait; what goes wrong is raised on all ranks."""
    failure = ""
    if group is None or group.rank == 0:
        try:
            action()
        except OSError as error:
            failure = reason(error)
        except UsageError as error:
            failure = str(error)
    if group is not None:
        failure = group.from_first(failure, "the end of saving", extra_s)
    if failure:
        _raise(group, failure, where)


def _raise(group: PipelineGroup | None, failure: str, where: str) -> None:
    error = PipelineError(
        f"cannot save: {failure}",
        where=where,
        fix="nothing was replaced: make room, or give another place that all ranks can write, and save again",
    )
    raise error if group is None else group.calls.common(error)


def _belongs(name: str) -> bool:
    """Return whether a file of a folder is one of a checkpoint."""
    return name in (INDEX_FILE, TRAINING_FILE, PLAN_FILE) or is_data_file(name)


def _record(folder: str) -> CheckpointFile | None:
    """Return what was saved beside the tensors; None for a checkpoint of the unpipelined model."""
    path = os.path.join(folder, TRAINING_FILE)
    return checkpoint_json.loads(read_text(path), path) if os.path.lexists(path) else None


def _check_seed(compiled: CompiledPipeline, record: CheckpointFile) -> None:
    if record.seed != compiled.options.seed and compiled.spec.random_stages:
        raise UsageError(
            "the checkpoint was trained with another seed, which gives other dropout masks",
            needed=f"seed={record.seed}",
            given=f"seed={compiled.options.seed}",
            fix="compile with the seed of the checkpoint, or load it with load_state_dict()",
        )


def _read(
    reader: CheckpointReader, own: Own, with_optimizer: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the model's tensors and the optimizer's entries of this process.

    Names may lack their prefix, as those of a model's state dict that was saved by itself.
    """
    model = _prefix(MODEL, own.tensors.keys(), reader)
    wanted = {model + name for name in own.tensors} & reader.names
    optimizer = OPTIMIZER if any(name.startswith(OPTIMIZER) for name in reader.names) else ""
    entries: set[str] = set()
    if with_optimizer:
        listed = f"{optimizer}param_groups."
        if not any(name.startswith(listed) for name in reader.names):
            raise UsageError("the checkpoint holds no optimizer", where=reader.folder, fix="load it without")
        mine = tuple(
            f"{optimizer}{kind}.{name}." for name in own.parameters for kind in ("state", "param_groups")
        )
        entries = {name for name in reader.names if name.startswith(mine)}
    found = reader.read(wanted | entries)
    tensors = {name.removeprefix(model): found[name] for name in wanted}
    return tensors, {name.removeprefix(optimizer): found[name] for name in entries}


def _split(entries: Mapping[str, Any], own: Own) -> dict[str, Any]:
    """Return an optimizer's entries; of parameters that are parts or shared by replicas what is kept here."""
    found = dict(entries)
    for key, value in entries.items():
        kind, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        if kind != "state" or name not in own.parameters or not isinstance(value, Tensor):
            continue
        if list(value.shape) == own.parts.whole_shape(name, own.tensors[name]):
            found[key] = split_like(own.parts.cut(name, value), own.tensors[name])
    return found


def _prefix(prefix: str, names: Collection[str], reader: CheckpointReader) -> str:
    """Return the prefix, or none where the names stand in the checkpoint without it."""
    bare = all(name in reader.names for name in names)
    return "" if bare and not all(prefix + name in reader.names for name in names) else prefix
