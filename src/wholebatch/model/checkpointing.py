"""Activation checkpointing of a model's blocks: less is saved for the backward, and computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.model.memory import counting_again


class Checkpointed:
    """Undoes :func:`checkpointed`: call ``remove()``, or use it as a context.

    Attributes:
        names: the blocks that compute their activations again.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.names = list(blocks)
        self._blocks = list(blocks.values())
        for block in self._blocks:
            block.forward = _Again(block, block.forward)

    def __repr__(self) -> str:
        if not self._blocks:
            return "Checkpointed(removed)"
        some = self.names if len(self.names) < 4 else [self.names[0], "...", self.names[-1]]
        blocks = "1 block" if len(self.names) == 1 else f"{len(self.names)} blocks"
        return f"Checkpointed({blocks} of {type(self._blocks[0]).__name__}: {', '.join(some)})"

    def __enter__(self) -> Checkpointed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the blocks save their activations again."""
        for block in self._blocks:
            if isinstance(vars(block).get("forward"), _Again):
                del block.forward
        self._blocks = []


def checkpointed(model: nn.Module, blocks: str | type[nn.Module] | Sequence[str] | None = None) -> Checkpointed:
    """Let the blocks of a model compute their activations again in the backward instead of keeping them.

    Uses ``torch.utils.checkpoint`` without reentrant backwards. The gradient is bit-equal, dropout included, and the
    blocks' buffers (BatchNorm's running statistics) move once, where torch alone moves them twice. Costs about one
    more forward of the blocks; pays where a micro-batch would otherwise be one or two rows. Names of parameters and
    the state dict stay as they are; the blocks are given no caches of keys and values meanwhile. A Hugging Face model
    has its own switch, ``gradient_checkpointing_enable()``.

    Args:
        model: whose blocks are wrapped until the returned handle's ``remove()``.
        blocks: the class of the blocks or its name, the names of modules, or None: the class that repeats in a
            list of the model and holds most of its parameters.

    Returns:
        A handle; also a context manager.

    Raises:
        ValueError: if no such block is found, or one is checkpointed already.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        >>> with checkpointed(model, "Linear") as handle:
        ...     model(torch.randn(2, 4)).sum().backward()
        >>> handle.names
        ['0', '1', '2']
    """
    found = find_blocks(model) if blocks is None else _named_blocks(model, blocks)
    if not found:
        kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        wanted = "a class of blocks that repeats" if blocks is None else repr(blocks)
        raise ValueError(f"The model has no {wanted}. Name a class or modules of it: blocks='...'. Classes: {kinds}.")
    twice = [name for name, block in found.items() if isinstance(vars(block).get("forward"), _Again)]
    if twice:
        raise ValueError(f"Block {twice[0]!r} is checkpointed already. Call remove() on the first handle.")
    return Checkpointed(found)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the blocks of a model: of the modules that repeat side by side, the class with most parameters.

    Returns:
        The blocks by name; none if nothing repeats.
    """
    families: dict[tuple[str, type[nn.Module]], dict[str, nn.Module]] = {}
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    for name, parent in lists:
        for key, child in parent.named_children():
            if any(True for _ in child.parameters()):
                families.setdefault((name, type(child)), {})[f"{name}.{key}" if name else key] = child
    repeated = [family for family in families.values() if len(family) > 1]
    sizes = Counter({i: sum(map(_size, family.values())) for i, family in enumerate(repeated)})
    return repeated[sizes.most_common(1)[0][0]] if sizes else {}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _named_blocks(model: nn.Module, blocks: str | type[nn.Module] | Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if isinstance(blocks, type):
        return {name: module for name, module in modules.items() if type(module) is blocks}
    wanted = [blocks] if isinstance(blocks, str) else list(blocks)
    classes = {type(module).__name__ for module in modules.values()}
    unknown = [name for name in wanted if name not in modules and name not in classes]
    if unknown:
        raise ValueError(
            f"The model has no {unknown[0]!r}, neither a module of that name nor a class: {sorted(classes)}."
        )
    return {name: module for name, module in modules.items() if name in wanted or type(module).__name__ in wanted}


class _Again:
    """A forward that keeps its inputs and runs a second time in the backward."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # A second forward would write behind what the first has written, and attend to everything twice.
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _second_forward(self._block, counting_again())


def _is_cache(value: Any) -> bool:
    """Tell whether an argument keeps keys and values for the next token: of no use where a gradient is wanted."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


@contextmanager
def _second_forward(block: nn.Module, counted: AbstractContextManager[Any]) -> Iterator[None]:
    """Give a second forward copies of the buffers to move, so that it leaves the block's own alone."""
    own: list[tuple[nn.Module, str, Tensor]] = [
        (module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    try:  # an interrupt may come between two of them
        for module, name, buffer in own:
            setattr(module, name, buffer.clone())
        with counted:
            yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)
