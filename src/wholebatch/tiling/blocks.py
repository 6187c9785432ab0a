"""Which blocks of a model run over tiles of positions: found by their form, proven by trial."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import nn

from wholebatch.amounts import whole_number
from wholebatch.tiling.head import CausalHead, causal_heads
from wholebatch.tiling.tiles import Tile

FEED_FORWARD = "_ff_block"
"""The method in which layers of ``torch.nn`` keep their feed-forward block."""


NEVER = (nn.ModuleList, nn.ModuleDict, nn.parallel.DistributedDataParallel)
"""What runs nothing, or a whole model."""


class Tiled:
    """Undoes :func:`tiled`: call ``remove()``, or use it as a context.

    Attributes:
        blocks: those that may run over tiles, by name.
        heads: those of causal models whose loss is taken without logits, by name.
    """

    def __init__(self, blocks: dict[str, Tile], heads: dict[str, CausalHead]) -> None:
        self.blocks, self.heads = blocks, heads

    def __repr__(self) -> str:
        if not self.blocks and not self.heads:
            return "Tiled(removed)"
        whys: dict[str, list[str]] = {}
        for name, why in self.left_alone.items():
            whys.setdefault(why, []).append(name)
        alone = "".join(f"; left alone, as {why}: {_some(names)}" for why, names in whys.items())
        inside = tuple(f"{name}." for name in self.names)
        waiting = [name for name, each in self._every.items() if not each.refusals and not name.startswith(inside)]
        tried = f"; not called yet: {_some(waiting)}" if waiting else ""
        return f"Tiled({_some(self.names) or 'nothing'}{tried}{alone})"

    @property
    def names(self) -> list[str]:
        """What runs over tiles by now, in at least one of the ways in which it was called."""
        return [name for name, each in self._every.items() if "" in each.refusals.values()]

    @property
    def left_alone(self) -> dict[str, str]:
        """What runs as it always did, and why; all that it holds is tried by itself."""
        found = {name: [*each.refusals.values()] for name, each in self._every.items()}
        return {name: whys[0] for name, whys in found.items() if whys and "" not in whys}

    @property
    def _every(self) -> dict[str, Tile | CausalHead]:
        return {**self.blocks, **self.heads}

    def __enter__(self) -> Tiled:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.remove()

    def pause(self) -> None:
        """Let blocks and heads run as they did, and remember what was tried."""
        for each in self._every.values():
            each.remove()

    def resume(self) -> None:
        """Let them run over tiles again."""
        for each in self._every.values():
            each.put()

    def remove(self) -> None:
        """Let blocks and heads run as they did before."""
        self.pause()
        self.blocks, self.heads = {}, {}


def tiled(
    model: nn.Module, blocks: Sequence[str] | None = None, *, positions: int | None = None, head: bool = True
) -> Tiled:
    """Run the blocks of a model in which positions do not meet over tiles of positions, less than a row at a time.

    A feed-forward block keeps its input alone, and each tile is computed again in the backward, with the same random
    draws: what it saves for the backward is there for one tile. A causal model of Hugging Face takes its own loss
    (``labels=``) from the hidden states by :func:`wholebatch.losses.causal_lm_head`, without logits; reading
    ``outputs.logits`` then says so, and without ``labels`` or under ``torch.no_grad()`` they are there as ever.

    Which blocks those are is tried, when one is first called with a gradient: some of its positions whole and in parts,
    in value and gradient. A block in which positions meet, that keeps something of what it saw, or that hooks look into
    is left alone, and `repr` says so. Exact up to rounding. Costs one more forward of the blocks; parameters, names and
    the state dict stay as they are.

    Args:
        model: whose blocks run over tiles until the returned handle's ``remove()``.
        blocks: names of modules to be tried; all that hold two matrices or more, if None, the largest first.
        positions: of each row in a tile; as many as a block's input is wide, if None.
        head: whether causal models take their own loss without logits.

    Returns:
        A handle; also a context manager.

    Raises:
        ValueError: if nothing is found, a name is unknown, or something runs over tiles already.
        TypeError: for positions that are no whole number.
        LossError: later, where a model or its user reads logits that are not there.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> with tiled(model, positions=8) as handle:
        ...     model(torch.randn(2, 20, 4)).sum().backward()
        ...     handle.names
        ['(model)']
    """
    positions = None if positions is None else whole_number(positions, "positions", "positions=512")
    found = _candidates(model) if blocks is None else _named(model, blocks)
    heads = causal_heads(model) if head and blocks is None else {}
    if not found and not heads:
        raise ValueError(
            "The model has no block that could run over tiles: none holds two matrices. Name modules: blocks=[...]."
        )
    twice = [name for name, (module, method) in found.items() if isinstance(vars(module).get(method), Tile)]
    twice += [name for name, each in heads.items() if each.taken]
    if twice:
        raise ValueError(f"{twice[0]!r} runs over tiles already. Call remove() on the first handle.")
    handle = Tiled({name: Tile(*place, positions) for name, place in found.items()}, heads)
    handle.resume()
    return handle


def _candidates(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Find what holds two matrices or more: an outer block is tried before those that it holds."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, NEVER) or any(isinstance(part, nn.Embedding) for part in module.modules()):
            continue
        if sum(parameter.dim() > 1 for parameter in module.parameters()) > 1:
            found[name or "(model)"] = (module, "forward")
        if callable(getattr(module, FEED_FORWARD, None)):
            found[f"{name}.{FEED_FORWARD}" if name else FEED_FORWARD] = (module, FEED_FORWARD)
    return found


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[nn.Module, str]]:
    modules = dict(model.named_modules())
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in modules]
    if unknown:
        raise ValueError(f"The model has no module {unknown[0]!r}. It has: {', '.join(filter(None, modules))}.")
    return {name or "(model)": (modules[name], "forward") for name in wanted}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) < 4 else [names[0], f"{len(names) - 2} more", names[-1]])
