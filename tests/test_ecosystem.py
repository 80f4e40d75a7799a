"""The Hugging Face example, the pages for other frameworks, and the table of what is tested."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zbcompile
from examples.huggingface import batches, build_model, main
from tests.support.clean_process import in_clean_process
from tests.support.places import ROOT
from zbcompile.runtime.launch import spawn

DOCS = ROOT / "docs" / "howto"
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


def printed_by_the_example(file: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(file)
    return text.getvalue()


def on_a_rank(rank: int, file: str) -> str:
    return printed_by_the_example(file)


def alone_and_on_four_ranks(folder: Path) -> tuple[str, list[str]]:
    """Return what both print. They plan briefly: the bits do not depend on the order that is found."""
    zbcompile.compile.__kwdefaults__["time_limit"] = 0.5
    alone = printed_by_the_example(str(folder / "alone.safetensors"))
    return alone, spawn(on_a_rank, 4, (str(folder / "ranks.safetensors"),), timeout_s=140, inherit=True)


@pytest.mark.timeout(300)
def test_the_hugging_face_example_trains_like_the_plain_loop_alone_and_on_four_ranks(tmp_path: Path) -> None:
    alone, there = in_clean_process(alone_and_on_four_ranks, tmp_path)
    trained, printed = plain_loop(table_by_stage=True)
    assert alone.splitlines() == printed
    assert there == [alone, "", "", ""]
    for name in ("alone", "ranks"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == trained.keys()
        assert all(torch.equal(value, trained[key]) for key, value in found.items())


def test_the_tied_table_alone_has_gradients_that_are_summed_in_another_order() -> None:
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


BEFORE = """
import torch, zbcompile
from transformers import LlamaForCausalLM
from examples.huggingface import batches, build_model
build_model().save_pretrained(folder)
ids = next(batches())["input_ids"]
labels = ids.clone()
labels[0, 20:] = labels[3, 7:] = -100
mask = (labels != -100).long()
"""
AFTER = """
assert losses
for saved, parameter in zip(trained.parameters(), model.parameters(), strict=True):
    assert torch.equal(saved, parameter)
found = [p.grad for p in model.parameters()]
model.zero_grad()
model(**batch).loss.backward()
for grad, parameter in zip(found, model.parameters(), strict=True):  # sums of microbatches round otherwise
    torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-6)
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(200)
def test_the_hugging_face_page_runs(tmp_path: Path) -> None:
    own = [text for text in blocks("huggingface.md") if "Trainer" not in text]
    assert len(own) == 3
    source = BEFORE + "\n".join(own) + AFTER
    exec(compile(source, "huggingface.md", "exec"), {"folder": str(tmp_path / "llama")})  # noqa: S102


@pytest.mark.parametrize(
    ("page", "package", "count"),
    [
        ("huggingface.md", "transformers", 4),
        ("lightning.md", "lightning", 2),
        ("accelerate.md", "accelerate", 1),
    ],
)
def test_pages_are_python_and_say_what_they_were_tried_with(page: str, package: str, count: int) -> None:
    text = (DOCS / page).read_text()
    assert re.search(rf"Tried with {package} \d+\.\d+[.\d]* on torch 2\.\d+", text)
    for block in blocks(page):
        compile(block, page, "exec")
    assert len(blocks(page)) == count


def test_every_test_that_the_table_of_practices_names_exists() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (DOCS / "training.md").read_text(), re.MULTILINE)
    start = [row[0] for row in rows].index("practice") + 1
    end = [row[1] for row in rows].index("what happens")
    assert end - start > 30
    for practice, *cells in rows[start:end]:
        if set(practice) == {"-"}:
            continue
        for cell in cells:
            named = re.fullmatch(r"`([\w/]+\.py)::(\w+)`", cell)
            assert named or cell.startswith("none: "), (practice, cell)
            if named:
                file, test = named.groups()
                assert f"def {test}(" in (ROOT / "tests" / file).read_text(), (practice, cell)
