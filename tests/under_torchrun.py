"""The programs that test_elastic.py and test_two_agents.py give to torchrun: they import nothing of the tests.

It starts them nine times, and four; pytest, and torch._dynamo for an optimizer of torch, would be a second each time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hpcomm

# --- Workers that are started again -----------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """Rank 1 is killed in the first two attempts: once in the middle, once before it has said anything to the store,
    which torchrun keeps.
    """
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if (attempt, rank) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=30))
    group = dist.new_group([0, 1])
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)  # type: ignore[union-attr]
    memory = backend.allocate_tensor(1 << 16, dtype=torch.float32, device=cpu)
    found = []
    for step in range(5):
        if (attempt, rank, step) == (0, 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        number = torch.tensor([10.0**rank + attempt])
        dist.all_reduce(number)
        if rank < 2:
            dist.all_reduce(memory.fill_(10.0**rank), group=group)
        found.append([number.item(), memory[-1].item() if rank < 2 else 0.0])
    (folder / f"{rank}.json").write_text(json.dumps([attempt, group_name(), found]))
    dist.destroy_process_group()


def group_name() -> str:
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).name())  # type: ignore[union-attr]


# --- Two agents -------------------------------------------------------------------------------------------------------


def trained() -> tuple[list[str], list[str]]:
    """The losses of three steps, in full, and the transports of this rank's dp and pp groups."""
    with hpcomm.init(dp=2, pp=2) as mesh:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        pipe = hpcomm.Pipeline(
            nn.Sequential(*layers),
            mesh=mesh,
            num_microbatches=4,
            loss_fn=nn.functional.mse_loss,
            schedule="zbv",
            deterministic=True,  # or transports would add in orders of their own
        )
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh.dp.rank)
            x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
            pipe.zero_grad()
            losses.append(float(pipe.step(x, target=y)).hex())
            with torch.no_grad():
                for p in pipe.parameters():
                    assert p.grad is not None
                    p.sub_(0.5 * p.grad)
        return losses, [mesh.dp.transport, mesh.pp.transport]


def trained_into(folder: Path) -> None:
    """HPCOMM_HOST keeps agents apart, as hosts would be: the dp groups (ranks 0 and 1, 2 and 3) lie within one, the pp
    groups span both.
    """
    agent = os.environ["GROUP_RANK"]
    os.environ["HPCOMM_HOST"] = f"host {agent}"
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps([trained(), agent]))


if __name__ == "__main__":
    {"work": work, "trained_into": trained_into}[sys.argv[1]](Path(sys.argv[2]))
