"""Jobs of several pipelines: where each process stands, and what replicas must have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from zbcompile.compiler.sampled import sampled_bytes
from zbcompile.errors import PipelineError, UsageError
from zbcompile.options import CompileOptions
from zbcompile.runtime.calls import DistributedCall
from zbcompile.runtime.grid import Place, place_in_mesh, place_of_groups
from zbcompile.runtime.group import PipelineGroup

__all__ = [
    "check_frozen",
    "check_optimizers",
    "check_places",
    "check_replicas",
    "place_of",
    "require_members",
]


def place_of(options: CompileOptions, around: DistributedCall | None) -> Place | None:
    """Return where this process stands in the job that was asked for; None for a single pipeline.

    ``around`` is the build of the ranks that run one plan, if this is a part of one.

    Raises
    ------
    UsageError
        The mesh cannot be meant.
    PipelineError
        A replica does not come.
    """
    if options.mesh is not None:
        return place_in_mesh(options.mesh)
    if options.data_group is None or options.group is None:
        return None
    replicas = PipelineGroup.present(options.data_group, options.stall_limit_s)
    own = place_of_groups([], options.group, options.data_group)
    if replicas is None:
        return place_of_groups([own.pipeline], options.group, options.data_group)
    try:
        with replicas.calls.building("compile()", around):
            told = replicas.gather(json.dumps(own.pipeline), "the pipelines of all replicas")
    finally:
        replicas.close()
    return place_of_groups([json.loads(text) for text in told], options.group, options.data_group)


def require_members(planners: PipelineGroup, place: Place) -> None:
    """Refuse a ``plan_group`` that lacks a process of the job."""
    missing = sorted(set(place.members) - set(planners.members))
    if missing:
        raise UsageError(
            "replicas run one plan, and plan_group lacks some of them",
            where="plan_group",
            needed=f"all of {list(place.members)}",
            given=planners.members,
            fix="leave plan_group out: by default it is the whole job",
        )


def check_places(group: PipelineGroup) -> None:
    """Compare where all processes say that they stand; tell the group who else runs its stages.

    Raises
    ------
    PipelineError
        Pipelines overlap, or processes that are replicas have different ranks in theirs; raised by all.
    """
    mine = json.dumps([group.pipeline, group.replicas, group.grid])
    told = [json.loads(text) for text in group.gather(mine, "the places of all processes")]
    sizes = sorted({(len(pipeline), len(replicas)) for pipeline, replicas, _ in told})
    if len(sizes) > 1:
        raise group.calls.common(
            PipelineError(
                "processes differ in how many ranks their pipeline has, or how many replicas they have",
                given=", ".join(f"{ranks} ranks and {replicas} replicas" for ranks, replicas in sizes),
                fix="let all pipelines of the job have as many ranks, and all ranks as many replicas",
            )
        )
    for rank, (pipeline, replicas, _) in enumerate(told):
        for members, k, what in (
            (pipeline, 0, "pipeline"), (replicas, 1, "replicas"), (replicas, 2, "parts of the weights")
        ):  # fmt: skip
            apart = next((member for member in members if told[member][k] != told[rank][k]), None)
            if apart is not None:
                raise _apart(group, rank, apart, what, told[rank][k], told[apart][k])
        places = {told[member][0].index(member) for member in replicas}
        if len(places) > 1:
            raise group.calls.common(
                PipelineError(
                    f"ranks {replicas} are replicas, but ranks {sorted(places)} of their pipelines",
                    fix="let data_group hold processes with the same rank in their pipelines",
                )
            )
    group.pipelines = [told[rank][0] for rank in group.replicas]
    group.same_stages = [r for r, (p, _, _) in enumerate(told) if p.index(r) == group.pipeline_rank]


def _apart(
    group: PipelineGroup, rank: int, other: int, what: str, mine: Sequence[int], theirs: Sequence[int]
) -> PipelineError:
    return group.calls.common(
        PipelineError(
            f"ranks {rank} and {other} do not agree on their {what}",
            needed=f"{mine}, as rank {rank} says",
            given=f"{theirs} on rank {other}",
            fix="give all processes the same mesh, or groups that do not overlap",
        )
    )


def check_replicas(group: PipelineGroup, tensors: Mapping[str, Tensor]) -> None:
    """Compare parameters and buffers of a rank's stages with those of its replicas, by hashes.

    Of tensors above 1 MiB a sample is compared. All ranks come here.

    Parameters
    ----------
    tensors
        Those of this rank, by name.

    Raises
    ------
    PipelineError
        Names the first tensor that differs, and two ranks; raised by all.
    """
    if len(group.replicas) == 1:
        return
    own = {name: hashlib.sha256(sampled_bytes(t)).hexdigest()[:16] for name, t in tensors.items()}
    told = group.gather(json.dumps([group.replicas, own]), "the weights of replicas")
    parts = [json.loads(text) for text in told]
    for rank, (replicas, hashes) in enumerate(parts):
        first = parts[replicas[0]][1]
        name = next((name for name, digest in hashes.items() if first.get(name) != digest), None)
        if name is not None:
            raise group.calls.common(
                PipelineError(
                    f"replicas begin with different values: rank {rank} from rank {replicas[0]}",
                    where=name,
                    fix="build the model with the same seed on all of them, or load the same weights",
                )
            )


def check_optimizers(group: PipelineGroup, is_given: bool, what: str) -> None:
    """Refuse a call of all ranks to which an optimizer is given on one replica and not on another.

    Raises
    ------
    PipelineError
        Names both; raised by all.
    """
    first = group.same_stages[0]
    told = [json.loads(t) for t in group.gather(json.dumps([first, is_given]), f"the optimizers of {what}")]
    odd = next((rank for rank, (first, given) in enumerate(told) if given != told[first][1]), None)
    if odd is not None:
        first, words = told[odd][0], {True: "an optimizer", False: "none"}
        raise group.calls.common(
            PipelineError(
                f"replicas and shards differ in what they give to {what}",
                needed=f"{words[told[first][1]]}, as on rank {first}",
                given=f"{words[told[odd][1]]} on rank {odd}",
                fix="give the optimizer on all of them, or on none",
            )
        )


def check_frozen(group: PipelineGroup, parameters: Mapping[str, Tensor]) -> None:
    """Compare which parameters are frozen with the other ranks that run the same stages.

    Replicas hear the first of them, which does not wait. Where stages exchange data with each other all ranks
    meet, because a rank that waits for data of another cannot be told that it has refused.

    Raises
    ------
    UsageError
        A replica differs; raised by it.
    PipelineError
        Ranks differ; raised by all.
    """
    bits = "".join("01"[tensor.requires_grad] for tensor in parameters.values())
    first = group.same_stages[0]
    if any(len(ranks) > 1 for _, ranks in group.others):
        told = [json.loads(t) for t in group.gather(json.dumps([first, bits]), "what the step trains")]
        odd = next((rank for rank, (f, trained) in enumerate(told) if trained != told[f][1]), None)
        if odd is None:
            return
        first, theirs = told[odd][0], told[told[odd][0]][1]
        place = next(k for k, (a, b) in enumerate(zip(told[odd][1], theirs, strict=True)) if a != b)
        name = group.gather(list(parameters)[place] if group.rank == odd else "", "its name")[odd]
        raise group.calls.common(PipelineError(**_frozen(name, odd, theirs[place] == "0", first)))
    if len(group.same_stages) > 1:
        theirs = group.announce_in(group.same_stages, bits if group.rank == first else None, "its training")
        for name, a, b in zip(parameters, bits, theirs, strict=True):
            if a != b:
                raise UsageError(**_frozen(name, group.rank, b == "0", first))


def _frozen(name: str, rank: int, is_frozen_there: bool, first: int) -> dict[str, str]:
    """Return the words of a parameter that is frozen on one of two ranks."""
    words = ("frozen", "trained") if is_frozen_there else ("trained", "frozen")
    return {
        "what": "ranks that train the same parameters have frozen different ones",
        "where": name,
        "needed": f"{words[0]}, as on rank {first}",
        "given": f"{words[1]} on rank {rank}",
        "fix": "call requires_grad_() on all replicas and shards alike",
    }
