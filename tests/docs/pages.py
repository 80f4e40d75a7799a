"""Every page of the site, with its tests, and the names that its Python blocks find.

``blocks`` stands for `tests.docs.test_blocks`: all blocks of the page that are not marked otherwise run.
Other entries are tests that hold the page's words against the code.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PAGES", "SETUPS"]

PAGES: Final[dict[str, tuple[str, ...]]] = {
    "index.md": ("test_site.py::test_links_lead_somewhere",),
    "first-lesson.md": ("blocks",),
    "examples.md": ("test_site.py::test_every_example_is_on_its_page",),
    "concepts/pipeline.md": ("blocks", "test_site.py::test_pictures_are_what_the_tool_draws"),
    "concepts/memory.md": ("blocks",),
    "concepts/placements.md": ("blocks", "test_site.py::test_placements_are_those_of_the_code"),
    "concepts/compiler.md": ("blocks",),
    "concepts/words.md": ("test_site.py::test_words_are_in_order_and_said_once",),
    "howto/training.md": (
        "blocks",
        "../test_ecosystem.py::test_every_test_that_the_table_of_practices_names_exists",
    ),
    "howto/memory-cap.md": ("blocks",),
    "howto/recompute.md": ("blocks",),
    "howto/torchrun.md": ("blocks",),
    "howto/checkpoints.md": (
        "blocks",
        "../benchmarks/test_training_lines.py::"
        "test_both_variants_end_in_the_same_weights_and_their_lines_are_those_of_the_docs",
    ),
    "howto/data-parallel.md": ("../pipeline/test_mesh.py", "../pipeline/test_hybrid.py"),
    "howto/tensor-parallel.md": (
        "../pipeline/test_peers.py",
        "../pipeline/test_shards.py",
        "../examples/test_tensor_parallel.py",
    ),
    "howto/export.md": ("blocks", "../pipeline/test_interop_torch.py"),
    "howto/meta.md": ("blocks",),
    "howto/questions.md": ("../test_questions.py", "blocks"),
    "howto/wrong-gradient.md": ("blocks",),
    "howto/hang.md": ("blocks", "test_site.py::test_what_the_watchdog_says_is_in_the_code"),
    "howto/out-of-memory.md": ("blocks",),
    "howto/slow-plan.md": ("blocks",),
    "howto/huggingface.md": ("../test_ecosystem.py::test_the_hugging_face_page_runs",),
    "howto/lightning.md": ("../test_ecosystem.py::test_pages_are_python_and_say_what_they_were_tried_with",),
    "howto/accelerate.md": ("../test_ecosystem.py::test_pages_are_python_and_say_what_they_were_tried_with",),
    "coming-from/torch.md": ("blocks", "test_site.py::test_names_of_torch_exist"),
    "coming-from/torchtitan.md": ("test_site.py::test_our_arguments_in_the_tables_exist",),
    "coming-from/megatron.md": ("blocks", "test_site.py::test_our_arguments_in_the_tables_exist"),
    "coming-from/deepspeed.md": ("blocks", "test_site.py::test_our_arguments_in_the_tables_exist"),
    "planner/search.md": ("blocks", "test_site.py::test_every_part_and_method_of_the_planner_is_described"),
    "planner/proofs.md": ("blocks", "test_site.py::test_every_part_and_method_of_the_planner_is_described"),
    "planner/decisions.md": ("test_site.py::test_files_that_pages_name_exist",),
    "reference/api.md": ("test_site.py::test_every_public_name_has_its_reference",),
    "reference/cli.md": ("blocks", "test_site.py::test_every_command_has_a_section_with_its_example"),
    "reference/gpu-check.md": ("../selftest/test_selftest.py::test_every_section_runs_on_a_cpu",),
    "reference/send-modes.md": ("test_site.py::test_every_send_mode_is_defined",),
    "reference/files.md": ("blocks", "test_site.py::test_every_field_of_a_format_is_described"),
    "reference/runtime.md": ("blocks",),
    "reference/split.md": ("test_site.py::test_files_that_pages_name_exist",),
    "reference/costs.md": ("test_site.py::test_files_that_pages_name_exist",),
    "reference/show.md": ("blocks",),
    "releases.md": ("../test_public_api.py::test_the_public_api_is_the_one_that_is_written_down",),
    "limits.md": ("test_site.py::test_links_lead_somewhere",),
    "architecture.md": ("test_site.py::test_files_that_pages_name_exist",),
    "RESULTS.md": ("test_site.py::test_links_lead_somewhere",),
    "CONTRIBUTING.md": ("test_site.py::test_make_targets_exist",),
    "CHANGELOG.md": ("../test_packaging.py::test_the_version_is_said_once_everywhere",),
}

_TRAINING = """
import torch, zbcompile as whole
from torch import nn
class Quick:
    def __getattr__(self, name):
        return getattr(whole, name)
    def compile(self, *args, **options):
        return whole.compile(*args, **({"time_limit": 0.5} | options))
zbcompile = Quick()
torch.manual_seed(0)
def build_model():
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
model = build_model()
loss_fn = nn.functional.mse_loss
inputs, targets = torch.randn(16, 64), torch.randn(16, 64)
data = [(inputs, targets)]
"""
_PIPELINE = (
    _TRAINING
    + """
def build_pipeline():
    return zbcompile.compile(
        model, 2, example_args=(inputs,), example_target=targets, loss_fn=loss_fn, num_microbatches=4
    )
pipeline = build_pipeline()
optimizer = torch.optim.AdamW(pipeline.parameters())
pipeline.step(inputs, target=targets)
optimizer.step()
"""
)
SETUPS: Final[dict[str, str]] = {
    "concepts/compiler.md": _TRAINING,
    "concepts/memory.md": "equal.json",
    "concepts/pipeline.md": "equal.json",
    "concepts/placements.md": "equal.json",
    "howto/memory-cap.md": _TRAINING,
    "howto/recompute.md": _TRAINING,
    "howto/wrong-gradient.md": _TRAINING,
    "howto/training.md": _TRAINING + "x, y = inputs, targets\n",
    "howto/checkpoints.md": _PIPELINE
    + """
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
)
position = 3
""",
    "howto/meta.md": _TRAINING
    + """
from safetensors.torch import save_file
save_file(model.state_dict(), "model.safetensors")
""",
    "reference/runtime.md": _PIPELINE + "folder, position = 'checkpoint', 3\n",
    "howto/export.md": "plans",
    "reference/show.md": "plans",
    "coming-from/torch.md": _TRAINING,
    "coming-from/deepspeed.md": _TRAINING,
}
"""Python that runs before the first block of a page; or the name of files that the page has beside it."""
