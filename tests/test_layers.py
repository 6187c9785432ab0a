"""The rooms of the house: who may import whom, and what may be heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "wholebatch"

# From the ground up: a package, or a file that stands alone, imports only from those above it in this list.
ORDER = (
    "amounts",
    "errors",
    "noise_scale",
    "options",
    "loss",
    "losses",
    "model",
    "batch",
    "ranks",
    "first_window",
    "batchnorm",
    "norms",
    "tiling",
    "gradient",
    "distributed",
    "step",
    "policies",
    "planning",
    "verify",
    "doctor",
    "integrations",
    "train",
    "cli",
    "__init__",
    "__main__",
)
DOORS = ("doctor", "integrations", "train")
RANK = {room: place for place, room in enumerate(ORDER)}

# What a room may import besides the standard library, torch (with the typing_extensions it brings) and wholebatch.
FRAMEWORKS = {
    "integrations/accelerate": {"accelerate"},
    "integrations/lightning": {"lightning", "lightning_fabric", "pytorch_lightning"},
    "integrations/trainer_refusals": {"transformers"},
    "integrations/trainer_shares": {"transformers"},
    "integrations/transformers": {"transformers", "accelerate"},
    "integrations/ultralytics": {"ultralytics"},
    "train": {"PIL", "numpy", "pyarrow", "rich", "safetensors", "sklearn", "transformers", "tyro", "yaml"},
    "cli": {"tyro"},
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, by its absolute dotted name, with the line."""
    package = ("wholebatch", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def rooms_imported(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] == "wholebatch":
            inside = len(parts) > 1 and parts[1] in RANK
            yield (parts[1] if inside else "__init__"), line


def test_every_room_has_its_place() -> None:
    unplaced = {room_of(path) for path in modules()} - set(RANK)
    assert not unplaced, f"give {sorted(unplaced)} a place in ORDER"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_from_below(path: Path) -> None:
    room = room_of(path)
    wrong = []
    for other, line in rooms_imported(path):
        above = other != room and RANK[other] > RANK.get(room, 0)
        between_doors = room in DOORS and other in DOORS and other != room
        as_a_user = room in (*DOORS, "cli") and other == "__init__"
        if (above or between_doors) and not as_a_user:
            wrong.append(f"line {line}: {room} imports {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_no_framework_but_its_own(path: Path) -> None:
    allowed = {
        "torch",
        "typing_extensions",
        "wholebatch",
        *FRAMEWORKS.get(room_of(path), ()),
        *FRAMEWORKS.get(name_of(path), ()),
    }
    foreign = {module.split(".")[0] for module, _ in imports_of(path)} - allowed - sys.stdlib_module_names
    assert not foreign, f"{name_of(path)} imports {sorted(foreign)}"


@pytest.mark.parametrize(
    ("file", "forbidden"), [("gradient/separable", "torch.optim"), ("step", "wholebatch.loss.terms")]
)
def test_the_gradient_knows_no_optimizer_and_the_step_no_loss(file: str, forbidden: str) -> None:
    imported = {name for name, _ in imports_of(SOURCE / f"{file}.py")} - {
        "wholebatch.loss.terms.LossFunction"
    }  # a type
    assert not [name for name in imported if f"{name}.".startswith(f"{forbidden}.")]


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after one statement, without those of the standard library."""
    program = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(run.stdout.split()) - sys.stdlib_module_names


def test_importing_wholebatch_loads_torch_and_nothing_else() -> None:
    assert loaded_by("import wholebatch") - loaded_by("import torch") == {"wholebatch"}


def test_importing_wholebatch_loads_neither_the_doctor_nor_a_door() -> None:
    program = "import sys, wholebatch; print(*(name for name in sys.modules if name.startswith('wholebatch.')))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {name.split(".")[1] for name in run.stdout.split()} & set(DOORS)


def test_importing_wholebatch_has_no_effect() -> None:
    program = """
import random, torch, warnings, logging
def world():
    return (
        torch.get_rng_state().sum().item(), random.getstate(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), list(warnings.filters), logging.getLogger().level, logging.getLogger().handlers[:],
        torch.Tensor.backward, torch.nn.Module.__call__, torch.optim.Optimizer.step,
    )
before = world()
import wholebatch
assert world() == before
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
