"""One rank of GPU benchmarks; benchmarks.gpu starts it. What one found so far is in its file at any moment."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpcomm  # noqa: F401 - before CUDA is used: NCCL reads its environment once
from benchmarks.gpu.harness import LEAST_EXIT, Job, Report, write_json
from benchmarks.launch import adopt_mpi_environment

ROOT = Path(__file__).resolve().parents[2]
GRACE = 5.0  # seconds that a benchmark may take longer than it should
PR_SET_PTRACER = 0x59616D61
EXIT = 15.0  # seconds for the end of a process that has nothing left to do


def main() -> None:
    adopt_mpi_environment()  # ends with its launcher, and at the deadline with a stack
    order = json.loads(sys.argv[1])
    for benchmark in order["benchmarks"]:
        one(order, benchmark)
    # Also where the time is up: what a process closes takes some seconds, torch's NCCL and hpcomm's three.
    watch_exit(min(EXIT, max(LEAST_EXIT, order["end"] - time.time() - 2 * GRACE)))
    if dist.is_initialized():
        dist.destroy_process_group()


def one(order: dict[str, Any], benchmark: dict[str, Any]) -> None:
    """One of them; the process ends with a stack when it does not."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = Path(benchmark["result"])
    report = Report(path if rank == 0 else None)
    seconds = min(benchmark["seconds"], order["end"] - time.time())
    if rank == 0:
        print(f"\n==== {benchmark['name']}, {ranks} rank(s)", flush=True)
    faulthandler.dump_traceback_later(max(0.1, seconds + GRACE), exit=True)
    started = time.monotonic()
    try:
        device = pick_device(order["device"])
        if ranks > 1 and not dist.is_initialized():  # for all of them: torch makes none twice over one store
            dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        job = Job(device, rank, ranks, order["rounds"], order["quick"], seconds, report)
        importlib.import_module(f"benchmarks.gpu.{benchmark['name']}").run(job)
    except BaseException:
        text = traceback.format_exc().replace(f"{ROOT}/", "")
        write_json(path.with_suffix(f".error{rank}"), {"rank": rank, "traceback": text})
        raise
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        write_json(path, {**report.content(), "seconds": round(time.monotonic() - started, 1)})


def watch_exit(seconds: float) -> None:
    """From here on the process has so long to end. Then another one prints its stacks, native ones where there is a
    debugger, and kills it: what was measured is written, and other benchmarks wait.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)  # a debugger may be anybody's
    here = Path(__file__).with_name("watch.py")
    subprocess.Popen([sys.executable, "-S", str(here), str(os.getpid()), str(seconds)], start_new_session=True)


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
