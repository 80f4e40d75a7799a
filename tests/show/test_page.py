"""The page: its data are the schedule's, nothing hostile gets out of it, and a browser draws it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.show.test_glance import classic
from tests.show.test_once_lane import ONCE, file_of
from tests.show.test_show import example, measured_like, virtual
from tests.support.browser import BROWSER, WHY_NOT, opened, pixels
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.planner.starts.classic import one_f_one_b
from zbcompile.schedule.ir import Action, Kind
from zbcompile.show import page as page_module
from zbcompile.show.once_lane import NAMES, once_times
from zbcompile.show.page import Shown, page
from zbcompile.show.palette import KIND_COLOURS
from zbcompile.show.summary import summarize

HOSTILE = (
    "</script><script>document.body.dataset.owned='yes'</script><img src=x onerror=alert(1)>&\u2028{{data}}"
)
_LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT, "X": Kind.FULL_BACKWARD}


class Parts(HTMLParser):
    """Collects elements, attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.lasttag == "script":
            self.scripts[-1] += data


def data_of(text: str) -> dict:
    return json.loads(Parts(text).scripts[0])


@pytest.mark.parametrize(
    "file",
    [example(), virtual(), classic(4, 6, "rendezvous", one_f_one_b, 6_000_000)],
    ids=["linear", "v", "held"],
)
def test_the_data_of_a_page_are_the_schedule(file) -> None:
    summary = summarize(file)
    timeline = summary.timeline
    (view,) = data_of(page([Shown("planned", summary)]))["views"]
    assert view["end"] == timeline.makespan_ns
    for rank, row in enumerate(view["ranks"]):
        own = [k for k, a in enumerate(timeline.schedule.order[rank]) if a.kind.is_compute]
        at, held = 0, row["base"]
        for n, k in enumerate(own):
            action = timeline.schedule.order[rank][k]
            assert action == Action(_LETTERS[row["kind"][n]], row["stage"][n], row["microbatch"][n])
            at += row["gap"][n]
            assert at == timeline.start[rank][k]
            at += row["length"][n]
            assert at == timeline.end[rank][k]
            held += row["change"][n]
            assert held == timeline.memory[rank][k]
        assert row["cap"] == timeline.problem.caps[rank]
        assert sum(e - s for s, e in row["holds"]) <= sum(row["gap"])
    path = [(r, n) for r, row in enumerate(view["ranks"]) for n in row["path"]]
    assert path


def test_what_an_action_waited_for_had_ended_and_what_follows_began_with_it() -> None:
    """In a plain chain every wait is for the message of the same microbatch from a neighbour."""
    (view,) = data_of(page([Shown("planned", summarize(example()))]))["views"]
    ends = [
        [sum(row["gap"][: n + 1]) + sum(row["length"][: n + 1]) for n in range(len(row["kind"]))]
        for row in view["ranks"]
    ]
    waits = 0
    for rank, row in enumerate(view["ranks"]):
        for key, (other, n, own_send) in row["wait"].items():
            k = int(key)
            maker = view["ranks"][other]
            assert row["gap"][k] > 0
            assert not own_send
            assert abs(other - rank) == 1
            assert (maker["microbatch"][n], maker["kind"][n]) == (row["microbatch"][k], row["kind"][k])
            assert ends[other][n] + 600_000 == ends[rank][k] - row["length"][k]
            waits += 1
    assert waits == sum(gap > 0 for row in view["ranks"] for gap in row["gap"])


def test_a_page_is_one_file_and_no_name_gets_out_of_its_text() -> None:
    file = replace(example(), origin=HOSTILE, certificate=None)
    text = page([Shown(HOSTILE, summarize(file)), Shown("measured", summarize(file), measured_like(file))])
    parts = Parts(text)
    assert parts.tags.count("script") == 2
    assert "img" not in parts.tags
    assert not [value for name, value in parts.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import|import\(|fetch\(|innerHTML|eval\(", text)
    data = json.loads(parts.scripts[0])
    assert data["views"][0]["name"] == HOSTILE
    assert HOSTILE in data["views"][0]["head"][-1]
    assert html.escape(HOSTILE) in text
    assert "default-src 'none'" in dict(parts.attributes)["content"] or "default-src 'none'" in text


def test_the_same_timelines_give_the_same_page() -> None:
    assert page([Shown("planned", summarize(example()))]) == page([Shown("planned", summarize(example()))])


def test_a_measured_step_has_its_own_times() -> None:
    file = example()
    measured = measured_like(file)
    views = data_of(page([Shown("planned", summarize(file)), Shown("measured", summarize(file), measured)]))[
        "views"
    ]
    assert views[1]["end"] == measured.makespan_ns
    assert views[1]["ranks"][0]["wait"] == {}
    first = [event for event in measured.ranks[0] if event[0].kind.is_compute]
    assert views[1]["ranks"][0]["length"] == [end - start for _, start, end in first]
    page([Shown("measured", summarize(file), Measured(((),) * 4))])


def test_more_than_a_page_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [Shown("planned", summarize(example()))]
    for name, most in (("MOST_ACTIONS", 95), ("MOST_RANKS", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(page_module, name, most)
            with pytest.raises(UsageError, match="a page holds no more"):
                page(shown)
    assert page(shown)


_FRAMES = "window.requestAnimationFrame = (draw) => setTimeout(draw, 0);"
"""A headless browser draws frames when it likes; with timers in their place every run is the same."""
_HAND = """
const canvas = document.querySelector("canvas.view"), kept = {};
const box = canvas.getBoundingClientRect();
const at = (share) => box.left + 92 + share * (box.width - 92);
const place = (x) => ({clientX: x, clientY: box.top + 30, pointerId: 1});
const point = (type, x) => canvas.dispatchEvent(new PointerEvent(type, place(x)));
point("pointermove", at(0.01));
kept.tip = document.getElementById("tip").textContent;
point("pointerdown", at(0.01)); point("pointerup", at(0.01));
kept.clicked = document.getElementById("follow").value;
const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", {key: name}));
key("Escape");
kept.all = document.getElementById("follow").value;
const turn = {clientX: at(0.5), deltaY: -200, ctrlKey: true, cancelable: true};
canvas.dispatchEvent(new WheelEvent("wheel", turn));
key("ArrowRight");
setTimeout(() => {
  kept.seen = [document.body.dataset.from, document.body.dataset.to];
  key("0");
  setTimeout(() => {
    kept.whole = [document.body.dataset.from, document.body.dataset.to];
    document.body.dataset.kept = JSON.stringify(kept);
  }, 500);
}, 500);
"""
"""What a hand does: hover, click, let go of the microbatch, zoom, pan, and back to the whole step."""


@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_a_browser_draws_the_page_and_runs_nothing_else(tmp_path: Path) -> None:
    file = replace(example(), origin=HOSTILE, certificate=None)
    summary = summarize(file)
    text = page([Shown(HOSTILE, summary), Shown("measured", summary, measured_like(file))])
    for script, before in ((_FRAMES, "<header>"), (_HAND, "</body>")):
        known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        text = text.replace("script-src '", f"script-src 'sha256-{known}' '")
        text = text.replace(before, f"<script>{script}</script>{before}")
    path = tmp_path / "page.html"
    path.write_text(text)
    shown, png = opened(path, "#theme=light")
    body = dict(Parts(re.search("<body[^>]*>", shown)[0]).attributes)
    assert body["data-ready"] == "yes"
    assert body["data-drawn"] == "192"  # 3 kinds, 8 microbatches, 4 ranks, twice
    assert "data-owned" not in body
    assert shown.count('<canvas class="view"') == 2
    kept = json.loads(body["data-kept"])
    assert kept["tip"].startswith(
        "0F0: forward of stage 0, microbatch 0, on rank 0\n0 ms to 30 ms, takes 30 ms\ntakes 512 MiB"
    )
    assert "on the critical path" in kept["tip"]
    assert (kept["clicked"], kept["all"]) == ("0", "")
    whole = measured_like(file).makespan_ns
    first, last = map(int, kept["seen"])
    assert 0 < first < last < whole
    assert abs(last - first - whole * math.exp(-1)) < whole / 100
    assert kept["whole"] == ["0", str(whole)]
    colours = pixels(png)
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        for shade in KIND_COLOURS[kind][0]:
            assert colours.get(tuple(int(shade[k : k + 2], 16) for k in (1, 3, 5)), 0) > 30
    assert colours[255, 255, 255] > 5_000


def test_what_a_rank_does_once_a_step_is_in_the_page() -> None:
    file = file_of(ONCE)
    summary = summarize(file)
    data = data_of(page([Shown("planned", summary), Shown("measured", summary, measured_like(file))]))
    assert {letter: words for letter, (words, _) in data["once"].items()} == NAMES
    planned, measured = data["views"]
    for rank in range(2):
        wanted = [[o.letter, o.stage, o.start_ns, o.end_ns] for o in once_times(summary.timeline, rank)]
        assert planned["ranks"][rank]["once"] == wanted
        assert [row[0] for row in wanted] == ["G", "G", "R", "R", "U"]
        assert {row[0] for row in measured["ranks"][rank]["once"]} <= {"G", "R"}
    assert planned["end"] == summary.timeline.makespan_ns
    assert all(
        not rank["once"] for rank in data_of(page([Shown("", summarize(example()))]))["views"][0]["ranks"]
    )


@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_a_browser_draws_the_lane_and_says_what_is_in_it(tmp_path: Path) -> None:
    summary = summarize(file_of(ONCE))
    last = once_times(summary.timeline, 0)[-1]
    share = (last.start_ns + last.end_ns) / 2 / summary.timeline.makespan_ns
    script = f"""
    const canvas = document.querySelector("canvas.view"), box = canvas.getBoundingClientRect();
    const place = {{clientX: box.left + 92 + {share} * (box.width - 92), clientY: box.top + 49}};
    canvas.dispatchEvent(new PointerEvent("pointermove", place));
    document.body.dataset.kept = document.getElementById("tip").textContent;
    """
    text = page([Shown("once", summary)])
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{known}' '")
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    shown, _ = opened(path, "#theme=light")
    body = dict(Parts(re.search("<body[^>]*>", shown)[0]).attributes)
    assert body["data-kept"].startswith("update by the optimizer of rank 0, once a step\n")
    actions = sum(a.kind.is_compute for row in summary.timeline.schedule.order for a in row)
    assert body["data-drawn"] == str(actions + 10)  # per rank two gathers, two reductions and an update
    assert "reduction of gradients (REDUCE_GRAD), once a step" in shown
