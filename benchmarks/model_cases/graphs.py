"""Graph networks of torch_geometric: a batch of graphs that have the same edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square

__all__ = ["GRAPHS"]

NODES, WIDTH = 10, 8
_EDGES = ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 4, 1, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5, 7, 9, 6, 8))


class Stack(nn.Module):
    """Convolutions of one kind over a batch of graphs that have the same edges."""

    def __init__(self, make: Callable[[], nn.Module], over_edges: bool = False) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.outside = nn.Linear(WIDTH, 3)
        self.register_buffer("edges", torch.tensor(_EDGES))
        self.over_edges = over_edges

    def forward(self, x: Tensor, attributes: Tensor | None = None) -> Tensor:
        graphs, nodes, width = x.shape
        shift = nodes * torch.arange(graphs).repeat_interleave(self.edges.shape[1])
        edges = self.edges.repeat(1, graphs) + shift
        x = self.inside(x.flatten(0, 1))
        for layer in self.layers:
            more = () if attributes is None else (attributes.flatten(0, 1),)
            x = x + layer(x, edges, *more).relu()
        return self.outside(x).view(graphs, nodes, -1)


class Whole(nn.Module):
    """One model of torch_geometric, over a batch of graphs that have the same edges."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("edges", torch.tensor(_EDGES))

    def forward(self, x: Tensor) -> Tensor:
        graphs, nodes, width = x.shape
        shift = nodes * torch.arange(graphs).repeat_interleave(self.edges.shape[1])
        return self.model(x.flatten(0, 1), self.edges.repeat(1, graphs) + shift)


def _nodes(model: Any) -> Inputs:
    return Inputs((torch.randn(BATCH, NODES, WIDTH),))


def _nodes_and_edges(model: Any) -> Inputs:
    return Inputs((torch.randn(BATCH, NODES, WIDTH), torch.randn(BATCH, len(_EDGES[0]), 4)))


def _convolution(name: str, *args: Any, with_edges: bool = False, **settings: Any) -> ModelCase:
    def layer() -> nn.Module:
        import torch_geometric.nn

        made = [a() if callable(a) else a for a in args]
        return getattr(torch_geometric.nn, name)(*made, **settings)

    batch = _nodes_and_edges if with_edges else _nodes
    return ModelCase(name, "graph", lambda: Stack(layer), batch, mean_square, "torch_geometric")


def _model(name: str, **settings: Any) -> ModelCase:
    def build() -> nn.Module:
        import torch_geometric.nn

        return Whole(getattr(torch_geometric.nn, name)(WIDTH, 8, 3, 3, **settings))

    return ModelCase(f"torch_geometric {name}", "graph", build, _nodes, mean_square, "torch_geometric")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))


def _edge_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))


GRAPHS: list[ModelCase] = [
    _convolution("GCNConv", WIDTH, WIDTH),
    _convolution("GATConv", WIDTH, 4, heads=2, dropout=0.1),
    _convolution("GATv2Conv", WIDTH, 4, heads=2, edge_dim=4, with_edges=True),
    _convolution("SAGEConv", WIDTH, WIDTH),
    _convolution("GraphConv", WIDTH, WIDTH),
    _convolution("GINConv", _mlp, train_eps=True),
    _convolution("GINEConv", _mlp, edge_dim=4, with_edges=True),
    _convolution("TransformerConv", WIDTH, 4, heads=2, dropout=0.1),
    _convolution("ChebConv", WIDTH, WIDTH, K=2),
    _convolution("EdgeConv", _edge_mlp),
    _convolution("GENConv", WIDTH, WIDTH),
    _convolution("ClusterGCNConv", WIDTH, WIDTH),
    _convolution("APPNP", 2, 0.1),
    _convolution("GatedGraphConv", WIDTH, 2),
    _model("PNA", aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.tensor([0, 5, 5])),
    _model("EdgeCNN"),
    _model("GAT", heads=2, jk="cat"),
    _model("GraphSAGE", norm="batch", dropout=0.1),
]
