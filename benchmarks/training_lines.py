"""Lines of user code for clipping, AdamW and checkpoints over two ranks: ours, and torch's.

    python -m benchmarks.training_lines

The other variant is torch.distributed.pipelining. Both train the same model in two stages, three steps; and
once more with a stop after two: saved, made anew, loaded. They must end in the same weights. What is counted
is the statements of the functions here, which is lines where each fits on one.

The last line counts what `examples/tensor_parallel.py` writes for its parallelism: all but model, data, loop.
"""

from __future__ import annotations

import ast
import copy
import inspect
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import AdamW, Optimizer

import zbcompile
from zbcompile.runtime.launch import spawn

State = dict[str, Tensor]
MICROBATCHES, SIZE, LAYERS = 4, 16, 4


class Model(nn.Module):
    """Layers in a dict, so that a part of the model keeps their names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(k): nn.Linear(SIZE, SIZE) for k in range(LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, SIZE, generator=generator), torch.randn(8, SIZE, generator=generator)


# What a user of torch.distributed.pipelining writes.


def torch_optimizer(part: nn.Module) -> Optimizer:
    return AdamW(part.parameters(), lr=0.01)


def torch_clip(part: nn.Module) -> None:
    grads = [p.grad for p in part.parameters() if p.grad is not None]
    total = nn.utils.get_total_norm(grads) ** 2
    dist.all_reduce(total)
    nn.utils.clip_grads_with_norm_(part.parameters(), 0.1, total.sqrt())


def torch_options() -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=True)


def torch_save(part: nn.Module, optimizer: Optimizer, step: int, folder: str) -> None:
    model, optim = get_state_dict(part, optimizer, options=torch_options())
    dcp.save({"model": model, "optim": optim, "step": step}, checkpoint_id=folder)


def torch_load(part: nn.Module, optimizer: Optimizer, folder: str) -> int:
    model, optim = get_state_dict(part, optimizer, options=torch_options())
    state: dict[str, Any] = {"model": model, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(part, optimizer, model_state_dict=model, optim_state_dict=optim, options=torch_options())
    return int(state["step"])


# What a user of zbcompile writes.


def our_optimizer(pipeline: zbcompile.Pipeline) -> Optimizer:
    return AdamW(pipeline.parameters(), lr=0.01)


def our_clip(pipeline: zbcompile.Pipeline) -> None:
    pipeline.clip_grad_norm_(0.1)


def our_save(pipeline: zbcompile.Pipeline, optimizer: Optimizer, folder: str) -> None:
    pipeline.save(folder, optimizer)


def our_load(pipeline: zbcompile.Pipeline, optimizer: Optimizer, folder: str) -> None:
    pipeline.load(folder, optimizer)


def with_torch(rank: int, folder: str) -> tuple[State, State]:
    """Return this rank's weights after three steps, without a stop and with one."""

    def train(part: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        for step in range(first, last):
            inputs, target = batch(step)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target)
            torch_clip(part)
            optimizer.step()

    whole = Model()
    for name in [k for k in whole.layers if int(k) // (LAYERS // 2) != rank]:
        del whole.layers[name]
    part = copy.deepcopy(whole)
    optimizer = torch_optimizer(part)
    train(part, optimizer, 0, 2)
    torch_save(part, optimizer, 2, folder)
    train(part, optimizer, 2, 3)
    optimizer = torch_optimizer(whole)
    train(whole, optimizer, torch_load(whole, optimizer, folder), 3)
    return dict(part.state_dict()), dict(whole.state_dict())


def with_ours(rank: int, folder: str) -> tuple[State, State]:
    """Return this rank's weights after three steps, without a stop and with one."""

    def compiled() -> zbcompile.Pipeline:
        inputs, target = batch(0)
        return zbcompile.compile(
            Model(),
            2,
            example_args=(inputs,),
            example_target=target,
            loss_fn=nn.functional.mse_loss,
            num_microbatches=MICROBATCHES,
            split_points=["layers.2"],
            time_limit=0.3,
        )

    def train(pipeline: zbcompile.Pipeline, optimizer: Optimizer, last: int) -> None:
        while pipeline.step_number < last:
            inputs, target = batch(pipeline.step_number)
            optimizer.zero_grad()
            pipeline.step(inputs, target=target)
            our_clip(pipeline)
            optimizer.step()

    one, other = compiled(), compiled()
    optimizer = our_optimizer(one)
    train(one, optimizer, 2)
    our_save(one, optimizer, folder)
    train(one, optimizer, 3)
    optimizer = our_optimizer(other)
    our_load(other, optimizer, folder)
    train(other, optimizer, 3)
    states = dict(one.state_dict()), dict(other.state_dict())
    one.synchronize()
    other.synchronize()
    return states


def lines(*functions: Callable[..., Any]) -> int:
    """Return the lines of code in the bodies of functions, one for each statement."""
    definitions = [ast.parse(inspect.getsource(function)).body[0] for function in functions]
    return sum(len(d.body) for d in definitions if isinstance(d, ast.FunctionDef))


EXAMPLE = Path(__file__).parent.parent / "examples" / "tensor_parallel.py"
WRITTEN = (
    "CUT",
    "CopyToShards",
    "SumOverShards",
    "keep_shard",
    "shard_llama",
    "two_by_two",
    "compile_together",
)
"""What of the example a user owns for stages, replicas (one more dimension of the mesh) and shards."""


def statements(file: Path, names: Collection[str]) -> int:
    """Return the statements of some functions, classes and constants of a file, those in blocks too.

    Docstrings and the lines that begin a function or a class are not counted.
    """
    count, left = 0, set(names)
    for node in ast.parse(file.read_text()).body:
        name = getattr(node, "name", None) or ast.unparse(getattr(node, "targets", [node])[0])
        if name in left:
            left.remove(name)
            count += sum(map(_counts, ast.walk(node)))
    if left:
        raise ValueError(f"{file.name} has no {sorted(left)}")
    return count


def _counts(node: ast.AST) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not text and not isinstance(node, ast.FunctionDef | ast.ClassDef)


VARIANTS = {
    "torch.distributed.pipelining": (
        with_torch,
        (torch_options, torch_optimizer, torch_clip, torch_save, torch_load),
    ),
    "zbcompile": (with_ours, (our_optimizer, our_clip, our_save, our_load)),
}


def measure() -> dict[str, int]:
    """Run both variants and compare what they end with; return the lines of each."""
    ends: list[State] = []
    for run, _ in VARIANTS.values():
        with tempfile.TemporaryDirectory() as folder:
            parts = spawn(run, 2, (str(Path(folder) / "saved"),), timeout_s=120, inherit=True)
        for k in range(2):
            ends.append({name: tensor for part in parts for name, tensor in part[k].items()})
    for end in ends[1:]:
        assert end.keys() == ends[0].keys()
        for name, tensor in end.items():
            torch.testing.assert_close(tensor, ends[0][name], rtol=1e-6, atol=1e-7)
    return {name: lines(*functions) for name, (_, functions) in VARIANTS.items()}


if __name__ == "__main__":
    for name, count in measure().items():
        print(f"{name:30} {count:3} lines: optimizer, clipping, saving, loading")
    print(f"{EXAMPLE.name:30} {statements(EXAMPLE, WRITTEN):3} statements: stages, replicas, shards")
