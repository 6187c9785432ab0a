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


class PatchedCall:
    """One call of a replaced function, with its arguments as the caller wrote them.

    A listener reads and exchanges arguments by place and name, and never names them in a call of its own: what the
    caller passed by position or by keyword reaches the original in the same way.
    """

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.original = original
        self.args = args
        self.kwargs = kwargs

    def given(self, place: int, name: str, otherwise: Any = None) -> Any:
        """Return the argument at a place, or of a name; `otherwise` where the caller left it out."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, otherwise)

    def exchange(self, place: int, name: str, value: Any) -> None:
        """Pass `value` on in the place of what was given."""
        if len(self.args) > place:
            self.args = (*self.args[:place], value, *self.args[place + 1 :])
        elif name in self.kwargs:
            self.kwargs = self.kwargs | {name: value}

    def run(self) -> Any:
        """Call the original; its answer and its errors are the caller's."""
        return self.original(*self.args, **self.kwargs)


Listener = Callable[[PatchedCall], Any]


class Wrapping:
    """The replacements made so far; `restore` takes them back, the last one first."""

    def __init__(self) -> None:
        self.undo: list[tuple[Any, str, Any, bool]] = []
        self.twins: list[tuple[Any, Any]] = []

    def method(self, owner: type, name: str, listener: Listener) -> None:
        """Let calls of ``owner.name`` go through `listener`, with the object itself as the first argument."""
        own = name in vars(owner)
        original = inspect.getattr_static(owner, name)
        self.undo.append((owner, name, original, own))
        setattr(owner, name, heard(original, listener))

    def function(self, module: Any, name: str, listener: Listener) -> None:
        """Let calls of a function go through `listener`, also where it was imported by name."""
        original = getattr(module, name, None)
        if original is None:
            return
        replaced = heard(original, listener)
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


def heard(original: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    """Return a function that looks like the original and hands its calls to `listener`."""

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return listener(PatchedCall(original, args, kwargs))

    return replaced


def rebind(old: Any, new: Any) -> None:
    """Let every module-level name that means `old` mean `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
