"""Two agents of torchrun, as on two hosts, train the pipeline that one agent trains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from test_examples import kill_tree
from torch import nn

import hpcomm

HERE = Path(__file__).resolve().parent
LIMIT = 180.0  # seconds; ten times what it takes, and more
PROGRAM = "import sys, pathlib, test_two_agents as t; t.trained_into(pathlib.Path(sys.argv[1]))"


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
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh.dp.rank)
            x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, target=y)).hex())
            optimizer.step()
        return losses, [mesh.dp.transport, mesh.pp.transport]


def trained_into(folder: Path) -> None:
    """HPCOMM_HOST keeps agents apart, as hosts would be: the dp groups (ranks 0 and 1, 2 and 3) lie within one, the pp
    groups span both.
    """
    agent = os.environ["GROUP_RANK"]
    os.environ["HPCOMM_HOST"] = f"host {agent}"
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps([trained(), agent]))


def test_two_agents_train_what_one_trains(tmp_path: Path) -> None:
    want, _ = ranks.run(4, trained)[0]
    # The agents meet at a store that is there before them, at a port that nobody had to guess.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "hpcomm-tests"]
    command += ["--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1", "--no-python"]
    command += [sys.executable, "-c", PROGRAM, str(tmp_path)]
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    agents = []
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
        for i in range(2):
            with (tmp_path / f"agent-{i}").open("w") as log:
                agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + LIMIT
        with contextlib.suppress(subprocess.TimeoutExpired):
            for agent in agents:
                agent.wait(timeout=max(0.0, deadline - time.monotonic()))
        codes = [agent.poll() for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill_tree(agent.pid, signal.SIGABRT)  # all tell where they are
                agent.wait()
    logs = "\n".join((tmp_path / f"agent-{i}").read_text() for i in range(2))
    assert codes == [0, 0], logs
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [outcome for outcome, _ in found] == [[want, ["shm", "c10d"]]] * 4
    agent = [where for _, where in found]
    assert agent[0] == agent[1] != agent[2] == agent[3]
