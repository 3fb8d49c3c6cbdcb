"""Whether two ranks can talk over NCCL on this machine, asked before sixty tests wait for it one by one.

Two processes reduce and send to each other over torch's own groups: nothing of hpcomm takes part, so what fails here is
the machine's or NCCL's. GPUs that cannot reach each other's memory are tried once more without (NCCL_P2P_DISABLE=1).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

LIMIT = 40.0  # seconds: the first use of CUDA and NCCL takes some
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}


class Attempt(NamedTuple):
    """What came of two ranks."""

    talked: bool
    words: str  # theirs, and NCCL's


class Verdict(NamedTuple):
    """What whoever starts two ranks has to know."""

    usable: bool
    variables: dict[str, str]  # that they need besides
    why: str  # for people; empty where nothing is wrong


def judge(attempt: Callable[[Mapping[str, str]], Attempt], variables: Mapping[str, str]) -> Verdict:
    """Tries two ranks with ``variables``, and without access to each other's memory should they fail."""
    first = attempt(variables)
    if first.talked:
        return Verdict(True, {}, "")
    if variables.get("NCCL_P2P_DISABLE") == "1":
        return Verdict(False, {}, f"two ranks cannot talk over NCCL here:\n{first.words}")
    second = attempt({**variables, **WITHOUT_P2P})
    if second.talked:
        why = (
            f"two ranks talk over NCCL only with NCCL_P2P_DISABLE=1, which is set from here on. Without:\n{first.words}"
        )
        return Verdict(True, WITHOUT_P2P, why)
    why = f"two ranks cannot talk over NCCL here:\n{first.words}\nand with NCCL_P2P_DISABLE=1:\n{second.words}"
    return Verdict(False, {}, why)


def attempt(variables: Mapping[str, str], device: str = "cuda", limit: float = LIMIT) -> Attempt:
    """Starts the two and waits for them; what hangs is killed when the time is up."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(2)]
        processes = []
        end = time.monotonic() + limit
        for rank, path in enumerate(outputs):
            with path.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(rank), f"{folder}/meeting", device],
                        env={"NCCL_DEBUG": "WARN", **variables},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [_end_of(process, end) for process in processes]
        said = [path.read_text(errors="replace").strip().splitlines()[-25:] for path in outputs]
    words = []
    for rank, (code, lines) in enumerate(zip(codes, said, strict=True)):
        ended = f"not done after {limit:.0f} s" if code is None else f"exit code {code}"
        words += [f"  rank {rank}: {ended}", *(f"    {line[:300]}" for line in lines)]
    return Attempt(codes == [0, 0], "\n".join(words))


def _end_of(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Its exit code; None when it was killed."""
    try:
        return process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also at Ctrl-C
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def talk(rank: int, meeting: str, device: str) -> None:
    """One of the two."""
    import torch
    import torch.distributed as dist

    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    numbers = torch.full((1 << 18,), 10.0**rank, device=place)
    dist.all_reduce(numbers)
    assert numbers.eq(11.0).all(), "all_reduce: a wrong sum"
    for source in range(2):
        message = torch.full((1 << 18,), 10.0**source if rank == source else 0.0, device=place)
        if rank == source:
            dist.send(message, 1 - source)
        else:
            dist.recv(message, source)
        assert message.eq(10.0**source).all(), f"send from {source}: wrong numbers"
    dist.destroy_process_group()


if __name__ == "__main__":
    talk(int(sys.argv[1]), sys.argv[2], sys.argv[3])
