"""A GAN on a ring of points: two optimizers on one graph, each step exact, eight rows in memory at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

Batch = dict[str, torch.Tensor]


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def judged(scores: torch.Tensor, real: bool) -> torch.Tensor:
    return F.softplus(-scores if real else scores).squeeze(1)


def train(micro_batch_size: int | None, steps: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all parameters, and points that the trained generator draws."""
    torch.manual_seed(0)
    generator, critic = network(2, 2), network(2, 1)

    def critic_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
        fake = generator(batch["noise"]).detach()
        return wb.mean(judged(model(batch["points"]), real=True)) + wb.mean(judged(model(fake), real=False))

    def generator_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return judged(
            critic(model(batch["noise"])), real=True
        )  # reaches the critic's .grad too: the step takes that back

    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.05)
    critic_step = wb.Step(critic, critic_optimizer, critic_loss, micro_batch_size=micro_batch_size)
    generator_step = wb.Step(generator, generator_optimizer, generator_loss, micro_batch_size=micro_batch_size)
    for _ in range(steps):
        angle = torch.rand(64) * 2 * torch.pi
        batch = {"points": torch.stack([angle.cos(), angle.sin()], dim=1), "noise": torch.randn(64, 2)}
        critic_step(batch)
        generator_step(batch)
    parameters = torch.cat([p.detach().flatten() for p in (*generator.parameters(), *critic.parameters())])
    return parameters, generator(torch.randn(1000, 2)).detach()


def main() -> None:
    micro_batches, drawn = train(micro_batch_size=8)
    whole, _ = train(micro_batch_size=None)
    print(f"mean radius of the drawn points {drawn.norm(dim=1).mean():.2f} (the ring has 1)")
    print(f"largest difference of the parameters {(micro_batches - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
