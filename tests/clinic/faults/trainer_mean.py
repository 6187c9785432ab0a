"""Trainer with the mean of each piece in compute_loss, taken for already divided. Planted: loss-not-divided"""

import tempfile

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=32)  # fmt: skip
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


class MeanTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=2, learning_rate=1e-3,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    MeanTrainer(LlamaForCausalLM(config), arguments, data_collator=collate, train_dataset=data).train()
