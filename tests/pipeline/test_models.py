"""Every model of data/models.md: right against autograd of the untouched model, or refused by name.

One line per model; ``make models`` shows them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.support.frontend_helpers import Batch, compare, run_autograd, run_stages, state_of
from tests.support.model_zoo import (
    BERT,
    PLAIN,
    TRANSFORMERS,
    Branching,
    Case,
    Recurrent,
    first_mean,
    hugging,
    square,
)
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError, CutError

CASES = {**PLAIN, **TRANSFORMERS}


def _say(capfd: pytest.CaptureFixture[str], line: str) -> None:
    with capfd.disabled():
        sys.stderr.write(line + "\n")


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("name", CASES)
def test_model_equals_autograd(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case: Case = CASES[name]
    torch.manual_seed(0)
    model = case.build().train(case.train)
    batches = [case.batch() for _ in range(2)]
    args, kwargs, target = batches[0]
    start = time.perf_counter()
    built = build_stages(model, 3, args, kwargs, target=target, loss_fn=case.loss)
    seconds = time.perf_counter() - start
    torch.manual_seed(1)
    expected, reference = run_autograd(model, batches, case.loss)
    verdicts = []
    for fused in (False, True):
        mine = copy.deepcopy(model)
        torch.manual_seed(1)
        results, grads = run_stages(built, state_of(mine), batches, fused=fused)
        verdicts.append(compare(expected, reference, results, grads, mine))
    stages = len(built.stages)
    _say(capfd, f"{name:28s} {verdicts[0]} (fused: {verdicts[1]}), {stages} stages in {seconds:.1f} s")
    if case.divided:
        holders = Counter(path for stage in built.stages for path in stage.parameters)
        assert all(holders[path] > 1 for v in verdicts for path in v.wrong)
        assert all(float(v.text) <= 1e-6 for v in verdicts if v.wrong)
    else:
        assert [v.text for v in verdicts] == ["bitwise", "bitwise"]


class _OnlyGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def _layerdrop() -> nn.Module:
    model = TRANSFORMERS["wav2vec2"].build()
    model.config.layerdrop = 0.1  # type: ignore[union-attr, assignment]
    return model


def _longformer() -> nn.Module:
    return hugging("LongformerConfig", "LongformerModel", attention_window=4, **BERT)()


def _masked() -> Batch:
    """A batch with a mask: without one Longformer makes its own, whose values are known."""
    args, kwargs, target = TRANSFORMERS["bert"].batch()
    return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}, target


def _replicated() -> nn.Module:
    """Return a module with the class that torch's ``replicate`` gives it."""
    model = nn.Linear(4, 4)
    mixin = type("DDP", (), {"__module__": "torch.distributed._composable.replicate"})
    model.__class__ = type("DDPLinear", (mixin, nn.Linear), {})
    return model


def _rows(*shape: int) -> Callable[[], Batch]:
    return lambda: ((torch.randn(*shape),), {}, torch.randn(*shape))


@dataclass(frozen=True)
class Refusal:
    """A model that must be refused, with the words that its error must contain."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[..., torch.Tensor]
    error: type[Exception]
    words: tuple[str, ...]


REFUSED = {
    "longformer": Refusal(
        _longformer, _masked, first_mean, CaptureError,
        ("tensor data", "modeling_longformer.py:", "encoder.layer.0"),
    ),
    "wav2vec2 with layerdrop": Refusal(
        _layerdrop, TRANSFORMERS["wav2vec2"].batch, first_mean, CaptureError,
        ("a random draw decides", "modeling_wav2vec2.py:", "layerdrop=0.0"),
    ),
    "a branch on data": Refusal(
        Branching, _rows(2, 4), square, CaptureError, ("tensor data", "model_zoo.py:")
    ),
    "GRU in 3 stages": Refusal(
        _OnlyGRU, _rows(2, 5, 8), square, CutError, ("3 stages wanted", "aten.gru", "'rnn'")
    ),
    "fewer cut points than stages": Refusal(
        lambda: nn.Linear(4, 4), _rows(2, 4), square, CutError,
        ("3 stages wanted, 1 legal cut point", "aten.linear"),
    ),
    "DataParallel": Refusal(
        lambda: nn.DataParallel(nn.Linear(4, 4)), _rows(2, 4), square, CaptureError,
        ("DataParallel", "plain model"),
    ),
    "replicate": Refusal(
        _replicated, _rows(2, 4), square, CaptureError, ("wrapped by replicate", "plain model")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_by_name(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = REFUSED[name]
    model = case.build().train()
    args, kwargs, target = case.batch()
    with pytest.raises(case.error) as caught:
        build_stages(model, 3, args, kwargs, target=target, loss_fn=case.loss)
    text = str(caught.value)
    _say(capfd, f"{name:28s} refused: {text.splitlines()[0]}")
    for word in case.words:
        assert word in text


def test_gru_alone_is_a_stage_of_its_own() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.GRU)
    batches = [((torch.randn(2, 5, 8),), {}, torch.randn(2, 5, 8)) for _ in range(2)]
    built = build_stages(model, 3, *batches[0][:2], target=batches[0][2], loss_fn=square)
    expected, reference = run_autograd(model, batches, square)
    mine = copy.deepcopy(model)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"
