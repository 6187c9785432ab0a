"""Changes to a captured graph after which it may be cut anywhere: regions opened, writes made local.

A stage runs twice, and what crosses into it is kept in between. So no operation may write into a tensor that was
made before its stage: it writes into a copy, and whoever reads the tensor afterwards reads the copy. Buffers are
such tensors too: each micro-batch writes into copies of its own, and the window commits one of them, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from wholebatch.batchnorm.capture import CaptureError

aten = torch.ops.aten
NO_GRAD = "wrap_with_set_grad_enabled"
IDENTITY_UNLESS_TRAINING = (aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default)


def open_regions(module: fx.GraphModule, meets: Callable[[fx.Node], bool]) -> None:
    """Put the nodes of a ``no_grad`` region in which rows meet into the graph itself, its inputs detached.

    Raises:
        CaptureError: for any other kind of subgraph in which rows meet.
    """
    for node in list(module.graph.nodes):
        inner = _subgraph(module, node)
        if inner is None or not any(meets(n) for n in _all_nodes(inner)):
            continue
        if node.target.name() != NO_GRAD or node.args[0]:
            raise CaptureError(f"Rows meet inside of a {node.target} region ({node.name!r}), which cannot be cut.")
        _open(module, node, inner)
        return open_regions(module, meets)


def drop_identities(graph: fx.Graph) -> None:
    """Remove dropouts that do nothing: they return their very input, which no schema tells."""
    for node in list(graph.nodes):
        if node.target in IDENTITY_UNLESS_TRAINING and (not node.args[2] or node.args[1] == 0):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def localise_writes(module: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Let every write go into a tensor made in the same stage.

    Args:
        module: the graph, changed in place.
        stage_of: the stage of every node; placeholders belong to none (-1). Copies are added to it.

    Returns:
        For each placeholder that was written, the node that holds its last value.

    Raises:
        CaptureError: if other views of the written tensor are read later.
    """
    stages = dict(stage_of)
    return _Writes(module, stages).localise()


class _Writes:
    """Which nodes share storage, and who writes into it."""

    def __init__(self, module: fx.GraphModule, stages: dict[fx.Node, int]) -> None:
        self.module, self.stages = module, stages
        self.root: dict[fx.Node, fx.Node] = {}
        self.view: dict[fx.Node, bool] = {}
        self.origin: dict[fx.Node, fx.Node] = {}
        self.family: dict[fx.Node, list[fx.Node]] = {}

    def localise(self) -> dict[fx.Node, fx.Node]:
        """Walk the graph once, in its order."""
        written = {}
        for node in list(self.module.graph.nodes):
            for target in _written(self.module, node):
                root = self.root[target]
                if self.stages[root] == self.stages[node]:
                    continue
                copy = self._copy(node, target)
                origin = self.origin.get(root, root)
                self.origin[copy] = origin
                if origin.op == "placeholder":
                    written[origin] = copy
            self._enter(node, _source(node))
        return written

    def _enter(self, node: fx.Node, source: tuple[fx.Node, bool] | None) -> None:
        shared, view = source if source is not None else (node, False)
        self.root[node] = self.root.get(shared, node)
        self.view[node] = view or self.view.get(shared, False)
        self.family.setdefault(self.root[node], []).append(node)

    def _copy(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """Write into a copy instead, and let all that read the tensor afterwards read the copy."""
        later = set()
        following = node.next
        while following.op != "root":
            later.add(following)
            following = following.next
        family = self.family[self.root[target]]
        others = [m for m in family if self.view[m] != self.view[target] or (self.view[m] and m is not target)]
        if any(user in later for member in others for user in member.users):
            raise CaptureError(
                f"{node.target} ({node.name!r}) writes into a view of a tensor that was made before the last operation "
                "in which rows meet and is read again later. Write into a copy: x = x.clone()."
            )
        graph = self.module.graph
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (target,))
        copy.meta, self.stages[copy] = dict(target.meta), self.stages[node]
        self._enter(copy, None)
        node.replace_input_with(target, copy)
        for member in [m for m in family if self.view[m] == self.view[target]]:
            member.replace_all_uses_with(copy, delete_user_cb=later.__contains__)
        return copy


def _subgraph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            inner = getattr(module, str(argument.target), None)
            if isinstance(inner, fx.GraphModule):
                return inner
    return None


def _all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _operands(module: fx.GraphModule, node: fx.Node, inner: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Pair the placeholders of a region with what the node gives it."""
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    return list(zip(placeholders, node.args[len(node.args) - len(placeholders) :], strict=True))


def _open(module: fx.GraphModule, node: fx.Node, inner: fx.GraphModule) -> None:
    graph, known = module.graph, dict[fx.Node, Any]()
    with graph.inserting_before(node):
        for placeholder, operand in _operands(module, node, inner):
            known[placeholder] = _detached(graph, operand)
        for old in inner.graph.nodes:
            if old.op not in ("placeholder", "output"):
                known[old] = graph.node_copy(old, known.__getitem__)
            if old.op == "get_attr":
                known[old].target = f"{node.name}_{old.target}"
                setattr(module, known[old].target, getattr(inner, str(old.target)))
        answers = cast("Sequence[Any]", inner.graph.output_node().args[0])
        results = [known[each] if isinstance(each, fx.Node) else each for each in answers]
        results = [_detached(graph, result) for result in results]
    for user in list(node.users):
        user.replace_all_uses_with(results[cast("int", user.args[1])])
        graph.erase_node(user)
    graph.erase_node(node)


def _detached(graph: fx.Graph, node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or (node.op == "placeholder" and not value.requires_grad):
        return node
    detached = graph.call_function(aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _written(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """List the tensors that a node writes into."""
    inner = _subgraph(module, node)
    if inner is not None:
        behind = dict(_operands(module, node, inner))
        source = dict[fx.Node, fx.Node]()
        for n in inner.graph.nodes:
            shared = _source(n)
            source[n] = source.get(shared[0], n) if shared else n
            yield from (behind[source[w]] for w in _written(inner, n) if source[w] in behind)
    elif isinstance(node.target, torch._ops.OpOverload):
        for value, info in _arguments(node, node.target):
            if info is not None and info.is_write:
                yield from value


def _source(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return the tensor whose storage a node's result shares, and whether it is another view of it."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return cast("fx.Node", node.args[0]), True
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = {mark for r in node.target._schema.returns if r.alias_info for mark in r.alias_info.before_set}
    for value, info in _arguments(node, node.target):
        if value and info is not None and returned & info.before_set:
            return value[0], not (info.is_write or node.target is aten.detach.default)
    return None


def _arguments(node: fx.Node, operator: torch._ops.OpOverload) -> Iterator[tuple[list[fx.Node], Any]]:
    """Pair a node's tensor arguments with what the schema of its operator says of their storage."""
    for position, argument in enumerate(operator._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        yield [v for v in values if isinstance(v, fx.Node)], argument.alias_info
