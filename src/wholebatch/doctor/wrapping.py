"""Functions of torch replaced for as long as a loop is watched, where torch has no hook, and put back afterwards.

The training path of the library never does this; only the watching doctor, only inside its context, and whatever
the loop does: the originals are back when the context ends, also after an error.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


class Wrapping:
    """The replacements made so far; `restore` takes them back, the last one first."""

    def __init__(self) -> None:
        self.undo: list[tuple[Any, str, Any, bool]] = []
        self.twins: list[tuple[Any, Any]] = []

    def method(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``around(original, self, *args, **kwargs)``."""
        own = name in vars(owner)
        original = inspect.getattr_static(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.undo.append((owner, name, original, own))
        setattr(owner, name, replaced)

    def function(self, module: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by ``around(original, *args, **kwargs)``, also where it was imported by name."""
        original = getattr(module, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.twins.append((original, replaced))
        rebind(original, replaced)

    def restore(self) -> None:
        """Put everything back, in modules that were imported meanwhile too."""
        for owner, name, original, own in reversed(self.undo):
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        for original, replaced in reversed(self.twins):
            rebind(replaced, original)
        self.undo.clear()
        self.twins.clear()


def rebind(old: Any, new: Any) -> None:
    """Let every module-level name that means `old` mean `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
