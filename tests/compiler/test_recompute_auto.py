"""``recompute="auto"``: a level for every stage, chosen with the order; what is planned is what runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.recompute_workers import (
    COUNT,
    DEVICE,
    STAGES,
    batch,
    caps,
    compiled,
    mixed_plan,
    net,
    plain_gradients,
    train_as_planned,
)
from tests.support.saved_ledger import kept_bytes
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.passes.op_costs import graph_ns
from zbcompile.passes.split.recompute import level_in, level_text, titled
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.verify import verify
from zbcompile.planner.certify.certificate import verify as verify_certificate
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.memory import memory_peaks

MSE = nn.functional.mse_loss


def staged() -> tuple[nn.Module, StagedModel]:
    model = net()
    x, y = (part[:4] for part in batch())
    return model, build_stages(model, STAGES, (x,), target=y, loss_fn=MSE, planned_for=DEVICE)


def costs(stage: StageGraphs) -> list[int]:
    times = [graph_ns(getattr(stage.graphs, name), DEVICE) for name in Graphs.__slots__]
    return [*times, stage.saved_bytes, stage.saved_for_weight_bytes]


def test_no_level_is_beaten_and_the_last_one_holds_least() -> None:
    _, built = staged()
    assert built.traced is not None
    rows = built.traced.worthwhile()
    for s, row in enumerate(rows):
        known = [costs(built.stages_at([level] * STAGES)[s]) for level in row]
        assert row[0] == "none"
        assert [k[4] for k in known] == sorted((k[4] for k in known), reverse=True)
        for one, other in itertools.permutations(known, 2):
            assert any(a < b for a, b in zip(one, other, strict=True))
        for policy in ("none", "min_memory", "full", 1e10):
            assert known[-1][4] <= 1.02 * built.stages_at([policy] * STAGES)[s].saved_bytes
    assert max(map(len, rows)) >= 3


def test_stages_at_different_levels_have_the_bits_of_autograd() -> None:
    model, built = staged()
    x, y = (part[:4] for part in batch())
    mixed = built.settled(("none", "full", "min_memory", "full"))
    assert mixed.levels == ("none", "full", "min_memory", "full")
    assert mixed.traced is None
    assert [r.saved_bytes for r in mixed.reports] == [s.saved_bytes for s in mixed.stages]
    assert verify(model, mixed, (x,), target=y, loss_fn=MSE).exact


def test_a_cap_below_what_the_stages_hold_is_met_with_the_bits_of_the_loop() -> None:
    pipeline, model = compiled(memory_limit=caps(0.6))
    levels = [level_in(stage.name) for stage in pipeline.profile.stages]
    assert any(pipeline.solution.variants)
    assert [level or "none" for level in levels] == list(pipeline._ready().staged.levels)
    assert verify_certificate(replace(pipeline.solution, schedule=pipeline.schedule)) == []
    x, y = batch()
    always = [*model.parameters(), x, y]
    with kept_bytes(pipeline.schedule.placement.rank_of, always) as most:
        pipeline.step(x, target=y)
    for mine, theirs in zip(model.parameters(), plain_gradients(pipeline), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs)
    static = [stage.static_bytes for stage in pipeline.profile.stages]
    peaks = memory_peaks(pipeline.schedule, pipeline.solution.problem)
    for cap, peak, kept, held in zip(caps(0.6), peaks, most, static, strict=True):
        assert held + kept == peak <= cap
    losses: list[Tensor] = []
    pipeline.eval(x, target=y, losses=losses)
    assert all(loss.isfinite() for loss in losses)
    pipeline.close()


def test_what_a_cap_needs_is_said_with_recompute() -> None:
    with pytest.raises(InfeasibleError, match='recompute="auto", which fits'):
        compiled(memory_limit=caps(0.3), recompute="none")
    compiled(memory_limit=caps(0.3))[0].close()
    low = [cap // 50 for cap in caps(0.3)]
    with pytest.raises(InfeasibleError) as fixed:
        compiled(memory_limit=low, recompute="none")
    with pytest.raises(InfeasibleError) as auto:
        compiled(memory_limit=low)
    assert auto.value.needed < fixed.value.needed  # type: ignore[operator]
    assert f'recompute="auto" with {auto.value.needed} bytes' in str(fixed.value)
    assert "recompute" not in str(auto.value)


def test_stages_are_traced_once_and_split_again_only_where_memory_binds() -> None:
    seen: dict[str, list[str]] = {"none": [], "loose": [], "tight": []}
    for name, options in (
        ("none", {}),
        ("loose", {"memory_limit": 1 << 40}),
        ("tight", {"memory_limit": caps(0.6)}),
    ):
        compiled(observer=lambda step, _, name=name: seen[name].append(step), **options)[0].close()
    assert seen["none"] == seen["loose"]
    joint = "split_backward.joint"
    assert seen["tight"].count(joint) == seen["none"].count(joint)
    assert [step for step in seen["tight"] if step in ("counted", "recompute", "verify")] == [
        "verify", "counted", "counted", "recompute", "verify",
    ]  # fmt: skip


def test_plans_in_caches_files_and_checkpoints_keep_their_levels(tmp_path: Path) -> None:
    seen: list[str] = []
    options: dict[str, Any] = {"memory_limit": caps(0.6), "cache": tmp_path / "plans"}
    first, _ = compiled(**options)
    levels = first._ready().staged.levels
    again, _ = compiled(observer=lambda step, _: seen.append(step), **options)
    assert again._ready().staged.levels == levels
    assert again.solution == first.solution
    assert not {"counted", "verify", "merge_backward"} & set(seen)
    x, y = batch()
    first.step(x, target=y)
    first.save(tmp_path / "checkpoint")
    (tmp_path / "plan.json").write_text(schedule_json.dumps(first.solution))
    for schedule in (tmp_path / "checkpoint", tmp_path / "plan.json"):
        other, _ = compiled(schedule=schedule, memory_limit=caps(0.6))
        assert other._ready().staged.levels == levels
        assert other.schedule == first.schedule
        other.close()
    with pytest.raises(UsageError, match="recomputes otherwise than asked for"):
        compiled(schedule=tmp_path / "checkpoint", recompute="none")
    first.replan(threshold=0.0)
    assert first._ready().staged.levels == levels
    assert [level_in(stage.name) or "none" for stage in first.profile.stages] == list(levels)
    first.close()
    again.close()


def test_batches_of_other_shapes_keep_the_levels() -> None:
    pipeline, model = compiled(memory_limit=caps(1.5))
    x, y = batch(6 * COUNT)
    pipeline.step(x[: 4 * COUNT + 2], target=y[: 4 * COUNT + 2])
    forms = pipeline._ready()._forms._forms.values()
    assert len(forms) == 2
    assert len({form.staged.levels for form in forms}) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
    pipeline.close()


def test_two_processes_run_four_levels_in_the_bits_of_one(tmp_path: Path) -> None:
    solution = mixed_plan()
    path = tmp_path / "plan.json"
    path.write_text(schedule_json.dumps(solution))
    pipeline, model = compiled(schedule=path, placement="auto")
    levels = pipeline._ready().staged.levels
    assert len(set(levels)) == 4
    pipeline.step(*batch()[:1], target=batch()[1])
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    pipeline.close()
    rows = spawn(train_as_planned, 2, (str(path),), timeout_s=100)
    assert [row[0] for row in rows] == [levels] * 2
    got = {name: grad for _, grads in rows for name, grad in grads.items()}
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None
        assert torch.equal(got[name], grad), name


def priced(*names: str) -> Profile:
    """Two stages with variants of these names, each of which holds half of the one before."""
    stage = StageCost(3000, 3000, 3000, 6000, 64, 8, name="a stage")
    variants = tuple(
        StageCost(3000, 4000 + k, 3000, 7000 + k, 32 >> k, 8 >> k, name=name) for k, name in enumerate(names)
    )
    return Profile((replace(stage, variants=variants),) * 2)


def two_stages(**options: Any) -> zbcompile.Pipeline:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
    x = torch.ones(8, 4)
    given = {"num_microbatches": 4, "time_limit": 0.3, **options}
    return zbcompile.compile(model, 2, example_args=(x,), example_target=x, loss_fn=MSE, **given)


def test_a_profile_s_variants_are_built_by_name_or_refused() -> None:
    pipeline = two_stages(profile=priced("recompute=min_memory", "recompute=full"), memory_limit=24)
    assert pipeline._ready().staged.levels == ("full", "full")
    assert two_stages(profile=pipeline.profile, memory_limit=24)._ready().staged.levels == ("full", "full")
    with pytest.raises(UsageError, match=r"as its variant 1 \(lean\), which compile\(\) does not build"):
        two_stages(profile=priced("lean"), memory_limit=40)
    profile = priced("recompute=full")
    assert two_stages(profile=profile, recompute="full").profile.stages[0].saved_bytes == 32
    assert two_stages(profile=profile, recompute="none").profile.stages[0].saved_bytes == 64
    for options, words in (
        (
            {"profile": profile, "recompute": "min_memory"},
            "what stage 0 costs at the level",
        ),
        ({"profile": profile.choose((0, 0)), "recompute": "auto"}, "and the profile has one"),
        ({"schedule": pipeline.schedule, "recompute": "auto"}, "the order is given"),
        ({"recompute": "often"}, "unknown recompute"),
    ):
        with pytest.raises(UsageError, match=words):
            two_stages(**options)
    assert two_stages(recompute="auto").solution.variants in ((), (0, 0))


@pytest.mark.parametrize("level", ["none", "min_memory", "full", 3e9, 0.5, 1e30])
def test_a_level_is_read_from_the_name_that_it_gives(level: Any) -> None:
    assert level_in(titled("stage 3", level)) == (None if level == "none" else level)
    assert level_in(f"recompute={level_text(level)}") == level
    assert {level_in(name) for name in ("a stage", "full", "recompute=lean", "recompute=1-e")} == {None}
