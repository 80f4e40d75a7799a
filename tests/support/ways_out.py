"""What the processes of `test_ways_out` run: one small pipeline, and everything that may end a call of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.gloo_workers import even_profile, one_f_one_b
from zbcompile.compiler import compiled as compiled_module
from zbcompile.compiler import evaluation as evaluation_module
from zbcompile.compiler import forms as forms_module
from zbcompile.compiler import lower as lower_module
from zbcompile.compiler import planning as planning_module
from zbcompile.compiler import stages as stages_module
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.verbs import Rank
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind

RANKS, MICROBATCHES, LIMIT_S, WIDTH = 4, 4, 4.0, 8
SIZES = (4, 8, 12)
"""Rows of batches that are evaluated; all but one of them stay compiled."""


class Normed(nn.Module):
    """Four times a linear layer, running statistics and a nonlinearity; the last weight may be the first."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))
        self.norm = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(RANKS))
        if tied:
            self.linear[-1].weight = self.linear[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = torch.tanh(norm(linear(x)))
        return x


def make_model(tied: bool = False) -> nn.Module:
    """Return the same weights every time."""
    torch.manual_seed(0)
    return Normed(tied)


def batch(seed: int = 1, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def make_pipeline(**options: Any) -> zbcompile.Pipeline:
    """Return the pipeline, not captured yet."""
    return zbcompile.compile(
        options.pop("model", None) or make_model(),
        **{
            "loss_fn": nn.functional.mse_loss,
            "num_microbatches": MICROBATCHES,
            "profile": even_profile(),
            "placement": "linear",
            "time_limit": 0.3,
            "verify": False,
            "stall_limit": LIMIT_S,
            "num_stages": RANKS,
            "split_points": [f"linear.{k}" for k in range(1, RANKS)],
            **options,
        },
    )


def expected(seed: int = 1, tied: bool = False) -> dict[str, Tensor]:
    """Return the gradients of plain autograd for one step from the first weights."""
    model = make_model(tied)
    x, y = batch(seed)
    for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (nn.functional.mse_loss(model(xs), ys) / MICROBATCHES).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@dataclass
class Seen:
    """How a call ended on one rank: the error's type and text (empty: none), and when."""

    kind: str
    text: str
    at: float
    value: Any = None


def attempt(call: Callable[[], Any]) -> Seen:
    try:
        value = call()
    except BaseException as error:
        return Seen(type(error).__name__, str(error), time.monotonic())
    return Seen("", "", time.monotonic(), value if isinstance(value, Tensor) else None)


class Scene:
    """One rank's pipeline on a group of its own, as it was compiled in the parent process."""

    def __init__(self, rank: int, pipeline: zbcompile.Pipeline, first: dict[str, Tensor]) -> None:
        self.rank, self.pipeline, self._first = rank, pipeline, first
        self.built = pipeline._compiled
        assert self.built is not None
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(first[name])
        pipeline.zero_grad()
        self.built.step_number, self.built._evaluations, pipeline._closed = 0, {}, False
        group = PipelineGroup(None, LIMIT_S)
        with group.calls.building("the test"):
            self.built.run_on(group)
        self.failed_at = 0.0

    def state(self) -> dict[str, Tensor]:
        assert self.built is not None
        return self.built.reader.read()

    def step(self, seed: int = 1, rows: int = 16) -> Seen:
        x, y = batch(seed)
        return attempt(lambda: self.pipeline.step(x[:rows], target=y))

    def eval(self, seed: int = 1, rows: int = 16) -> Seen:
        return attempt(lambda: self.pipeline.eval(batch(seed, rows)[0]))

    def synchronize(self) -> Seen:
        return attempt(self.pipeline.synchronize)

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of this rank's gradients, and forget them."""
        found = {n: p.grad.clone() for n, p in self.pipeline.named_parameters() if p.grad is not None}
        self.pipeline.zero_grad()
        return found

    def buffers_as_before(self) -> bool:
        """Whether this rank's buffers have their first values."""
        names = {n for stage in self.pipeline.local_stages for n, _ in stage.named_buffers()}
        return all(torch.equal(t, self._first[n]) for n, t in self.state().items() if n in names)

    @contextmanager
    def at(self, rank: int, kinds: str, microbatch: int, fault: Callable[[], Any]) -> Any:
        """Let a fault happen on a rank, once, before an action of one of some kinds (letters)."""
        run, left = Rank._run, [self.rank == rank]

        def faulty(end: Rank, now: Kind, stage: int, index: int, *rest: Any) -> Any:
            if left[0] and now.letter in kinds.split() and index == microbatch:
                left[0] = False
                self.failed_at = time.monotonic()
                fault()
            return run(end, now, stage, index, *rest)

        with mock.patch.object(Rank, "_run", faulty):
            yield


def _raise(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def _by_handler() -> None:
    """Have a signal handler raise."""
    old = signal.signal(signal.SIGUSR1, lambda *_: _raise(TimeoutError("too late"))())
    try:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGUSR1, old)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


FATAL: dict[str, tuple[int, str, Callable[[], Any]]] = {
    "KeyboardInterrupt": (0, "F", _interrupt),
    "SystemExit": (2, "B BW", _raise(SystemExit(3))),
    "GeneratorExit": (3, "B BW", _raise(GeneratorExit())),
    "TimeoutError": (1, "F", _by_handler),
    "ValueError": (2, "F", _raise(ValueError("the loss went to the moon"))),
}
"""Name of an error -> the rank that it happens on, before which kinds of action of microbatch 2, and how."""


def fatal(scene: Scene, name: str) -> dict[str, Any]:
    """Fail in a step, then try another, then synchronize."""
    rank, kinds, fault = FATAL[name]
    with scene.at(rank, kinds, 2, fault):
        first = scene.step()
    gradients, buffers = scene.gradients(), scene.buffers_as_before()
    return {
        "first": first,
        "gradients": len(gradients),
        "buffers": buffers,
        "second": scene.step(2),
        "third": scene.synchronize(),
        "failed": scene.pipeline.failed,
        "failed_at": scene.failed_at,
    }


def fatal_in_eval(scene: Scene) -> dict[str, Any]:
    """Ctrl-C in the second evaluation, on rank 2."""
    good = scene.eval()
    with scene.at(2, "F", 1, _interrupt):
        first = scene.eval()
    return {"good": good, "first": first, "second": scene.step(), "failed_at": scene.failed_at}


def fatal_in_hand_over(scene: Scene, name: str) -> dict[str, Any]:
    """Ctrl-C while rank 1 sets its gradients, or an error just before that."""
    real = compiled_module.hand_over if name == "interrupt" else compiled_module.divided

    def faulty(*args: Any) -> Any:
        if scene.rank == 1:
            if name == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            else:
                raise ValueError("no room for gradients")
        return real(*args)

    with mock.patch.object(compiled_module, real.__name__, faulty):
        first = scene.step()
    gradients = scene.gradients()
    time.sleep(0.5)
    return {"first": first, "gradients": gradients, "second": scene.step(2)}


def fatal_in_tied(scene: Scene) -> dict[str, Any]:
    """Fail where a rank sums the gradients of a tied weight that another one waits for."""
    real = Rank.reduce_gradients

    def faulty(end: Rank) -> Any:
        if scene.rank == 0:
            raise ValueError("no sum today")
        return real(end)

    with mock.patch.object(Rank, "reduce_gradients", faulty):
        first = scene.step()
    return {"first": first, "gradients": len(scene.gradients()), "second": scene.step(2)}


def refused(scene: Scene, ranks: tuple[int, ...], times: int = 1) -> dict[str, Any]:
    """Give a short batch on some ranks, then a good one on all."""
    scene.failed_at = time.monotonic()
    first = [scene.step(1, 13 if scene.rank in ranks else 16) for _ in range(times)]
    before = len(scene.gradients())
    good = scene.step()
    return {
        "first": first,
        "gradients before": before,
        "good": good,
        "gradients": scene.gradients(),
        "after": scene.synchronize(),
        "number": scene.pipeline.step_number,
        "failed_at": scene.failed_at,
    }


def refused_while_ahead(scene: Scene, learn: str) -> dict[str, Any]:
    """Rank 3 refuses an evaluation that rank 0 has finished by then; rank 0 learns it later."""
    good = scene.eval()
    if scene.rank == 3:
        time.sleep(1.0)
    first = scene.eval(1, 0 if scene.rank == 3 else 16)
    second = scene.synchronize() if learn == "synchronize" else scene.step()
    scene.gradients()
    third = scene.step()
    return {
        "good": good,
        "first": first,
        "second": second,
        "third": third,
        "gradients": scene.gradients(),
        "number": scene.pipeline.step_number,
    }


def capture_fails(scene: Scene) -> dict[str, Any]:
    """Fail in rank 1's first capture for evaluation; the next step and the next evaluation are right."""
    real = evaluation_module.capture

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if scene.rank == 1:
            scene.failed_at = time.monotonic()
            raise RuntimeError("cannot capture today")
        return real(*args, **kwargs)

    with mock.patch.object(evaluation_module, "capture", faulty):
        first = scene.eval()
    good = scene.step()
    return {
        "first": first,
        "good": good,
        "gradients": scene.gradients(),
        "eval": scene.eval(),
        "failed_at": scene.failed_at,
    }


def closed(scene: Scene) -> dict[str, Any]:
    """Close rank 1's pipeline, and call it; the others are in a step meanwhile."""
    good = scene.step()
    if scene.rank == 1:
        scene.pipeline.close()
        return {"good": good, "calls": [scene.step(), scene.eval(), scene.synchronize()]}
    return {"good": good, "first": scene.step(2)}


def missing(scene: Scene, where: str) -> dict[str, Any]:
    """Rank 3 stays away for longer than the limit."""
    scene.step()
    scene.synchronize()
    scene.failed_at = time.monotonic()
    if scene.rank == 3:
        time.sleep(LIMIT_S + 4.0)
        return {"first": scene.step(), "failed_at": scene.failed_at}
    first = {"step": scene.step, "eval": scene.eval, "synchronize": scene.synchronize}[where]()
    time.sleep(max(0.0, scene.failed_at + LIMIT_S + 3.0 - time.monotonic()))
    return {"first": first, "failed_at": scene.failed_at}


def apart(scene: Scene) -> dict[str, Any]:
    """Ranks 1 and 3 ask for the norms of gradients while the others synchronize."""
    scene.step()
    scene.gradients()
    norms = scene.rank in (1, 3)
    first = attempt(scene.pipeline.grad_norms) if norms else scene.synchronize()
    return {
        "first": first,
        "second": scene.synchronize(),
        "good": scene.step(),
        "gradients": scene.gradients(),
    }


def many_sizes(scene: Scene) -> dict[str, Any]:
    """Evaluate one size more than stay compiled, sizes that were lost and kept, and an empty batch."""
    rows = [*SIZES, 4, 12, 8]
    assert scene.built is not None
    with mock.patch.object(compiled_module, "MAX_EVALUATIONS", len(SIZES) - 1):
        seen = [scene.eval(1, n) for n in rows]
    return {
        "rows": rows,
        "seen": seen,
        "empty": scene.eval(1, 0),
        "kept": len(scene.built._evaluations),
        "good": scene.step(),
        "gradients": scene.gradients(),
    }


SCENES: dict[str, Callable[[Scene], dict[str, Any]]] = {
    **{f"fatal {name}": (lambda scene, name=name: fatal(scene, name)) for name in FATAL},
    "fatal in eval": fatal_in_eval,
    "interrupt in hand_over": lambda scene: fatal_in_hand_over(scene, "interrupt"),
    "error before hand_over": lambda scene: fatal_in_hand_over(scene, "error"),
    "tied": fatal_in_tied,
    "refused by all": lambda scene: refused(scene, (0, 1, 2, 3)),
    "refused by one": lambda scene: refused(scene, (1,)),
    "refused by two, three times": lambda scene: refused(scene, (0, 2), 3),
    "ahead, synchronize": lambda scene: refused_while_ahead(scene, "synchronize"),
    "ahead, step": lambda scene: refused_while_ahead(scene, "step"),
    "capture fails": capture_fails,
    "closed": closed,
    "missing in step": lambda scene: missing(scene, "step"),
    "missing in eval": lambda scene: missing(scene, "eval"),
    "missing in synchronize": lambda scene: missing(scene, "synchronize"),
    "apart": apart,
    "many sizes": many_sizes,
}


def play(rank: int, pipelines: dict[str, zbcompile.Pipeline], names: list[str]) -> dict[str, Any]:
    """Play scenes, each on a new group of all ranks; return what this rank saw."""
    firsts = {
        name: {n: t.detach().clone() for n, t in pipeline._compiled.reader.read().items()}  # type: ignore[union-attr]
        for name, pipeline in pipelines.items()
    }
    found: dict[str, Any] = {}
    for name in names:
        which = "tied" if name == "tied" else "plain"
        scene = Scene(rank, pipelines[which], firsts[which])
        found[name] = SCENES[name](scene)
        scene.pipeline.close()
    return found


# Builds: every process compiles for itself.


@contextmanager
def failing(place: Any, name: str, bad: bool, fault: Callable[[], Any]) -> Any:
    """Let a fault happen on one rank instead of a function of the compiler."""
    real = getattr(place, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return fault() if bad else real(*args, **kwargs)

    with mock.patch.object(place, name, faulty):
        yield


BUILDS: dict[str, tuple[int, Any, str, BaseException]] = {
    "capture": (1, stages_module, "capture", RuntimeError("not this model")),
    "interrupt": (2, stages_module, "partition", KeyboardInterrupt()),
    "measure": (0, planning_module, "measure", ValueError("no clock")),
    "plan": (0, planning_module, "solve", MemoryError("no room for the search")),
    "codegen": (2, lower_module, "emit", ValueError("no paper left")),
    "load": (3, compiled_module, "make_reader", ValueError("no glasses")),
}
"""Step of the compiler -> the rank that fails in it, the function that fails, and how."""


def build_all(rank: int) -> dict[str, Any]:
    """Fail to compile in all ways, then compile, step, and leave in the wrong order."""
    x, y = batch()
    found: dict[str, Any] = {}

    def build(**options: Any) -> Seen:
        return attempt(lambda: make_pipeline(example_args=(x,), example_target=y, **options).close())

    for name, (bad, place, function, error) in BUILDS.items():
        told = [0.0]

        def fault(error: BaseException = error, told: list[float] = told) -> None:
            told[0] = time.monotonic()
            raise error

        with failing(place, function, rank == bad, fault):
            seen = build(profile=None if name == "measure" else even_profile())
        found[name] = {"seen": seen, "failed_at": told[0]}
    found["infeasible"] = build(memory_limit=10)
    start = time.monotonic()
    if rank == 3:
        time.sleep(LIMIT_S + 4.0)
    found["missing"] = {"seen": build(), "failed_at": start}
    time.sleep(max(0.0, start + LIMIT_S + 4.0 - time.monotonic()))
    with make_pipeline() as pipeline:
        pipeline.step(x, target=y)
        found["gradients"] = {n: p.grad for n, p in pipeline.named_parameters()}
        pipeline.synchronize()
        dist.destroy_process_group()
    found["left"] = attempt(lambda: pipeline.step(x, target=y))
    return found


def otherwise() -> dict[str, Any]:
    """Return every option that ranks must be asked for alike, and another value of it."""
    return {
        "num_stages": 3,
        "num_microbatches": 8,
        "memory_limit": 1 << 40,
        "placement": "v",
        "objective": "makespan",
        "transport": "rendezvous",
        "profile": Profile.uniform(StageCost.simple(1, 1, 1), 4),
        "schedule": one_f_one_b(),
        "num_ranks": RANKS,
        "seed": 1,
        "recompute": "full",
        "backend": "inductor",
        "verify": None,
        "time_limit": 0.25,
        "one_communicator": True,
        "scale_grads": False,
        "whole": ("nothing",),
        "constant": (0,),
        "batch_dim": {0: 0},
        "result_dim": 0,
        "other_shapes": "refuse",
        "stall_limit": LIMIT_S + 1,
        "free_model": True,
        "gradient_dtype": torch.float32,
        "accumulate": "memory",
        "kept_gradients": True,
        "post_validation": True,
        "microbatch_costs": (1, 2, 1, 1),
    }


def options_differ(rank: int) -> dict[str, Seen]:
    """Ask for something else on rank 2 alone, option by option."""
    x, y = batch()
    staged = forms_module.build_stages(
        make_model(), RANKS, (x[:4],), target=y[:4], loss_fn=nn.functional.mse_loss, verify=False
    )
    found = {}
    for name, value in otherwise().items():
        options = {name: value} if rank == 2 else {}

        def build(options: dict[str, Any] = options) -> None:
            make_pipeline(example_args=(x,), example_target=y, **options)

        with mock.patch.object(forms_module, "build_stages", return_value=staged):
            found[name] = attempt(build)
    return found
