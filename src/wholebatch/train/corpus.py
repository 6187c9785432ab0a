"""The text that every Python brings along: the docstrings of its standard library.

Real writing by many hands, of very uneven length. Harvested once with `ast` and kept in the user's cache folder.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from wholebatch.train.errors import DataError

VERSION = 1
"""Of the harvest: a cache of another version is written anew."""

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def docstrings() -> list[str]:
    """Return the distinct docstrings of this Python's standard library, sorted.

    The first call harvests (a few seconds) and writes the cache; a cache that cannot be read or written only costs
    that time again.

    Raises:
        DataError: if this Python came without the sources of its library.
    """
    cache = cache_folder() / f"docstrings-{platform.python_version()}-v{VERSION}.json"
    try:
        return [str(text) for text in json.loads(cache.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        found = harvest(Path(sysconfig.get_paths()["stdlib"]))
    _keep(cache, found)
    return found


def signatures() -> list[tuple[str, str]]:
    """Return the distinct pairs of a function's signature and its docstring in the standard library, sorted.

    Kept in the cache as the docstrings are.

    Raises:
        DataError: if this Python came without the sources of its library.
    """
    cache = cache_folder() / f"signatures-{platform.python_version()}-v{VERSION}.json"
    try:
        return [(str(left), str(right)) for left, right in json.loads(cache.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(folder.rglob("*.py")) if _is_source(path, folder)]
    found = sorted({pair for path in sources for pair in _pairs_of(_tree_of(path))})
    if not found:
        raise DataError(f"{folder} holds no Python file with a docstring. Give your own text: --data FILE_OR_FOLDER.")
    _keep(cache, found)
    return found


def harvest(folder: Path) -> list[str]:
    """Return the distinct docstrings of all Python files under a folder, sorted; tests are left out.

    Raises:
        DataError: if there is none.
    """
    found = {text for path in sorted(folder.rglob("*.py")) if _is_source(path, folder) for text in _of_file(path)}
    if not found:
        raise DataError(f"{folder} holds no Python file with a docstring. Give your own text: --data FILE_OR_FOLDER.")
    return sorted(found)


def cache_folder() -> Path:
    """Return where this user's caches lie: `$XDG_CACHE_HOME/wholebatch`, by default `~/.cache/wholebatch`."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "wholebatch"


def _is_source(path: Path, folder: Path) -> bool:
    return not _LEFT_OUT.intersection(path.relative_to(folder).parts)


def _tree_of(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old library files hold escapes that newer parsers warn of
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # a template, or a file for another Python
        return ast.Module([], [])


def _of_file(path: Path) -> Iterator[str]:
    tree = _tree_of(path)
    # Not ast.walk, which visits every expression: definitions inside definitions are enough, and ten times faster.
    yield from _of_tree(tree)


def _of_tree(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield the docstring of a node and of the definitions directly inside, which is where nearly all of them are."""
    text = ast.get_docstring(node)
    if text:
        yield text
    for child in node.body:
        if isinstance(child, _DEFINITIONS):
            yield from _of_tree(child)


def _pairs_of(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield every function's signature with its docstring, if that says more than a word or two."""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(child) or ""
            if len(text) > 20:
                yield f"{child.name}({ast.unparse(child.args)})", text
        if isinstance(child, _DEFINITIONS):
            yield from _pairs_of(child)


def _keep(cache: Path, found: Sequence[object]) -> None:
    """Write the cache in one move; without a place for it, go on without."""
    part = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(cache)
    except OSError:
        with suppress(OSError):
            part.unlink()
