"""One rank of one GPU benchmark; benchmarks.gpu starts it. What it found so far is in its file at any moment."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.harness import Job, Report, write_json
from benchmarks.launch import adopt_mpi_environment


def main() -> None:
    adopt_mpi_environment()  # ends with its launcher, and at the deadline with a stack
    order = json.loads(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = Path(order["result"])
    report = Report(path if rank == 0 else None)
    try:
        job = Job(pick_device(order["device"]), rank, ranks, order["rounds"], order["quick"], order["seconds"], report)
        importlib.import_module(f"benchmarks.gpu.{order['name']}").run(job)
    except BaseException:
        write_json(path.with_suffix(f".error{rank}"), {"rank": rank, "traceback": traceback.format_exc()})
        raise
    if rank == 0:
        write_json(path, report.content())


def pick_device(asked: str) -> torch.device:
    """The CPU, or the GPU of this rank, which several may share."""
    if asked == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    main()
