"""Plans from a Hugging Face configuration: counted on the meta device, and refused where it is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zbcompile.cli.main import main
from zbcompile.compiler.stages import build_stages
from zbcompile.formats import schedule_json
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.schedule.devices import device_named

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **SIZES}


def written(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_configuration_is_counted_as_its_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path, LLAMA), tmp_path / "plan.json"
    asked = ["--hf-config", path, "--device", "h100", "--ranks", "2", "--microbatches", "4"]
    assert main(["plan", *asked, "--sequence", "8", "--microbatch-size", "3", "-o", str(out)]) == 0
    assert "building llama without weights: bfloat16, 3 x 8 tokens" in capsys.readouterr().err
    problem = schedule_json.loads(out.read_text()).problem
    assert problem is not None
    device = device_named("H100")
    assert problem.caps == (device.memory_bytes,) * 2
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).to(torch.bfloat16)
        ids = torch.zeros(3, 8, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    staged = build_stages(model, 2, (), inputs, planned_for=device, num_microbatches=4)
    assert problem.profile == counted_profile(staged.stages, device)


def test_a_sweep_over_devices_and_stages_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {**LLAMA, "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2})
    asked = ["--hf-config", path, "--ranks", "2", "--device", "A100", "H100", "--sequence", "4"]
    assert main(["sweep", *asked, "--time-limit", "60", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["device"] for row in rows] == ["A100", "H100"]
    assert rows[1]["value_ns"] < rows[0]["value_ns"]


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        (LLAMA, ["--device", "abacus"], "unknown device 'abacus'"),
        (LLAMA, [], "--device is missing"),
        ([], ["--device", "H100"], "expected an object"),
        ({**LLAMA, "model_type": "llama99"}, ["--device", "H100"], "does not know the model type 'llama99'"),
        ({}, ["--device", "H100"], "does not know the model type 'None'"),
        ({"model_type": "vit"}, ["--device", "H100"], "no causal or masked language model"),
        ({**LLAMA, "num_hidden_layers": 10**9}, ["--device", "H100"], "too many layers"),
        ({**LLAMA, "num_attention_heads": "x"}, ["--device", "H100"], "transformers cannot build this llama"),
        ({**LLAMA, "quantization_config": {}}, ["--device", "H100"], "quantized weights are not trained"),
        ({**LLAMA, "torch_dtype": "int8"}, ["--device", "H100"], "a model in 'int8' is not trained"),
        (LLAMA, ["--device", "H100", "--f", "1ms"], "--hf-config and --f both state costs"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, more: list[str], words: str
) -> None:
    assert main(["plan", "--hf-config", written(tmp_path, config), "--ranks", "2", *more]) == 2
    assert words in capsys.readouterr().err


def test_options_of_a_configuration_say_nothing_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "2", "--f", "1ms", "--b", "1ms", "--w", "1ms", "--sequence", "8"]) == 2
    assert "--sequence says nothing without --hf-config" in capsys.readouterr().err
