"""Counted costs against measured ones, stage by stage, on this CPU.

    python benchmarks/counted.py [gpt2] [llama] [--hidden 512] [--seq 256] [--batch 4] [--repeats 5]

The counted side uses the roofline of `measure_cpu`: one matrix product, one copy, one empty call and a few
slow element-wise functions, timed before the stages are. Nothing is fitted to the stages themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.profile.calibration import calibration_report


def gpt2(hidden: int, seq: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4,
            n_embd=hidden,
            n_head=hidden // 64,
            n_positions=seq,
            vocab_size=4096,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama(hidden: int, seq: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 64 * 64,
            num_attention_heads=hidden // 64,
            max_position_embeddings=seq,
            vocab_size=4096,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], default=[])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    for name in arguments.models or MODELS:
        torch.manual_seed(0)
        model = MODELS[name](arguments.hidden, arguments.seq)
        ids = torch.randint(3, 4096, (arguments.batch, arguments.seq))
        example: dict[str, Any] = {"input_ids": ids, "labels": ids}
        built = build_stages(model, 2, (), example)
        batch = built.flat_inputs((), example)
        report = calibration_report(built.stages, built.captured.state, batch, repeats=arguments.repeats)
        print(f"{name}: batch {arguments.batch}, seq {arguments.seq}, hidden {arguments.hidden}")
        print(report)
        print(f"load average {os.getloadavg()[0]:.1f}\n")


if __name__ == "__main__":
    main()
