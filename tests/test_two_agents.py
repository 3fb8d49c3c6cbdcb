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
import torch.distributed as dist
from test_examples import kill_tree
from under_torchrun import trained

HERE = Path(__file__).resolve().parent
LIMIT = 180.0  # seconds; ten times what it takes, and more


def test_two_agents_train_what_one_trains(tmp_path: Path) -> None:
    want, _ = ranks.run(4, trained)[0]
    # The agents meet at a store that is there before them, at a port that nobody had to guess.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "hpcomm-tests"]
    command += ["--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1", "--no-python"]
    command += [sys.executable, str(HERE / "under_torchrun.py"), "trained_into", str(tmp_path)]
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
