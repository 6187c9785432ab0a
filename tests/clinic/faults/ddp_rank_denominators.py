"""Two ranks. Each rank divides by its own tokens. Planted: rank-local-denominator"""

import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

LENGTHS = ((5, 1, 4, 2, 3, 3), (2, 6, 1, 1, 7, 4))


def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [torch.randint(0, 9, (length + 1,)) for length in LENGTHS[rank]]
    for window in (rows[:3], rows[3:]):
        own = float(sum(len(row) - 1 for row in window))
        items = torch.tensor(own)
        dist.all_reduce(items)
        for place, row in enumerate(window):
            with nullcontext() if place == len(window) - 1 else model.no_sync():
                loss = F.cross_entropy(model(row[:-1]), row[1:], reduction="sum")
                (loss / own).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as shared:
        mp.spawn(train, (shared,), nprocs=2)
