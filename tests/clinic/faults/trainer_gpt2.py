"""GPT-2 on the Trainer: the labels are counted before the shift. Planted: labels-counted-before-shift"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                    attn_pdrop=0.0, loss_type=None)  # fmt: skip
lengths = (5, 9, 3, 12, 4, 4, 8, 3, 10, 6, 5, 7, 3, 11)
data = [{"input_ids": torch.randint(0, 23, (length,))} for length in lengths]


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = sample["input_ids"]
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=2, learning_rate=1e-3,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(GPT2LMHeadModel(config), arguments, data_collator=collate, train_dataset=data).train()
