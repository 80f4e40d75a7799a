"""One rewrite of a joint graph as an object, and the loop that runs a list of them and checks after each.

``joint graph --> joint graph``, pass by pass. Contract in and out, checked before the first pass and after
each one: the graph is in order and whole, it takes the same arguments, and every value with a role (output,
changed argument, gradient) is in it, with the shape, dtype and device that it was traced with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from zbcompile.errors import SplitError
from zbcompile.passes.joint.gradient_layouts import GradientLayout
from zbcompile.passes.nodes import value_of
from zbcompile.passes.torch_private import JointGraph

__all__ = ["JointPass", "JointStep", "Observer", "StageFacts", "run_passes", "unobserved"]


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What passes know of a stage beside its joint graph.

    Attributes
    ----------
    index
        Position of the stage.
    layouts
        Output -> layout that its gradient arrives in, where it was traced as a copy (see `gradient_layouts`).
    state
        Positions of the arguments that are parameters or buffers.
    """

    index: int
    layouts: Mapping[int, GradientLayout]
    state: frozenset[int]


@dataclass(frozen=True, slots=True)
class JointPass:
    """One rewrite of a joint graph.

    Attributes
    ----------
    name
        What it is called in ``ZBCOMPILE_SKIP``, in dumps and in errors; no two passes have one name.
    run
        Changes the graph in place and lets the roles follow its values. The bits stay. What it returns is not
        read.
    required
        Why a pipeline is wrong without it; empty for a pass that may be skipped.
    """

    name: str
    run: Callable[[JointGraph, StageFacts], object]
    required: str = ""


@dataclass(frozen=True, slots=True)
class JointStep:
    """What an observer sees after a pass.

    Attributes
    ----------
    stage
        Position of the stage; stages of equal structure share one graph and are seen once.
    position
        0 for the graph as it was traced, then 1 more for each pass of the list, skipped ones too.
    name
        The pass, or ``traced``.
    joint
        The live graph.
    """

    stage: int
    position: int
    name: str
    joint: JointGraph


Observer = Callable[[JointStep], None]


def unobserved(step: JointStep) -> None:
    """Do nothing: the default observer."""


def run_passes(
    joint: JointGraph,
    facts: StageFacts,
    passes: Sequence[JointPass],
    skip: Collection[str] = (),
    observer: Observer = unobserved,
) -> None:
    """Run passes over a joint graph in order and check its contract after each one.

    Parameters
    ----------
    joint, facts
        A traced stage.
    passes
        What to run.
    skip
        Names of passes to leave out.
    observer
        Called with the traced graph, then after each pass that ran.

    Raises
    ------
    SplitError
        A pass broke the contract; names stage, pass and what is wrong.
    """
    contract = _Contract(joint)
    observer(JointStep(facts.index, 0, "traced", joint))
    for position, rewrite in enumerate(passes, 1):
        if rewrite.name in skip:
            continue
        rewrite.run(joint, facts)
        broken = contract.broken(joint)
        if broken:
            raise SplitError(
                f"the pass {rewrite.name} broke the joint graph: {broken}",
                where=f"stage {facts.index}",
                fix="report the model"
                + ("" if rewrite.required else f"; ZBCOMPILE_SKIP={rewrite.name} compiles without the pass"),
            )
        observer(JointStep(facts.index, position, rewrite.name, joint))


_Form = tuple[tuple[int | str, ...], torch.dtype, torch.device] | None
"""Shape, with extents that depend on data as text, dtype and device; None for what is no tensor."""


class _Contract:
    """What every pass must leave as it is. Two walks over the graph check it, torch's lint and one here.

    They take 0.8 % of a compile (GPT-2 of 12 blocks, 4 stages), so they are always on.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._arguments = _arguments(joint)
        self._forms = _forms(joint)
        self._valueless = {node for node in joint.module.graph.nodes if "val" not in node.meta}

    def broken(self, joint: JointGraph) -> str:
        """Return what a joint graph breaks, in words; an empty string if nothing."""
        if _arguments(joint) != self._arguments:
            return "its arguments are not those that were traced"
        try:
            joint.module.graph.lint()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        known = set(joint.module.graph.nodes)
        for node in known - self._valueless:
            if node.op == "call_function" and "val" not in node.meta:
                return f"{node.format_node()} has no fake value"
        for role, values in _roles(joint).items():
            lost = next((position for position, value in values.items() if value not in known), None)
            if lost is not None:
                return f"{role} {lost} is not in the graph"
        return self._changed(_forms(joint))

    def _changed(self, forms: Mapping[tuple[str, int], _Form]) -> str:
        if forms == self._forms:
            return ""
        if forms.keys() != self._forms.keys():
            role, position = next(iter(forms.keys() ^ self._forms.keys()))
            return f"{role} {position} came or went"
        role, position = next(key for key in forms if forms[key] != self._forms[key])
        before, after = self._forms[role, position], forms[role, position]
        return f"{role} {position} was {_words(before)} and is {_words(after)}"


def _roles(joint: JointGraph) -> dict[str, dict[int, Node]]:
    return {"output": joint.outputs, "changed argument": joint.mutations, "gradient": joint.gradients}


def _arguments(joint: JointGraph) -> list[Node]:
    return list(joint.module.graph.find_nodes(op="placeholder"))


def _forms(joint: JointGraph) -> dict[tuple[str, int], _Form]:
    """Return (role, position) -> form of the value."""
    return {
        (role, position): _form(value)
        for role, values in _roles(joint).items()
        for position, value in values.items()
    }


def _form(node: Node) -> _Form:
    value = value_of(node)
    if value is None:
        return None
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape), value.dtype, value.device


def _words(form: _Form) -> str:
    return "no tensor" if form is None else f"{form[1]} {list(form[0])} on {form[2]}"
