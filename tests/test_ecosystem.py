"""The example and the pages for Hugging Face, Lightning and accelerate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.huggingface import batches, build_model
from tests.support.places import EXAMPLES, ROOT

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def plain_loop(table_by_stage: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Train as the example does, without a pipeline; return the weights and what is printed.

    ``table_by_stage``: the gradients that the table gets as embedding are summed first, then those that it
    gets as head: the order of a pipeline whose first and last stage hold it.
    """
    model = build_model()
    parameters = list(model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if table_by_stage:
        head.weight = nn.Parameter(table.detach().clone())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    printed = []
    for step, batch in enumerate(batches()):
        model.zero_grad()
        losses = []
        for k in range(8):
            loss = model(**{name: rows[k : k + 1] for name, rows in batch.items()}).loss
            loss.backward()
            losses.append(loss.detach())
        if table_by_stage:
            table.grad += head.weight.grad
        for parameter in parameters:
            parameter.grad.div_(8)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if table_by_stage:
            head.weight.data.copy_(table)
        printed.append(f"step {step}: loss {torch.stack(losses).mean():.6f}, norm {norm:.6f}")
    return {name: p.detach() for name, p in model.named_parameters() if name != HEAD}, printed


@pytest.mark.timeout(300)
def test_the_hugging_face_example_trains_like_the_plain_loop_alone_and_under_torchrun(tmp_path: Path) -> None:
    trained, printed = plain_loop(table_by_stage=True)
    for how in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]):
        file = tmp_path / f"{len(how)}.safetensors"
        done = subprocess.run(
            [sys.executable, *how, str(EXAMPLES / "huggingface.py"), str(file)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            timeout=140,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines() == printed
        found = load_file(file)
        assert found.keys() == trained.keys()
        assert all(torch.equal(value, trained[name]) for name, value in found.items())


def test_the_tied_table_alone_has_gradients_that_are_summed_in_another_order() -> None:
    import zbcompile

    model, reference, batch = build_model(), build_model(), next(batches())
    pipeline = zbcompile.compile(model, 4, example_kwargs=batch, num_microbatches=8, time_limit=0.3)
    pipeline.step(**batch)
    for k in range(8):
        reference(**{name: rows[k : k + 1] for name, rows in batch.items()}).loss.backward()
    for (name, wanted), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        if name == TABLE:  # autograd adds both uses of a microbatch; stages add their own microbatches first
            assert not torch.equal(found.grad, wanted.grad / 8)
            assert torch.allclose(found.grad, wanted.grad / 8, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found.grad, wanted.grad / 8), name
