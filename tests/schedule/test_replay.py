"""Random latencies: the replay against the simulator on links that are that slow, and the paper's step."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.places import EXAMPLES
from tests.support.strategies import greedy_order, problems, step_problems
from zbcompile.cli.main import main
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats import profile_json
from zbcompile.planner.plan import plan
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.messages import messages_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.replay import Jitter, Replay
from zbcompile.schedule.simulate import simulate
from zbcompile.show.baseline import one_f_one_b
from zbcompile.show.jitter import jittered


@settings(max_examples=120, deadline=None)
@given(st.one_of(problems(), step_problems()), st.randoms(use_true_random=False), st.booleans())
def test_late_messages_are_messages_on_slower_links(problem: Problem, random: Random, explicit: bool) -> None:
    """Every directed pair of ranks gets a latency of its own, once as links and once as late messages."""
    order = greedy_order(problem, random)
    if explicit:
        order = insert_communication(order, problem)
    rank_of = problem.placement.rank_of
    pairs = {(rank_of[m.source], rank_of[m.target]) for _, m in messages_of(problem)}
    late = {pair: random.randrange(50) for pair in sorted(pairs)}
    links = dict(problem.profile.links)
    for pair in late:
        usual = problem.profile.link_between(*pair)
        links[pair] = replace(usual, latency_ns=usual.latency_ns + late[pair])
    slower = problem.with_(profile=replace(problem.profile, links=tuple(links.items())))
    try:
        wanted = simulate(order, slower).value_ns
    except CheckError:
        with pytest.raises(CheckError, match="deadlock"):
            Replay(order, problem)
        return
    replay = Replay(order, problem)
    each = {m: late[rank_of[m.source], rank_of[m.target]] for _, m in messages_of(problem)}
    assert replay.value_ns() == simulate(order, problem).value_ns
    assert replay.value_ns(each) == wanted
    assert replay.value_ns() == simulate(order, problem).value_ns


def test_draws_have_their_mean_and_are_the_same_for_a_seed() -> None:
    problem = profile_json.loads((EXAMPLES / "profiles/gpt-1.5b-p8-m24.json").read_text()).problem()
    for kind in ("exponential", "uniform"):
        jitter = Jitter(kind, 5_000_000)
        draws = jitter.draws(problem, 30, 7)
        assert draws == jitter.draws(problem, 30, 7) != jitter.draws(problem, 30, 8)
        drawn = [late + 601_000 for draw in draws for late in draw.values()]
        assert min(drawn) >= 0
        assert sum(drawn) / len(drawn) == pytest.approx(5_000_000, rel=0.03)
    for kind, mean in (("normal", 5), ("exponential", 0)):
        with pytest.raises(UsageError):
            Jitter(kind, mean)


def test_the_papers_gain_over_early_gradients_falls_from_4_to_below_1_per_cent() -> None:
    """1.5B on 8 ranks with 24 microbatches at 1F1B's memory, exponential latency of 5 ms on the mean."""
    file = profile_json.loads((EXAMPLES / "profiles/gpt-1.5b-p8-m24.json").read_text())
    problem = file.problem(caps=(8 * file.profile.stages[0].saved_bytes,))
    solution = plan(problem, time_limit_s=5, level=1)
    found = jittered(solution.schedule, problem, one_f_one_b(problem), Jitter("exponential", 5_000_000), 0)
    plain, early = found.others
    planned, left, low, high = found.plan.gain_over(early)
    assert round(100 * planned, 1) == 4.2
    assert 0.006 < left < 0.011
    assert low < left < high
    planned, left, _, _ = found.plan.gain_over(plain)
    assert round(100 * planned, 1) == 10.0
    assert left > planned  # 1F1B hands gradients on after W, and waits for all of it


def test_the_command_says_it_and_refuses_what_it_would_ignore(capsys) -> None:
    schedule = str(EXAMPLES / "four-unequal-stages.schedule.json")
    assert main(["explain", schedule, "--jitter", "uniform:10ms"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("with a latency of 10 ms on the mean (uniform, ")
    assert "gain over 1F1B: 15.8 % becomes" in out
    assert main(["explain", schedule, "--jitter", "10ms", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["seed"], found["kind"]) == ("zbcompile.jitter", 3, "exponential")
    assert [order["name"] for order in found["orders"]] == ["this order", "1F1B", "1F1B, B sent before W"]
    for words, wrong in (
        (["--jitter", "10"], "10 has no unit (--jitter)"),
        (["--jitter", "normal:10ms"], "unknown jitter 'normal'"),
        (["--jitter", "0ms"], "the mean latency is too small"),
        (["--jitter", "1ms", "--what-if"], "two questions"),
        (["--jitter", "1ms", "--at", "40ms"], "--at says nothing with --jitter"),
        (["--jitter", "1ms", "--time-limit", "1"], "--time-limit says nothing without --what-if"),
        (["--seed", "1"], "--seed says nothing"),
    ):
        assert main(["explain", schedule, *words]) == 2
        assert wrong in capsys.readouterr().err
    profile = str(EXAMPLES / "profiles/four-unequal-stages.json")
    assert main(["plan", profile, "--jitter", "1ms", "--quiet", "-o", "/dev/null"]) == 2
    capsys.readouterr()
    assert main(["plan", profile, "--jitter", "1ms", "--time-limit", "2", "-o", "/dev/null"]) == 0
    assert "gain over 1F1B: 15.8 % becomes" in capsys.readouterr().err
