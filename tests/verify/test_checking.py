"""`wb.check`: silent where `backward` is exact, and a cause where it is not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

BATCH = 18


def labelled(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 5), torch.randint(0, 3, (rows,))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def in_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    rows = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)), reduction="none")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 4, BATCH, None], ids=str)
def test_an_exact_gradient_is_called_exact(dtype: torch.dtype, size: int | None) -> None:
    inputs, targets = labelled()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    report = wb.check(model, cross_entropy, (inputs.to(dtype), targets), size)
    assert report.ok, str(report)
    assert report.findings == ()
    assert report.micro_batches == (1 if size is None else -(-BATCH // size))
    if dtype == torch.float64:
        assert report.error < 1e-14
        assert report.tolerance < 1e-11


def test_rows_that_meet_in_the_loss_are_found() -> None:
    report = wb.check(nn.Linear(5, 3), in_batch, labelled(), 4)
    assert not report.ok
    assert [finding.rule for finding in report.findings] == ["rows-meet"]
    assert report.error > 0.1
    assert "coupled_backward" in report.findings[0].change.into
    assert wb.check(nn.Linear(5, 3), in_batch, labelled(), BATCH).ok


def test_rows_that_meet_in_a_module_are_found_and_the_module_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    model = nn.Sequential(nn.Linear(5, 8), Centred(), nn.Linear(8, 3))
    report = wb.check(model, cross_entropy, labelled(), 6)
    assert report.findings[0].rule == "rows-meet"
    assert "'1'" in report.findings[0].what


def test_batch_norm_in_micro_batches_is_found_and_exact_batch_norm_is_not() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    micro = wb.check(model, cross_entropy, labelled(), 6, batch_norm="micro")
    assert micro.findings[0].rule == "rows-meet"
    assert "BatchNorm" in micro.findings[0].what
    assert wb.check(model, cross_entropy, labelled(), 6, batch_norm="exact").ok


def test_counts_that_do_not_add_up_are_found() -> None:
    def miscounted(model: nn.Module, batch: Any) -> Any:
        return wb.from_mean(cross_entropy(model, batch).mean(), items=len(batch[1]) + 1)

    report = wb.check(nn.Linear(5, 3), miscounted, labelled(), 4)
    assert [finding.rule for finding in report.findings] == ["items-do-not-add-up"]
    right = wb.check(
        nn.Linear(5, 3), lambda m, b: wb.from_mean(cross_entropy(m, b).mean(), items=len(b[1])), labelled(), 4
    )
    assert right.ok


def test_a_forgotten_dropout_is_named_and_held_still_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    report = wb.check(model, cross_entropy, labelled(), 4)
    assert report.ok, str(report)
    assert "draws random numbers" in report.notes[0]
    assert "held still on both sides" in report.notes[0]
    assert report.reference_micro_batches == 1


def test_dropout_does_not_hide_an_inexact_gradient() -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Linear(32, 3))

    def wrong(model: nn.Module, batch: Any) -> Any:
        values = cross_entropy(model, batch)
        return wb.mean(values * (2.0 if torch.is_grad_enabled() and len(values) < 4 else 1.0))

    assert wb.check(model, cross_entropy, labelled(), 4).ok
    assert wb.check(model, wrong, labelled(), 4).verdict == "not exact"
    assert wb.check(nn.Linear(5, 3), wrong, labelled(), 4).verdict == "not exact"


def test_rows_that_meet_are_found_beside_a_dropout() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    apart = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    together = nn.Sequential(nn.Linear(5, 8), Centred(), nn.Dropout(0.5), nn.Linear(8, 3))
    assert wb.check(apart, cross_entropy, labelled(), 6).ok
    report = wb.check(together, cross_entropy, labelled(), 6)
    assert [finding.rule for finding in report.findings] == ["rows-meet"]
    assert "'1'" in report.findings[0].what


def test_a_model_that_changes_with_every_call_is_found() -> None:
    class Drifting(nn.Linear):
        calls = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Drifting.calls += 1
            return super().forward(x) * Drifting.calls

    with pytest.raises(wb.InexactError, match="same draws"):
        wb.check(Drifting(5, 3), cross_entropy, labelled(), 4, strict=True)


def test_strict_raises_with_the_finding_and_is_silent_otherwise() -> None:
    wb.check(nn.Linear(5, 3), cross_entropy, labelled(), 4, strict=True)
    with pytest.raises(wb.InexactError, match="rows-meet"):
        wb.check(nn.Linear(5, 3), in_batch, labelled(), 4, strict=True)


def test_each_parameter_has_its_share_of_the_error() -> None:
    temperature = nn.Parameter(torch.tensor(0.5))
    report = wb.check(nn.Linear(5, 3), lambda m, b: in_batch(m, b) * temperature, labelled(), 6)
    assert set(report.by_parameter) == {"weight", "bias", "loss_fn[0]"}
    assert sum(error**2 for error in report.by_parameter.values()) ** 0.5 == pytest.approx(report.error, rel=1e-6)
    assert list(report.by_parameter.values()) == sorted(report.by_parameter.values(), reverse=True)


def test_checking_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    model[0].weight.grad = torch.full((8, 5), 3.0)
    batch = labelled()
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    wb.check(model, cross_entropy, batch, 6, batch_norm="micro")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((8, 5), 3.0))
    assert model[3].weight.grad is None
    assert torch.equal(draws, torch.get_rng_state())


def test_tokens_windows_and_samples_are_checked_like_batches() -> None:
    labels = torch.randint(0, 7, (12, 8))
    labels[torch.arange(8) > torch.randint(2, 8, (12, 1))] = -100
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))

    def loss_fn(model: nn.Module, labels: torch.Tensor) -> Any:
        return wb.losses.causal_lm(model(labels.clamp(min=0)), labels)

    assert wb.check(model, loss_fn, wb.Window([labels[:5], labels[5:]])).ok
    samples = [row[row != -100] for row in labels]
    pad = nn.utils.rnn.pad_sequence
    report = wb.check(model, loss_fn, samples, 5, collate=lambda rows: pad(rows, batch_first=True, padding_value=-100))
    assert report.ok, str(report)


def test_the_text_says_error_tolerance_and_verdict() -> None:
    text = str(wb.check(nn.Linear(5, 3), cross_entropy, labelled(), 4))
    assert text.startswith("gradient error ")
    assert text.endswith("exact")


def clip(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


@pytest.mark.parametrize(
    ("hook", "exact"),
    [
        (lambda gradient: gradient * 0.5, True),
        (lambda gradient: gradient * (torch.arange(gradient.numel()).view_as(gradient) % 2), True),
        (lambda gradient: None, True),
        (clip, False),
        (lambda gradient: gradient / gradient.norm(), False),
        (lambda gradient: gradient + 0.1, False),
        (lambda gradient: gradient.relu(), False),
    ],
    ids=["halves", "masks", "looks", "clips", "normalises", "adds", "cuts"],
)
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_hooks_on_parameters_see_micro_batches_and_are_named_where_that_matters(
    hook: Any, exact: bool, drop: float
) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(drop), nn.Linear(8, 3)).double()
    model[2].weight.register_hook(hook)
    inputs, targets = labelled()
    report = wb.check(model, cross_entropy, (inputs.double(), targets), 4)
    assert report.ok is exact, str(report)
    if not exact:
        assert [finding.rule for finding in report.findings] == ["hooks-see-pieces"]
        assert "'2.weight'" in report.findings[0].what
        assert wb.check(model, cross_entropy, (inputs.double(), targets), None).ok


def test_the_error_that_a_hook_makes_is_that_of_the_real_gradient() -> None:
    model = nn.Linear(5, 3).double()
    inputs, targets = labelled()
    batch = inputs.double(), targets
    clean = torch.autograd.grad(cross_entropy(model, batch).mean(), model.weight)[0]
    for parameter in model.parameters():
        parameter.register_hook(clip)
    report = wb.check(model, cross_entropy, batch, 4)
    wb.backward(model, cross_entropy, batch, 4, verify="never")
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    cross_entropy(model, batch).mean().backward()
    truth = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert report.error == pytest.approx(float((ours - truth).norm() / truth.norm()), rel=1e-9)
    assert float(clean.abs().max()) > 1e-3  # the hook had something to do


def test_a_hook_that_steps_after_each_accumulation_is_refused_as_by_backward() -> None:
    model = nn.Linear(5, 3)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(wb.InexactError, match="runs after each accumulation"):
        wb.check(model, cross_entropy, labelled(), 4)
    assert wb.check(model, cross_entropy, labelled()).ok


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: None,
        lambda model, batch: wb.mean(cross_entropy(model, batch), torch.zeros(len(batch[1]))),
        lambda model, batch: 0.0 * wb.mean(cross_entropy(model, batch)),
    ],
    ids=["None", "no items", "no weight"],
)
@pytest.mark.parametrize("size", [4, None])
def test_a_gradient_of_zeros_certifies_nothing(loss_fn: Any, size: int | None) -> None:
    report = wb.check(nn.Linear(5, 3), loss_fn, labelled(), size)
    assert not report.ok
    assert [finding.rule for finding in report.findings] == ["nothing-to-compare"]


def test_some_micro_batches_without_a_loss_are_no_finding() -> None:
    def now_and_then(model: nn.Module, batch: Any) -> Any:
        kept = batch[1] > 0
        return wb.mean(cross_entropy(model, batch), kept) if bool(kept.any()) else None

    inputs, targets = labelled()
    targets[:4] = 0
    assert wb.check(nn.Linear(5, 3), now_and_then, (inputs, targets), 4).ok


@pytest.mark.parametrize("way", ["samples", "window", "padded window", "whole"])
def test_where_rows_meet_is_found_in_every_kind_of_batch(way: str) -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    model = nn.Sequential(nn.Linear(5, 8), Centred(), nn.Linear(8, 3))
    rows = torch.randn(BATCH, 5)
    batch, size, options = {
        "samples": (list(rows), 6, {"collate": torch.stack}),
        "window": (wb.Window(rows.split(6)), None, {}),
        "padded window": (wb.Window([rows[:9, None], rows[9:, None].expand(-1, 2, -1)]), None, {}),
        "whole": ({"x": rows, "w": torch.ones(BATCH, 2)}, 6, {"whole": ("w",)}),
    }[way]

    def squares(model: nn.Module, batch: Any) -> Any:
        out = model(batch["x"] if isinstance(batch, dict) else batch)
        return wb.mean(out.square() if not isinstance(batch, dict) else out.square() * batch["w"].mean())

    report = wb.check(model, squares, batch, size, **options)  # type: ignore[arg-type]
    assert report.reference_micro_batches == (2 if way == "padded window" else 1)
    assert report.findings[0].rule == "rows-meet"
    assert "'1'" in report.findings[0].what


def padded(rows: int = 12) -> dict[str, torch.Tensor]:
    lengths = torch.randint(2, 9, (rows,))
    lengths[0] = 8
    mask = torch.arange(8) < lengths[:, None]
    return {"ids": torch.randint(1, 7, (rows, 8)) * mask, "mask": mask}


def pooled_over(mask: Any) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        said = model(batch["ids"])
        keep = mask(batch)[..., None]
        return wb.mean(((said * keep).sum(1) / keep.sum(1)).square())

    return loss_fn


MASKED, UNMASKED = pooled_over(lambda batch: batch["mask"]), pooled_over(lambda batch: torch.ones_like(batch["mask"]))


@pytest.mark.parametrize("size", [wb.Tokens(24, mask="mask"), wb.Auto(wb.Tokens(24, mask="mask"))], ids=str)
def test_padding_that_counts_in_the_loss_is_told_from_rows_that_meet(size: Any) -> None:
    model, batch = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double(), padded()
    assert wb.check(model, MASKED, batch, size).ok
    report = wb.check(model, UNMASKED, batch, size)
    assert [finding.rule for finding in report.findings] == ["padding-counts"]
    assert wb.check(model, UNMASKED, batch, 4).ok  # by rows, nothing is trimmed


def test_padding_that_counts_is_found_where_micro_batches_are_collated() -> None:
    model, batch = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double(), padded()
    samples = [row[keep] for row, keep in zip(batch["ids"], batch["mask"], strict=True)]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"ids": ids, "mask": ids > 0}

    assert wb.check(model, MASKED, samples, 4, collate=collate).ok
    report = wb.check(model, UNMASKED, samples, 4, collate=collate)
    assert [finding.rule for finding in report.findings] == ["padding-counts"]


def test_inputs_that_the_loss_function_makes_to_differentiate_are_not_compared() -> None:
    def penalised(model: nn.Module, x: torch.Tensor) -> Any:
        x = x.detach().clone().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(score)[:, 0] + (slope.norm(dim=1) - 1).square()

    model, rows = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(9, 5)
    assert wb.check(model, penalised, rows, 4).ok
    meeting = wb.check(model, lambda m, x: penalised(m, x - x.mean(0)), rows, 4)
    assert meeting.verdict == "not exact"


def bags(lengths: list[int]) -> dict[str, torch.Tensor]:
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return {"text": torch.randint(0, 20, (sum(lengths),)), "offsets": starts, "y": torch.randint(0, 3, (len(lengths),))}


def test_offsets_into_a_ready_made_micro_batch_are_not_glued_to_others() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["text"], batch["offsets"]), batch["y"], reduction="none")

    model, window = nn.EmbeddingBag(20, 3), wb.Window([bags([3, 2, 4]), bags([1, 5]), bags([2])])
    report = wb.check(model, loss_fn, window)
    assert report.error < 1e-6 and report.verdict != "not exact", str(report)
    glued = {name: torch.cat([part[name] for part in window]) for name in window[0]}
    model.zero_grad()
    loss_fn(model, glued).mean().backward()  # what gluing would take for the truth
    assert not torch.allclose(model.weight.grad, whole_of(model, loss_fn, window), atol=1e-2)


def whole_of(model: nn.Module, loss_fn: Any, window: Any) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(torch.cat([loss_fn(model, part) for part in window]).mean(), model.parameters())
    return gradient


def test_a_scripted_model_is_read_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        model = torch.jit.script(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
    assert wb.check(model, cross_entropy, labelled(), 4).ok
    assert not wb.check(model, in_batch, labelled(), 4).ok


def ragged_means(model: nn.Module, batch: Any) -> torch.Tensor:
    rows = torch.stack([row.mean(0) for row in model(batch[0]).unbind()])
    return F.cross_entropy(rows, batch[1], reduction="none")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("naive", [False, True])
def test_a_jagged_batch_is_copied_with_its_offsets(naive: bool) -> None:
    rows = [torch.randn(length, 5, dtype=torch.float64) for length in (3, 7, 2, 5, 1, 4)]
    batch = (torch.nested.nested_tensor(rows, layout=torch.jagged), torch.randint(0, 3, (6,)))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def alone(model: nn.Module, batch: Any) -> Any:
        return wb.from_mean(ragged_means(model, batch).mean(), items=1)

    report = wb.check(model, alone if naive else ragged_means, batch, 4, verify="never")
    assert report.verdict == ("not exact" if naive else "exact"), str(report)


@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("naive", [False, True])
def test_a_double_model_whose_loss_is_single_rounds_as_that_and_hides_nothing_larger(rows: int, naive: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        values = cross_entropy(model, batch).float()
        return values * (1 + 1e-6 * len(values)) if naive else values

    batch = (torch.randn(rows, 5, dtype=torch.float64), torch.randint(0, 3, (rows,)))
    report = wb.check(model, loss_fn, batch, 4, verify="never")
    assert report.verdict == ("not exact" if naive else "exact"), str(report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("naive", [False, True])
def test_a_converged_model_is_measured_by_its_own_rounding(dtype: torch.dtype, naive: bool) -> None:
    inputs, weight = torch.randn(20, 6).double(), torch.randn(6, 1).double()
    targets = inputs @ weight + 1e-3 * torch.randn(20, 1).double()
    best = torch.linalg.lstsq(inputs, targets).solution
    near = 1e-9 if dtype is torch.float64 else 3e-5
    model = nn.Linear(6, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_((best + near * torch.randn(6, 1)).T)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        values = (model(batch[0]) - batch[1]).square().mean(1)
        return wb.from_mean(values.mean(), items=1) if naive else values

    report = wb.check(model, loss_fn, (inputs.to(dtype), targets.to(dtype)), 7, verify="never")
    assert report.verdict == ("not exact" if naive else "exact"), str(report)


def test_draws_of_one_row_that_serve_another_are_refused_alike_by_the_proof_and_the_check() -> None:
    def mirrored(model: nn.Module, rows: Any) -> Any:
        drawn = torch.rand(len(rows) // 2 + 1, 1)
        return model(rows + torch.cat([drawn, 1 - drawn])[: len(rows)]).square().mean(1)

    def with_rows(model: nn.Module, batch: Any) -> Any:
        return model(batch[0] + batch[1]).square().mean(1)

    model, rows, drawn = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), torch.randn(12, 5), torch.rand(6, 1)
    with pytest.raises(wb.InexactError, match="Draw them with the batch"):
        wb.backward(model, mirrored, rows, 5)
    report = wb.check(model, mirrored, rows, 5, verify="never")
    assert report.verdict == "not exact" and any("Draw them with the batch" in note for note in report.notes)
    assert wb.check(model, with_rows, (rows, torch.cat([drawn, 1 - drawn])), 5).ok
