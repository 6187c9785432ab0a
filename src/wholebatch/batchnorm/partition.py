"""A captured call cut into stages at every operation in which rows meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from wholebatch.batchnorm.capture import Captured
from wholebatch.batchnorm.graph_passes import drop_identities, localise_writes, open_regions
from wholebatch.batchnorm.operations import BatchNorm, Operation, Reader


@dataclass(frozen=True)
class GraphStage:
    """The part of a graph between two couplings, as one function.

    Attributes:
        run: takes the inputs in order, returns the outputs in order.
        inputs: names of the values that it reads.
        outputs: names of the values that it makes for later stages.
        random: whether it draws.
    """

    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: bool


@dataclass(frozen=True)
class MeetingPoint:
    """Where rows meet: the value that goes in, and the operation that needs all of its rows."""

    operation: Operation
    input: str


@dataclass(frozen=True)
class Program:
    """Stages 0 ... m with couplings 0 ... m-1 between them.

    Attributes:
        stages: in the order of the graph; the last returns the graph's outputs and the last values of ``written``.
        couplings: coupling c stands between stages c and c + 1; its result is the input ``meeting_c`` of the latter.
        captured: where parameters, buffers and arguments come from, and how the answer is built.
        results: the graph's outputs, constants among them.
        written: buffers that the code itself writes, in the order in which the last stage returns them.
        needed: values through which a gradient may flow.
        births: the stage that makes each value; -1 for arguments.
        uses: the last stage that reads each value.
        few: the cuts to keep where memory is short.
    """

    stages: tuple[GraphStage, ...]
    couplings: tuple[MeetingPoint, ...]
    captured: Captured
    results: int
    written: tuple[str, ...]
    needed: frozenset[str]
    births: Mapping[str, int]
    uses: Mapping[str, int]
    few: frozenset[int] = frozenset()

    def arguments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Name the leaves of a call."""
        return dict(zip(self.captured.inputs, leaves, strict=True))

    def bound(self, model: nn.Module, name: str) -> Any:
        """Find a parameter, buffer or constant as it is now."""
        place, target = self.captured.bound[name]
        if place == "constant":
            return self.captured.constants[target]
        owner, _, attribute = target.rpartition(".")
        return getattr(model.get_submodule(owner), attribute)

    def answer(self, outputs: Sequence[Any]) -> Any:
        """Give the graph's outputs the form of the model's own answer."""
        return pytree.tree_unflatten(list(outputs), self.captured.answer)

    def crosses(self, name: str, cuts: frozenset[int]) -> bool:
        """Tell whether a value crosses one of some cuts; arguments were there before all of them."""
        birth = self.births[name]
        return birth < 0 or any(birth <= cut < self.uses[name] for cut in cuts)

    @property
    def signature(self) -> tuple[MeetingPoint, ...]:
        """What two programs must have in common to run micro-batches of one batch."""
        return tuple(replace(coupling, input="") for coupling in self.couplings)


def cut(captured: Captured, model: nn.Module, operations: Mapping[Any, Reader]) -> Program:
    """Cut a graph at its couplings.

    Raises:
        CaptureError: if rows meet where no cut can go, or a write cannot be made local.
    """
    module = captured.graph_module
    buffers = {
        node: captured.bound[node.name][1]
        for node in module.graph.nodes
        if node.op == "placeholder" and node.name in captured.bound
    }
    open_regions(module, lambda node: node.target in operations)
    drop_identities(module.graph)
    couplings = _replace_couplings(module.graph, buffers, captured, operations)
    last = localise_writes(module, _stages(module.graph))
    written = {buffers[node]: value for node, value in last.items() if node in buffers}
    return _Cutter(module, captured, model, couplings, written).program()


def _replace_couplings(
    graph: fx.Graph, buffers: Mapping[fx.Node, str], captured: Captured, operations: Mapping[Any, Reader]
) -> list[tuple[Operation, fx.Node]]:
    """Let each coupling be computed by an object that a stage is given: ``meeting.apply(x, *operands)``."""
    found: list[tuple[Operation, fx.Node]] = []
    for node in list(graph.nodes):
        told = operations[node.target](node, buffers) if node.target in operations else None
        if told is None:
            continue
        operation, x, operands = told
        if isinstance(operation, BatchNorm) and operation.running and operation.running[0] in captured.averaging:
            earlier = [o for o, _ in found if isinstance(o, BatchNorm) and o.running == operation.running]
            counter = captured.averaging[operation.running[0]]
            operation = replace(operation, momentum=None, counter=counter, turn=1 + len(earlier))
        with graph.inserting_before(node):
            meeting = graph.placeholder(f"meeting_{len(found)}")
            applied = graph.call_method("apply", (meeting, x, *operands))
        applied.meta = dict(node.meta)
        node.replace_all_uses_with(applied)
        graph.erase_node(node)
        found.append((operation, x))
    return found


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    stage, stages = 0, {}
    for node in graph.nodes:
        stage += _is_coupling(node)
        stages[node] = -1 if node.op == "placeholder" else stage
    return stages


def _is_coupling(node: fx.Node) -> bool:
    return node.op == "call_method" and node.all_input_nodes[0].name.startswith("meeting_")


class _Cutter:
    """Distributes the nodes of a graph over stages."""

    def __init__(
        self,
        module: fx.GraphModule,
        captured: Captured,
        model: nn.Module,
        couplings: list[tuple[Operation, fx.Node]],
        written: dict[str, fx.Node],
    ) -> None:
        self.module, self.captured, self.model = module, captured, model
        self.couplings, self.written = couplings, written
        self.stage_of = _stages(module.graph)
        self.bound = {n for n in self.stage_of if n.op == "placeholder" and n.name in captured.bound}
        self.last = len(couplings)
        self.output = next(n for n in self.stage_of if n.op == "output")
        self.answers = list(cast("Sequence[Any]", self.output.args[0]))
        self.results = [*self.answers, *written.values()]

    def program(self) -> Program:
        """Emit every stage and say what flows between them."""
        inputs = [self._inputs(stage) for stage in range(self.last + 1)]
        uses = {node: stage for stage, read in enumerate(inputs) for node in read}
        stages = []
        for stage in range(self.last + 1):
            outputs = [n for n in self._nodes(stage) if uses.get(n, stage) > stage]
            stages.append(self._emit(stage, inputs[stage], self.results if stage == self.last else outputs))
        crossing = [n for n in uses if n not in self.bound and not n.name.startswith("meeting_")]
        return Program(
            stages=tuple(stages),
            couplings=tuple(MeetingPoint(operation, x.name) for operation, x in self.couplings),
            captured=self.captured,
            results=len(self.answers),
            written=tuple(self.written),
            needed=frozenset(node.name for node in self._needed()),
            births={n.name: self.stage_of[n] for n in crossing},
            uses={n.name: uses[n] for n in crossing},
        )

    def _nodes(self, stage: int) -> list[fx.Node]:
        return [n for n, of in self.stage_of.items() if of == stage and n.op not in ("placeholder", "output")]

    def _inputs(self, stage: int) -> list[fx.Node]:
        read = [used for node in self._nodes(stage) for used in node.all_input_nodes]
        if stage == self.last:
            read += [result for result in self.results if isinstance(result, fx.Node)]
        return list(dict.fromkeys(n for n in read if self.stage_of[n] != stage))

    def _emit(self, stage: int, inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> GraphStage:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        nodes = self._nodes(stage)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies.get(o, o) if isinstance(o, fx.Node) else o for o in outputs))
        return GraphStage(
            run=fx.GraphModule(self.module, graph).forward,
            inputs=tuple(node.name for node in inputs),
            outputs=tuple(o.name if isinstance(o, fx.Node) else "" for o in outputs),
            random=any(_draws(self.module, node) for node in nodes),
        )

    def _needed(self) -> set[fx.Node]:
        """Follow gradients forward from the parameters that want them."""
        needed: set[fx.Node] = set()
        for node in self.stage_of:
            if node in self.bound:
                value = self._value(node)
                flows = isinstance(value, Tensor) and value.requires_grad
            else:
                flows = _flows(node) and any(used in needed for used in node.all_input_nodes)
            if flows:
                needed.add(node)
        return needed

    def _value(self, node: fx.Node) -> Any:
        place, target = self.captured.bound[node.name]
        owner, _, attribute = target.rpartition(".")
        return None if place == "constant" else getattr(self.model.get_submodule(owner), attribute)


def _flows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.target is not torch.ops.aten.detach.default and (
        not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
    )


def _draws(module: fx.GraphModule, node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    inner = [getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    return any(_draws(i, n) for i in inner if isinstance(i, fx.GraphModule) for n in i.graph.nodes)
