"""The program's own networks: a byte-level decoder for text, and two small classifiers.

Plain torch, small enough to be read in one go and to be trained on a laptop; none of them knows of micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.train.errors import ConfigError


class Block(nn.Module):
    """One pre-norm decoder block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        width: features of a position.
        heads: attention heads, each of ``width / heads`` features.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return x (rows, length, width) after attention to earlier positions and the MLP."""
        x = x + self._attend(self.attention_norm(x), turn)
        x = x + self.mlp(self.mlp_norm(x))
        return x

    def _attend(self, x: Tensor, turn: Tensor) -> Tensor:
        """Let every position look at itself and at those before it.

        Rows are padded on the right, so no real position ever sees padding, and no mask is needed.
        """
        rows, length, width = x.shape
        heads = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(rotate(query, turn), rotate(key, turn), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Decoder(nn.Module):
    """A causal language model: embeddings, pre-norm blocks with rotary positions, a linear head.

    Args:
        vocabulary: how many tokens there are.
        width: features of a position; each head needs an even share of them.
        layers: number of blocks.
        heads: attention heads of a block.

    Raises:
        ConfigError: if the heads cannot share the width.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(
                f"A width of {width} gives {heads} heads no even share. Choose a multiple of {2 * heads}."
            )
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head_width = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (rows, length, vocabulary) of the token after each of ``tokens`` (rows, length)."""
        x = self.embedding(tokens)
        turn = turns(tokens.shape[1], self.head_width).to(x)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits


def turns(length: int, width: int) -> Tensor:
    """Return the cosine and sine (2, length, width / 2) by which each position turns each pair of features."""
    # In float64, then rounded once: late positions keep their angle.
    speed = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of features (..., length, width) by their position, so that products depend on distances alone."""
    first, second = x.chunk(2, -1)
    cosine, sine = turn
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


def classifier(shape: torch.Size, classes: int, width: int, layers: int) -> nn.Sequential:
    """Return a small classifier: convolutions for images (channels, height, width), dense layers for vectors.

    No layer lets rows meet: there is no BatchNorm.
    """
    if len(shape) == 3:
        return nn.Sequential(*_convolutions(shape, width, layers), nn.Linear(4 * width, classes))
    return nn.Sequential(*_dense(shape[0], width, layers), nn.Linear(width, classes))


def parameters_of(model: nn.Module) -> int:
    """Count a model's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _dense(inputs: int, width: int, layers: int) -> list[nn.Module]:
    body: list[nn.Module] = []
    for layer in range(layers):
        body += [nn.Linear(width if layer else inputs, width), nn.GELU()]
    return body


def _convolutions(shape: torch.Size, width: int, layers: int) -> list[nn.Module]:
    """Convolutions, every second one followed by a halving of the image, down to 2 x 2 places."""
    body: list[nn.Module] = []
    side = min(shape[1:])
    for layer in range(layers):
        body += [nn.Conv2d(width if layer else shape[0], width, 3, padding=1), nn.GELU()]
        if layer % 2 == 0 and side > 2:
            body.append(nn.MaxPool2d(2))
            side //= 2
    return [*body, nn.AdaptiveAvgPool2d(2), nn.Flatten()]
