"""The Hugging Face Trainer on GPT-2 and uneven lines: its distance to the whole batch's gradient, and ours."""

from __future__ import annotations

import copy
import tempfile

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from wholebatch.integrations.transformers import exact

LINES = [line.encode("ascii", "ignore") for line in transformers.Trainer.__doc__.splitlines() if len(line) > 2]


def collate(rows: list[bytes]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor([*row]) for row in rows]
    return {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(ids, True, padding_value=-100)}


class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: object, model: torch.nn.Module, **kwargs: object) -> None:
        self.gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()])


def gradient_of(trainer: type[transformers.Trainer], model: torch.nn.Module) -> torch.Tensor:
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 1, "max_grad_norm": 0.0}
    quiet, keep = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}, Keep()
    args = transformers.TrainingArguments(tempfile.mkdtemp(), **shape, **quiet)
    trainer(copy.deepcopy(model), args, collate, LINES[:16], callbacks=[keep]).train()
    return keep.gradient


torch.manual_seed(0)
free = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, **free))
whole = copy.deepcopy(model).double()
gradients = torch.autograd.grad(whole(**collate(LINES[:16])).loss, list(whole.parameters()))
true = torch.cat([g.flatten() for g in gradients])
for name, trainer in (("Trainer", transformers.Trainer), ("exact(Trainer)", exact(transformers.Trainer))):
    print(f"{name} gradient error {(gradient_of(trainer, model) - true).norm() / true.norm():.1e}")
