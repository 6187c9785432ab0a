"""The public names: all there, documented, typed, in the documentation, and nothing besides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import wholebatch as wb

ROOT = Path(__file__).parents[1]
NAMES = sorted(wb.__all__)
DOCUMENTED = [name for name in NAMES if callable(getattr(wb, name, None))]


def signatures(thing: object) -> list[Callable[..., object]]:
    """A function itself; of a class its own public methods and its constructor."""
    if not inspect.isclass(thing):
        return [thing] if inspect.isfunction(thing) else []
    return [m for name, m in vars(thing).items() if inspect.isfunction(m) and (name == "__init__" or name[0] != "_")]


def test_the_promised_names_are_there() -> None:
    promised = {
        "backward", "Result", "Step", "StepResult", "windows", "Window", "mean", "total", "from_mean", "LossSum",
        "once", "losses", "Tokens", "WholeBatchError", "LossError", "SplitError", "InexactError", "NonFiniteError",
        "SyncError", "Auto", "OutOfMemoryError", "plan", "checkpointed", "Arrangement",
    }  # fmt: skip
    assert promised <= set(NAMES)


def test_all_lists_what_is_public_and_nothing_else() -> None:
    public = {name for name, value in vars(wb).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert set(NAMES) - public <= {"losses", "doctor", "norms", "distributed", "policies"}, (
        "only rooms that users write as wb.room.name may be modules"
    )
    assert public - {"annotations"} <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))


def test_former_names_of_counts_answer_as_the_new_ones_do() -> None:
    model, rows = torch.nn.Linear(3, 1), torch.ones(5, 3)
    arrangement = wb.Arrangement(130, 4, ranks=2)
    check = wb.check(model, lambda model, x: model(x).square(), rows, 2)
    assert arrangement.pieces == arrangement.micro_batches == 17
    assert check.reference_pieces == check.reference_micro_batches == 1


def test_former_names_are_the_same_classes() -> None:
    assert (wb.Mean, wb.Coupled, wb.Coupling) == (wb.LossSum, wb.CoupledLoss, wb.CouplingReport)
    assert wb.Mean(torch.tensor(6.0), 3).value == wb.mean(torch.full((3,), 2.0)).value


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (wb.distributed, ("DealtBatches", "Pipeline", "Shares", "shares")),
        (wb.policies, ("NominalBatch", "scale_adam", "scale_lr")),
    ],
    ids=["distributed", "policies"],
)
def test_a_named_module_has_what_the_top_level_has(module: ModuleType, names: tuple[str, ...]) -> None:
    assert [getattr(module, name) for name in names] == [getattr(wb, name) for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_can_be_imported(name: str) -> None:
    assert getattr(wb, name) is not None


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_begins_its_docstring_with_a_sentence(name: str) -> None:
    first = (inspect.getdoc(getattr(wb, name)) or "").split("\n\n")[0].replace("\n", " ")
    assert first.endswith((".", ":")), f"wb.{name}: {first!r}"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_has_types(name: str) -> None:
    for function in signatures(getattr(wb, name)):
        untyped = [
            p for p in inspect.signature(function).parameters if p != "self" and p not in function.__annotations__
        ]
        assert not untyped, f"{function.__qualname__}: {untyped}"
        assert "return" in function.__annotations__, function.__qualname__


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_common_user_meets_few_parameters(name: str) -> None:
    thing = getattr(wb, name)
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return
    for function in signatures(thing):
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        record = inspect.isclass(thing) and hasattr(thing, "__dataclass_fields__")
        assert record or len(named) <= 10, f"{function.__qualname__} takes {len(named)}: {named}"


def test_no_room_bears_the_name_of_a_public_function() -> None:
    rooms = {path.stem for path in (ROOT / "src" / "wholebatch").iterdir()}
    shadowed = {name for name in rooms & set(NAMES) if not isinstance(getattr(wb, name), ModuleType)}
    assert shadowed <= {"check"}, "a module of that name would take its place as soon as it is imported"


def test_the_api_page_shows_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = {line.rpartition(".")[2] for line in page.splitlines() if ":: wholebatch" in line}
    former = page.split("## Former names")[1]
    missing = [name for name in NAMES if name not in shown and f"`wb.{name}`" not in former]
    assert not missing, f"docs/api.md lacks {missing}"


def test_who_cites_it_cites_this_version() -> None:
    assert f"\nversion: {wb.__version__}\n" in (ROOT / "CITATION.cff").read_text()
