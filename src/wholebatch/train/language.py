"""Text as tokens, and the model that reads them: bytes and our own decoder, or a Hugging Face folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wholebatch.loss.terms import LossSum, from_mean
from wholebatch.losses import causal_lm
from wholebatch.model.checkpointing import checkpointed
from wholebatch.model.memory import counting_again
from wholebatch.tiling.blocks import tiled
from wholebatch.train.config import Config
from wholebatch.train.errors import ConfigError
from wholebatch.train.extras import require
from wholebatch.train.model import Block, Decoder, parameters_of

END = 256
"""The token around every row of bytes; the bytes themselves are the tokens 0 to 255."""


class Language(Protocol):
    """A vocabulary and the causal model that speaks it."""

    model: nn.Module
    context: int
    name: str

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a row, its end included."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; special ones say nothing."""

    def logits(self, model: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Return (rows, length, vocabulary) from tokens (rows, length), padded on the right where not real."""

    def loss(self, model: Any, tokens: Tensor, labels: Tensor, ignored: int) -> LossSum:
        """Return the cross entropy of every next token that is not ignored."""

    def tile(self) -> None:
        """Let the model's blocks run over tiles of positions."""

    def export(self, folder: Path) -> None:
        """Write beside the weights what others need to open them."""

    def checkpoint(self) -> None:
        """Let the model's blocks compute their activations again in the backward."""

    def proceed(self, model: Any, prompt: str, length: int) -> str:
        """Return the prompt and up to ``length`` more tokens that the model draws."""


class Bytes:
    """UTF-8 bytes as tokens, read by a small decoder of our own."""

    def __init__(self, config: Config) -> None:
        self.context = config.context
        self.model: nn.Module = Decoder(END + 1, config.width, config.layers, config.heads)
        self.name = f"byte-level decoder, {config.layers} x {config.width}, {parameters_of(self.model):,} parameters"

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a row between two end tokens."""
        return [END, *text.encode(), END]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; what is no UTF-8 is replaced."""
        return bytes(token for token in tokens if token < END).decode(errors="replace")

    def logits(self, model: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Return the logits of each next byte."""
        logits: Tensor = model(tokens)
        return logits

    def loss(self, model: Any, tokens: Tensor, labels: Tensor, ignored: int) -> LossSum:
        """Return the loss of all logits: 257 of a token are few."""
        return causal_lm(self.logits(model, tokens, labels != ignored), labels)

    def tile(self) -> None:
        """Run each block's MLP over tiles."""
        tiled(self.model)

    def proceed(self, model: Any, prompt: str, length: int) -> str:
        """Draw bytes at temperature 0.8, the same ones every time, until the row ends."""
        tokens = self.encode(prompt)[:-1]
        # Draws of its own: a sample must not change what the run draws next.
        draws = torch.Generator().manual_seed(0)
        device = next(model.parameters()).device
        for _ in range(length):
            logits = model(torch.tensor([tokens[-self.context :]], device=device))[0, -1].float().cpu()
            token = int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=draws))
            if token == END:
                break
            tokens.append(token)
        return self.decode(tokens)

    def export(self, folder: Path) -> None:
        """Write nothing: only this program opens the decoder."""

    def checkpoint(self) -> None:
        """Checkpoint each block."""
        checkpointed(self.model, Block)


class HuggingFace:
    """A causal model and its tokenizer from a local folder; nothing is ever fetched."""

    def __init__(self, config: Config, folder: Path) -> None:
        transformers = require("transformers", "hf", "A model folder")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is no Hugging Face model folder: config.json is missing.")
        # Its bars and hints would break into our own lines.
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            # Said outright, whatever the defaults: no code that lies in the folder is run, no pickle in it believed.
            given = {"local_files_only": True, "trust_remote_code": False}
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **given)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, **given, weights_only=True)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"{folder} does not hold a causal model with its tokenizer: {first}") from None
        self.model: nn.Module = loaded.float()
        self._tiled = False
        # Keys and values are kept for generation; in training they only take memory.
        loaded.config.use_cache = False
        self.end: int | None = self.tokenizer.eos_token_id
        self.context = min(config.context, getattr(loaded.config, "max_position_embeddings", None) or config.context)
        self.name = f"{type(loaded).__name__} from {folder}, {parameters_of(loaded):,} parameters"

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's tokens, closed by its end token if it has one."""
        tokens = list(self.tokenizer(text)["input_ids"])
        if self.end is None or tokens[-1:] == [self.end]:
            return tokens
        return [*tokens, self.end]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def logits(self, model: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Return the logits of each next token."""
        logits: Tensor = model(input_ids=tokens, attention_mask=real.long()).logits
        return logits

    def loss(self, model: Any, tokens: Tensor, labels: Tensor, ignored: int) -> LossSum:
        """Return the loss of the logits, or the model's own where these are not made."""
        real = labels != ignored
        if not self._tiled:
            return causal_lm(self.logits(model, tokens, real), labels)
        count = real[:, 1:].sum()
        own = model(input_ids=tokens, attention_mask=real.long(), labels=labels).loss
        return from_mean(own, count)

    def tile(self) -> None:
        """Run the model's blocks over tiles, and take its own loss without logits."""
        self._tiled = bool(tiled(self.model).heads)

    def proceed(self, model: Any, prompt: str, length: int) -> str:
        """Take the likeliest token, again and again, as far as the model has positions."""
        given = self.tokenizer(prompt, return_tensors="pt").to(model.device)
        room = min(length, self.context - given["input_ids"].shape[1])
        if room < 1 or not given["input_ids"].numel():
            return prompt
        drawn = model.generate(**given, max_new_tokens=room, do_sample=False, use_cache=True, pad_token_id=self.end)
        return self.decode(drawn[0].tolist())

    def checkpoint(self) -> None:
        """Use the model's own switch.

        Raises:
            ConfigError: if it has none.
        """
        settings = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), counting_again())}
        older: Any = self.model.gradient_checkpointing_enable  # its name before transformers 5.24, and there a warning
        enable: Any = getattr(self.model, "activation_checkpointing_enable", older)
        try:
            enable(settings)
        except ValueError as error:
            raise ConfigError(f"checkpoint is on, but the model cannot: {error} Leave it out.") from None

    def export(self, folder: Path) -> None:
        """Write what a weights file lacks, so that `from_pretrained(folder)` opens it."""
        config: Any = self.model.config
        config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
