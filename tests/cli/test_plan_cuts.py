"""``zbcompile plan --stages`` and ``--rank-speeds``: cuts, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbcompile.cli.main import main
from zbcompile.formats import profile_json, schedule_json
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement


@pytest.fixture
def pieces_path(tmp_path: Path) -> Path:
    pieces = Profile((StageCost.simple(3000, 3000, 2000, 2048, 1024),) * 9, source="by hand")
    path = tmp_path / "pieces.json"
    path.write_text(profile_json.dumps(ProfileFile(pieces, num_microbatches=4)))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_cuts_are_planned_checked_and_shown(capsys, pieces_path: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = ("plan", pieces_path, "--stages", 3, "--cap", 20_000, "--time-limit", 1, "-o", plan)
    code, _, talk = run(capsys, *words)
    assert code == 0
    assert "pieces a stage" in talk
    sizes = schedule_json.loads(plan.read_text()).cuts.sizes
    assert sum(sizes) == 9
    assert run(capsys, "check", "--certificate", plan)[0] == 0
    assert json.loads(run(capsys, "show", plan, "--json")[1])["pieces_per_stage"] == list(sizes)
    assert f"cut with the order: {' '.join(map(str, sizes))} pieces a stage" in run(capsys, "show", plan)[1]
    again = tmp_path / "again.json"
    assert run(capsys, *words[:-1], again)[0] == 0
    assert again.read_bytes() == plan.read_bytes()


def test_a_slow_rank_is_planned_for(capsys, pieces_path: Path) -> None:
    words = ("plan", pieces_path, "--rank-speeds", "1,0.5,1", "--time-limit", 1, "--quiet")
    cut = schedule_json.loads(run(capsys, *words, "--stages", 3)[1])
    assert cut.cuts.sizes[1] < min(cut.cuts.sizes[0], cut.cuts.sizes[2])
    whole = schedule_json.loads(run(capsys, *words, "--ranks", 3)[1])
    rank_of = whole.problem.placement.rank_of
    assert rank_of.count(1) < rank_of.count(0)
    times = [stage.forward_ns for stage in whole.problem.profile.stages]
    assert times == [6000 if rank == 1 else 3000 for rank in rank_of]


def test_placement_auto_gives_the_slow_rank_the_light_stage(capsys, tmp_path: Path) -> None:
    stages = tuple(StageCost.simple(3000 * k, 3000 * k, 2000 * k) for k in (1, 2, 2))
    path = tmp_path / "profile.json"
    path.write_text(profile_json.dumps(Profile(stages)))
    words = ("plan", path, "--rank-speeds", "1,1,0.5", "--placement", "auto", "--time-limit", 1)
    code, out, talk = run(capsys, *words)
    assert code == 0
    assert "matched" in talk
    assert schedule_json.loads(out).schedule.placement == Placement((2, 0, 1))


@pytest.mark.parametrize("stated", [False, True])
def test_how_gradients_are_summed_and_kept_is_planned_for_with_the_cuts(
    capsys, tmp_path: Path, stated: bool
) -> None:
    piece = StageCost(3000, 3000, 2000, 5000, 1024, 512, static_bytes=1000, gradient_bytes=400)
    asked = {"accumulate": "memory", "kept_gradients": True} if stated else {}
    path = tmp_path / "pieces.json"
    path.write_text(profile_json.dumps(ProfileFile(Profile((piece,) * 9), num_microbatches=4, **asked)))
    options = () if stated else ("--accumulate", "memory", "--kept-gradients")
    words = ("plan", path, "--stages", 3, "--time-limit", 0.5, "--quiet", *options, "--cap")
    plan = tmp_path / "plan.json"
    assert run(capsys, *words, 8000, "-o", plan)[0] == 0
    problem = schedule_json.loads(plan.read_text()).problem
    assert (problem.accumulate, problem.kept_gradients) == ("memory", True)
    assert run(capsys, "check", plan, "--certificate")[0] == 0
    code, _, talk = run(capsys, *words, 7000)  # without a second set of gradients 3 x (1000 + 1024) would fit
    assert code == 1
    assert "no cut fits" in talk
    assert "7272" in talk


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stages", 12), "9 pieces cannot be cut into 12 stages"),
        (("--stages", 3, "--cap", "1.5p"), "depends on the cut"),
        (("--stages", 3, "--cap", "1,2"), "one cap for all ranks"),
        (("--stages", 4, "--ranks", 3), "do not divide evenly"),
        (("--stages", 3, "--placement", "0,1,2", "--ranks", 2), "divide evenly"),
        (("--stages", 3, "--rank-speeds", "1,1"), "one speed per rank"),
        (("--stages", 3, "--rank-speeds", "1,nan,1"), "speed of a rank"),
        (("--stages", 3, "--rank-speeds", "1,0,1"), "speed of a rank"),
        (("--rank-speeds", "1,2,x,4,5,6,7,8,9"), "no number"),
        (("--rank-speeds", "1,2"), "one speed per rank"),
    ],
)
def test_what_does_not_fit_is_refused(
    capsys, pieces_path: Path, words: tuple[object, ...], message: str
) -> None:
    code, out, talk = run(capsys, "plan", pieces_path, *words)
    assert (code, out) == (2, "")
    assert message in talk


def test_a_cap_that_no_cut_fits_names_the_closest(capsys, pieces_path: Path) -> None:
    code, _, talk = run(capsys, "plan", pieces_path, "--stages", 3, "--cap", 4096)
    assert code == 1
    assert "no cut fits, nor does the closest, with 3 3 3 pieces a stage" in talk
    assert "6144" in talk


def test_a_placement_of_pieces_is_not_one_of_stages(capsys, tmp_path: Path) -> None:
    pieces = Profile((StageCost.simple(3, 3, 2),) * 4)
    path = tmp_path / "pieces.json"
    path.write_text(profile_json.dumps(ProfileFile(pieces, Placement.looped(2))))
    code, _, talk = run(capsys, "plan", path, "--stages", 2)
    assert code == 2
    assert "placement is one of pieces" in talk
