"""Recurrent layers on the CPU with the bits that eager gives.

``aten.lstm / gru / rnn call --> function for the joint trace``. On fake tensors ``aten.lstm`` is taken apart
into matmuls, which round differently. Eager calls oneDNN's fused layer; `fused_lstm` makes the same calls, so
that a split stage equals eager to the bit. One fused call is indivisible: its backward is wholly in B.
`_gru_layer` computes the gates in the layout of eager's, whose vector kernels end with each row. torch's own
way of taking several layers apart forgets the dropout between them; `layer_by_layer` calls one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from zbcompile.passes.joint.graph_facts import node_argument
from zbcompile.passes.torch_private import JointGraph

__all__ = ["keep_workspaces", "recurrent"]

_LAYERS = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
_LSTM_MODE = 2
"""oneDNN's number of the LSTM cell."""

_Layer = Callable[..., Sequence[Tensor]]
"""A recurrent layer with the arguments of ``aten.gru.input``: returns the output, then the last states."""


def recurrent(node: Node) -> Callable[..., Argument] | None:
    """Return the function that gives eager's bits for a call, or None where the call itself does.

    Only recurrent layers and cells on the CPU need one.
    """
    name = str(node.target)
    if name not in (*_LAYERS, "aten.gru_cell.default"):
        return None
    if node_argument(node, 0).meta["val"].device.type != "cpu":
        return None
    if _is_fused_lstm(node):
        return fused_lstm
    if name == "aten.gru_cell.default":
        return _gru_cell
    if name == "aten.gru.input":
        return partial(layer_by_layer, _gru_layer)
    num_layers, dropout, train = node.args[4:7]
    drops = dropout and train and cast("int", num_layers) > 1
    return partial(layer_by_layer, cast("_Layer", node.target)) if drops else None


def layer_by_layer(
    target: _Layer,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what ``target`` gives, called for one layer at a time, with dropout between layers.

    The other parameters are those of ``aten.gru.input``; ``state`` is a sequence for an LSTM.
    """
    directions = 2 if bidirectional else 1
    count = len(weights) // num_layers
    states = [state] if isinstance(state, Tensor) else state
    last: list[tuple[Tensor, ...]] = []
    hidden = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        own = [part.narrow(0, layer * directions, directions) for part in states]
        given = own[0] if isinstance(state, Tensor) else own
        mine = list(weights[layer * count : (layer + 1) * count])
        hidden, *ends = target(hidden, given, mine, has_biases, 1, 0.0, train, bidirectional, False)
        last.append(tuple(ends))
        if dropout and train and layer < num_layers - 1:
            hidden = torch.dropout(hidden, dropout, True)
    output = hidden.transpose(0, 1) if batch_first else hidden
    return output, *(torch.cat(parts) for parts in zip(*last, strict=True))


def _gru_layer(
    x: Tensor, state: Tensor, weights: Sequence[Tensor], has_biases: bool, *_: object
) -> tuple[Tensor, Tensor]:
    """Compute one layer of ``aten.gru.input``, sequence first, as eager does on the CPU."""
    per_direction = 4 if has_biases else 2
    outputs, last = [], []
    for direction in range(state.shape[0]):
        own = list(weights[per_direction * direction : per_direction * (direction + 1)])
        biases = own[2:] if has_biases else (None, None)
        gates = torch.nn.functional.linear(x, own[0], biases[0]).unbind(0)
        h, steps = state[direction], []
        for gate in reversed(gates) if direction else gates:
            h = _gru_step(gate, h, own[1], biases[1])
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if direction else steps, 0))
        last.append(h)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1), torch.stack(last)


def _gru_cell(
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    weight_hidden: Tensor,
    bias: Tensor | None = None,
    bias_hidden: Tensor | None = None,
) -> Tensor:
    return _gru_step(torch.nn.functional.linear(x, weight, bias), h, weight_hidden, bias_hidden)


def _gru_step(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute one step; reset and update gate stay columns of one matrix, as eager's in-place sigmoids do."""
    own = torch.nn.functional.linear(h, weight, bias)
    size = h.shape[-1]
    both = own.narrow(1, 0, 2 * size) + gates.narrow(1, 0, 2 * size)
    reset, update = (part.sigmoid() for part in both.chunk(2, 1))
    new = (gates.narrow(1, 2 * size, size) + own.narrow(1, 2 * size, size) * reset).tanh()
    return (h - new) * update + new


def _is_fused_lstm(node: Node) -> bool:
    """Return whether eager runs this call as oneDNN layers: LSTM, CPU, float32, no projection."""
    if str(node.target) != "aten.lstm.input" or not torch.backends.mkldnn.enabled:
        return False
    x, state, weights = (node_argument(node, 0), *cast("tuple[Sequence[Node], ...]", node.args[1:3]))
    tensors: list[Tensor] = [n.meta["val"] for n in (x, *state, *weights)]
    cpu = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return cpu and tensors[1].shape[2] == tensors[2].shape[2] and tensors[0].numel() != 0


def fused_lstm(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``aten.lstm.input`` gives for the same arguments, as a sequence of oneDNN layers."""
    hidden = (x.transpose(0, 1) if batch_first else x).contiguous()
    first_h, first_c = (part.contiguous() for part in state)
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(weights[per_layer * index : per_layer * (index + 1)])
            own += [torch.zeros_like(weight) for weight in own] if not has_biases else []
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                hidden, *own, first_h[index], first_c[index], direction > 0, [], _LSTM_MODE,
                first_h.shape[2], num_layers, has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            last_h.append(h)
            last_c.append(c)
        hidden = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            hidden = torch.dropout(hidden, dropout, True)
    output = hidden.transpose(0, 1) if batch_first else hidden
    return output, torch.stack(last_h), torch.stack(last_c)


_LIBRARY = torch.library.Library("zbcompile", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "lstm_layer(Tensor x, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor h, Tensor c, bool reverse, "
    "int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "lstm_layer", "CPU")
def _lstm_layer(*arguments: object) -> tuple[Tensor, ...]:
    """Run oneDNN's layer with the workspace that its backward reads; under no_grad the kernel makes none."""
    detached = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    with torch.enable_grad():
        results = torch.ops.aten.mkldnn_rnn_layer.default(*detached)
    return tuple(result.detach() for result in results)


@torch.library.register_fake("zbcompile::lstm_layer", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake_lstm_layer(*arguments: object) -> tuple[Tensor, ...]:
    return torch.ops.aten.mkldnn_rnn_layer.default(*arguments)  # type: ignore[no-any-return]


def keep_workspaces(joint: JointGraph) -> None:
    """Make traced oneDNN layers, in place, produce their workspaces when they run without autograd.

    A traced workspace has no size. One run on zeros tells the true one, for the bytes held.
    """
    for node in joint.module.graph.nodes:
        if str(node.target) == "aten.mkldnn_rnn_layer.default":
            _keep_workspace(node)


def _keep_workspace(node: Node) -> None:
    node.target = torch.ops.zbcompile.lstm_layer.default
    arguments = [
        torch.zeros(a.meta["val"].shape, dtype=a.meta["val"].dtype) if isinstance(a, Node) else a
        for a in node.args
    ]
    workspace = _lstm_layer(*arguments)[3]
    for pick in node.users:
        if pick.args[1] == 3:
            pick.meta["val"] = torch.empty_like(workspace, device="meta")
