"""The doctor under torchrun: every rank is watched, one tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from contextlib import nullcontext

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = ((5, 1, 4, 2), (2, 6, 1, 1))[dist.get_rank()]
for i, length in enumerate(lengths):
    row = torch.randint(0, 9, (length + 1,))
    with model.no_sync() if i % 2 == 0 else nullcontext():
        loss = F.cross_entropy(model(row[:-1]), row[1:]) / 2
        loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_the_ranks_of_a_torchrun_are_read_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "-m", "wholebatch", "doctor", "--steps", "0", str(script),
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert "2 ranks" in done.stdout, done.stderr
    assert "micro-batches of 5, 1, 2, 6 items each weigh 1/4 of the window" in done.stdout
    assert done.stdout.count("wholebatch doctor:") == 1
    assert not list(tmp_path.glob("wholebatch-doctor-*"))
