"""Every way out of a call: who raises what, what is left behind, and whether the next step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.clean_process import in_clean_process
from tests.support.ways_out import (
    BUILDS,
    FATAL,
    LIMIT_S,
    RANKS,
    SCENES,
    SIZES,
    Seen,
    batch,
    build_all,
    expected,
    make_model,
    make_pipeline,
    options_differ,
    otherwise,
    play,
)
from zbcompile.compiler import compiled
from zbcompile.errors import PipelineError, UsageError
from zbcompile.runtime.launch import spawn

pytestmark = pytest.mark.timeout(400)

SLOWEST_S = LIMIT_S + 3.0
"""From a failure to the last rank's error, where somebody has to miss a rank."""

AT_ONCE_S = 3.0
"""The same where somebody tells it; on an idle machine a tenth of that."""

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def played() -> Found:
    """What every rank saw in every scene."""
    return in_clean_process(play_all)


def play_all() -> Found:
    """Play all scenes in processes that are copies of this one, where the pipelines were compiled."""
    x, y = batch()
    pipelines = {
        name: make_pipeline(model=make_model(name == "tied"), example_args=(x,), example_target=y)
        for name in ("plain", "tied")
    }
    return spawn(play, RANKS, (pipelines, list(SCENES)), timeout_s=280, inherit=True)


def of(played: Found, scene: str) -> Found:
    return [record[scene] for record in played]


def one_error(seen: list[Seen], failed_at: float, limit_s: float = AT_ONCE_S) -> str:
    """Return the text of the one PipelineError that ranks have seen in time."""
    assert {s.kind for s in seen} == {"PipelineError"}, seen
    assert len({s.text for s in seen}) == 1, seen
    late = max(s.at for s in seen) - failed_at
    assert late < limit_s, (late, seen)
    print(f"named on the last rank after {late:.2f} s")
    return seen[0].text


def right(records: Found, key: str = "good", seed: int = 1) -> None:
    """Check that a step ran on all ranks with the gradients of plain autograd."""
    assert [r[key].kind for r in records] == [""] * RANKS, [r[key] for r in records]
    wanted = expected(seed)
    found = {name: grad for record in records for name, grad in record["gradients"].items()}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("name", FATAL)
def test_an_error_in_a_step_is_told_to_all_and_ends_the_pipeline(played: Found, name: str) -> None:
    records = of(played, f"fatal {name}")
    bad = FATAL[name][0]
    others = [r for rank, r in enumerate(records) if rank != bad]
    text = one_error([r["first"] for r in others], records[bad]["failed_at"])
    assert name in text
    assert f"rank {bad}" in text
    assert "no further step of this pipeline can run" in text
    own = records[bad]["first"]
    assert own.kind == (
        name if name in ("KeyboardInterrupt", "SystemExit", "GeneratorExit") else "PipelineError"
    )
    for record in records:
        assert record["gradients"] == 0
        assert record["buffers"]
        assert record["second"].kind == record["third"].kind == "PipelineError"
        assert record["second"].text == record["third"].text == text
        assert record["failed"] in text


def test_an_interrupt_in_an_evaluation_is_told_to_all(played: Found) -> None:
    records = of(played, "fatal in eval")
    assert [r["good"].kind for r in records] == [""] * RANKS
    assert records[2]["first"].kind == "KeyboardInterrupt"
    text = one_error([records[3]["first"]], records[2]["failed_at"])
    assert "KeyboardInterrupt" in text
    assert "rank 2" in text
    assert {(r["second"].kind, r["second"].text) for r in records} == {("PipelineError", text)}


def test_an_interrupt_while_gradients_are_set_leaves_them_whole(played: Found) -> None:
    records = of(played, "interrupt in hand_over")
    assert [r["first"].kind for r in records] == ["", "KeyboardInterrupt", "", ""]
    assert {r["second"].kind for r in records} == {"PipelineError"}
    assert all("KeyboardInterrupt" in r["second"].text for r in records)
    right([{**r, "first": Seen("", "", 0.0)} for r in records], "first")


def test_an_error_before_gradients_are_set_leaves_none(played: Found) -> None:
    records = of(played, "error before hand_over")
    assert records[1]["first"].kind == "PipelineError"
    for rank, record in enumerate(records):
        # A rank that had returned keeps whole gradients, and learns it in its next step.
        assert record["first"].kind in ("", "PipelineError")
        assert bool(record["gradients"]) == (record["first"].kind == "")
        assert "no room for gradients" in record["second"].text, (rank, record)


def test_an_error_of_one_holder_of_a_tied_weight_is_told_to_the_other(played: Found) -> None:
    records = of(played, "tied")
    assert "no sum today" in records[3]["first"].text
    assert records[0]["gradients"] == records[3]["gradients"] == 0
    assert all("no sum today" in r["second"].text for r in records)


def test_a_batch_that_all_refuse_does_not_end_the_pipeline(played: Found) -> None:
    records = of(played, "refused by all")
    for record in records:
        assert [s.kind for s in record["first"]] == ["UsageError"]
        assert "differ in their rows" in record["first"][0].text
        assert record["gradients before"] == 0
        assert record["number"] == 1
        assert record["after"].kind == ""
    right(records)


@pytest.mark.parametrize(
    ("scene", "bad"), [("refused by one", (1,)), ("refused by two, three times", (0, 2))]
)
def test_a_batch_that_some_refuse_does_not_end_the_pipeline(
    played: Found, scene: str, bad: tuple[int, ...]
) -> None:
    records = of(played, scene)
    for rank, record in enumerate(records):
        for seen in record["first"]:
            assert seen.kind == ("UsageError" if rank in bad else "PipelineError"), seen
            if rank not in bad:
                assert any(f"rank {b} refused step 0" in seen.text for b in bad), seen
                assert "the next step can run" in seen.text
        assert record["gradients before"] == 0
        assert record["number"] == 1
        assert record["after"].kind == ""
    others = [r["first"][0] for rank, r in enumerate(records) if rank not in bad]
    one_error(others, max(r["failed_at"] for r in records))
    right(records)


@pytest.mark.parametrize("learn", ["synchronize", "step"])
def test_a_rank_that_had_returned_learns_of_a_refusal(played: Found, learn: str) -> None:
    records = of(played, f"ahead, {learn}")
    assert [r["good"].kind for r in records] == [""] * RANKS
    assert records[3]["first"].kind == "UsageError"
    assert records[0]["first"].kind == ""
    assert records[0]["second"].kind == "PipelineError"
    assert "rank 3 refused the evaluation" in records[0]["second"].text
    assert "the next step can run" in records[0]["second"].text
    assert {r["second"].kind for r in records[1:]} == {"PipelineError" if learn == "step" else ""}
    assert {r["number"] for r in records} == {1}
    right(records, "third")


def test_an_evaluation_that_one_rank_cannot_capture_does_not_end_the_pipeline(played: Found) -> None:
    records = of(played, "capture fails")
    assert records[1]["first"].kind == "RuntimeError"
    text = one_error([r["first"] for k, r in enumerate(records) if k != 1], records[1]["failed_at"])
    assert "rank 1 refused the evaluation: RuntimeError: cannot capture today" in text
    right(records)
    assert [r["eval"].kind for r in records] == [""] * RANKS
    model = make_model().eval()
    assert records[3]["eval"].value.shape == model(batch()[0]).shape


def test_a_closed_pipeline_says_so(played: Found) -> None:
    records = of(played, "closed")
    for seen in records[1]["calls"]:
        assert (seen.kind, "the pipeline is closed" in seen.text) == ("UsageError", True)
    text = one_error([r["first"] for k, r in enumerate(records) if k != 1], 1e12)
    assert "rank 1 has closed the pipeline" in text


@pytest.mark.parametrize("where", ["step", "eval", "synchronize"])
def test_a_rank_that_does_not_come_is_named_within_the_limit(played: Found, where: str) -> None:
    records = of(played, f"missing in {where}")
    text = one_error([r["first"] for r in records[:3]], records[0]["failed_at"], SLOWEST_S)
    assert "stalled" in text
    assert "rank 3" in text
    assert records[3]["first"].text == text


def test_ranks_in_different_meetings_are_told_which(played: Found) -> None:
    records = of(played, "apart")
    assert {(r["first"].kind, r["first"].text) for r in records} == {
        ("PipelineError", records[0]["first"].text)
    }
    text = records[0]["first"].text
    assert "different meetings: ranks 0, 2 in synchronize(); ranks 1, 3 in the norms of gradients" in text
    assert {r["second"].kind for r in records} == {""}
    right(records)


def test_evaluations_of_many_sizes_are_right_and_a_few_stay_compiled(played: Found) -> None:
    records = of(played, "many sizes")
    model = make_model().eval()
    for record in records:
        assert [s.kind for s in record["seen"]] == [""] * len(record["rows"]), record["seen"]
        assert record["kept"] == len(SIZES) - 1
        assert (record["empty"].kind, "the batch is empty" in record["empty"].text) == ("UsageError", True)
    for rows, seen in zip(records[3]["rows"], records[3]["seen"], strict=True):
        torch.testing.assert_close(seen.value, model(batch(1, rows)[0]))
    right(records)


@pytest.fixture(scope="module")
def built() -> Found:
    """What every rank saw of builds that fail in all ways, on processes that share nothing."""
    return spawn(build_all, RANKS, (), timeout_s=300)


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_that_fails_on_one_rank_is_told_to_all_at_once(built: Found, name: str) -> None:
    records = of(built, name)
    bad, *_, error = BUILDS[name]
    assert records[bad]["seen"].kind == type(error).__name__
    others = [r["seen"] for rank, r in enumerate(records) if rank != bad]
    text = one_error(others, records[bad]["failed_at"], 2 * AT_ONCE_S)
    assert f"rank {bad}" in text
    assert type(error).__name__ in text
    assert str(error) in text


def test_what_rank_0_cannot_plan_and_a_rank_that_does_not_come_are_named(built: Found) -> None:
    seen = of(built, "infeasible")
    assert seen[0].kind == "InfeasibleError"
    assert all("rank 0 failed in compile(): InfeasibleError" in s.text for s in seen[1:])
    records = of(built, "missing")
    text = one_error([r["seen"] for r in records[:3]], records[0]["failed_at"], SLOWEST_S)
    assert "stalled: rank" in text
    assert "-> 3; root: rank 3" in text


def test_after_all_that_the_next_build_is_right_and_may_be_left_in_any_order(built: Found) -> None:
    """The default process group was destroyed before the pipeline was closed."""
    right([{**record, "good": Seen("", "", 0.0)} for record in built])
    assert {(record["left"].kind, record["left"].text.split("\n")[0]) for record in built} == {
        ("UsageError", "the pipeline is closed")
    }


def test_every_option_is_compared_between_processes() -> None:
    found = spawn(options_differ, RANKS, (), timeout_s=200)
    for name in otherwise():
        for rank in range(RANKS):
            seen = found[rank][name]
            assert seen.kind == "PipelineError", (name, seen)
            assert "the ranks differ in their" in seen.text
            assert "rank 2 from rank 0" in seen.text
            assert seen.text == found[0][name].text


def test_in_one_process_a_failed_step_leaves_nothing_and_the_next_one_runs() -> None:
    x, y = batch()
    pipeline = make_pipeline(example_args=(x,), example_target=y, num_ranks=RANKS)
    before = {n: t.clone() for n, t in pipeline._ready().reader.read().items()}
    losses: list[torch.Tensor] = []
    with pytest.raises(UsageError, match="differ in their rows"):
        pipeline.step(x[:13], target=y)
    stage = pipeline._ready().spec.stages[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(stage), "run_full_backward", _fails)
        patch.setattr(type(stage), "run_backward_input", _fails)
        with pytest.raises(PipelineError, match="not today"):
            pipeline.step(x, target=y, losses=losses)
    assert losses == []
    assert all(torch.equal(t, before[n]) for n, t in pipeline._ready().reader.read().items())
    assert all(p.grad is None for p in pipeline.parameters())
    assert pipeline.step_number == 0
    pipeline.step(x, target=y)
    wanted = expected()
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])
    with pytest.raises(UsageError, match="the batch is empty"):
        pipeline.eval(x[:0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "MAX_EVALUATIONS", len(SIZES) - 1)
        for rows in SIZES:
            pipeline.eval(x[:1].expand(rows, -1))
    assert len(pipeline._ready()._evaluations) == len(SIZES) - 1
    pipeline.close()
    with pytest.raises(UsageError, match="the pipeline is closed"):
        pipeline.step(x, target=y)


def _fails(*args: object) -> None:
    raise RuntimeError("not today")
