"""How long until the survivors know? From the SIGKILL of a rank to the exception in each of the others.

    python -m benchmarks.faults --ranks 4 --rounds 10 --json result.json
    python -m benchmarks.faults --vs gloo                  # gloo as well, and what its errors say
    python -m benchmarks.faults --touch 4G                 # as well with a killed rank that has touched so much memory

Every kill has a job of its own: a plain torch.distributed program on the backend "hpcomm" (or "gloo"). Its ranks sum
once and compare the result. Then all of them are in one operation until one is killed, another rank in each round:

    all_reduce   of 4 MB, again and again: the rank dies while bytes move
    barrier      again and again
    recv         of what nobody sends: all others wait for the rank, asleep, and the rank for one of them

The parent reads the clock (CLOCK_MONOTONIC, which is one for all processes of a host) and kills; each survivor reads it
when it has caught its exception. Backends and cases take turns, round by round. Printed are the median and the worst of
all survivors and rounds. Linux frees a killed process's memory before it closes its files, which is what tells the
others: with --touch, every case comes twice, with a small rank and with a large one, and the difference is what that
takes.

Over hpcomm every survivor must raise RankFailed with the killed rank as its peer; the exit code is 1 if one did not. A
survivor stays until all have raised, so that none learns from the end of another. Over gloo only the neighbours in an
operation notice by themselves, so there survivors end as soon as they have raised, as a program does whose exception
nobody catches. What they raise is printed, and not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import hpcomm
from benchmarks import launch
from benchmarks.collectives import byte_count, positive
from benchmarks.harness import environment
from benchmarks.launch import result_file

OPERATIONS = ("all_reduce", "barrier", "recv")
ELEMENTS = 1 << 20  # of float32, in an all_reduce
LIMIT = 60.0  # seconds that an operation, and all that comes before it, may take
SEED = 1  # of the moments of the kills


@dataclass(frozen=True)
class Case:
    """What is killed: a rank in an operation of a backend, with so many bytes of touched memory."""

    backend: str
    operation: str
    touched: int


# --- In a rank --------------------------------------------------------------------------------------------------------


def step_of(operation: str, victim: int) -> Callable[[], object]:
    """What this rank does until somebody dies."""
    if operation == "all_reduce":
        return partial(dist.all_reduce, torch.zeros(ELEMENTS))
    if operation == "barrier":
        return dist.barrier
    source = victim if dist.get_rank() != victim else (victim + 1) % dist.get_world_size()
    return partial(dist.recv, torch.zeros(1), source)


def be_a_rank(case: Case, victim: int, folder: Path) -> None:
    """Says "ready" and, when an operation has failed, "raised" with the time and the error."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    memory = torch.ones(case.touched if rank == victim else 0, dtype=torch.uint8)
    dist.init_process_group(case.backend, timeout=timedelta(seconds=LIMIT))
    powers = torch.full((1000,), 2.0**rank)
    dist.all_reduce(powers)
    if not bool((powers == 2.0 ** dist.get_world_size() - 1).all()):
        raise RuntimeError(f"the sum of the ranks' powers of two is {powers[0]}")
    step = step_of(case.operation, victim)
    dist.barrier()
    say(folder, f"ready{rank}", {"touched": memory.numel()})
    try:
        while True:
            step()
    except Exception as error:
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        name, peer = type(error).__name__, getattr(error, "peer", None)
        say(folder, f"raised{rank}", {"at": at, "error": name, "peer": peer, "text": str(error)})
    if case.backend == "hpcomm":
        time.sleep(LIMIT)  # the parent ends it
    os._exit(0)


def say(folder: Path, word: str, what: Mapping[str, Any]) -> None:
    partial_file = folder / f"{word}.partial"
    partial_file.write_text(json.dumps(what))
    partial_file.rename(folder / word)


# --- In the parent ----------------------------------------------------------------------------------------------------


def kill_once(case: Case, ranks: int, victim: int, delay: float) -> dict[int, dict[str, Any]]:
    """A job whose rank ``victim`` is killed so many seconds after all are ready: what its survivors said, by rank, with
    the ``seconds`` that it took.

    Raises:
        JobFailed: a rank failed by itself, or was not done in time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    deadline = time.time() + 2 * LIMIT
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="hpcomm-bench-") as name:
        folder = Path(name)
        try:
            for rank in range(ranks):
                processes[rank] = start(rank, ranks, case, victim, folder, store.port, deadline)
            answers(folder, "ready", processes, deadline)
            time.sleep(delay)
            at = time.clock_gettime(time.CLOCK_MONOTONIC)
            os.kill(processes[victim].pid, signal.SIGKILL)
            survivors = {rank: process for rank, process in processes.items() if rank != victim}
            said = answers(folder, "raised", survivors, deadline)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    launch.kill_tree(process.pid)
                process.wait()
    return {rank: {**what, "seconds": what["at"] - at} for rank, what in sorted(said.items())}


def start(
    rank: int, ranks: int, case: Case, victim: int, folder: Path, port: int, deadline: float
) -> subprocess.Popen[bytes]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "HPCOMM_CPU_TRANSPORT": "shm",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        launch._DEADLINE: str(deadline),
    }
    words = {**asdict(case), "victim": victim, "folder": str(folder)}
    command = [sys.executable, "-m", "benchmarks.faults", "rank", json.dumps(words)]
    with (folder / f"out{rank}").open("wb") as out:
        return subprocess.Popen(
            command, env=variables, cwd=launch.ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,  # Ctrl-C is for this process, which then ends them
        )  # fmt: skip


def answers(
    folder: Path, word: str, processes: Mapping[int, subprocess.Popen[bytes]], deadline: float
) -> dict[int, dict[str, Any]]:
    """What each of these ranks says under ``word``."""
    said: dict[int, dict[str, Any]] = {}
    while len(said) < len(processes):
        for rank, process in processes.items():
            if rank in said:
                continue
            code = process.poll()  # first: what it has said before it ended is there
            file = folder / f"{word}{rank}"
            if file.exists():
                said[rank] = json.loads(file.read_text())
            elif code is not None or time.time() >= deadline:
                how = f"is not {word} in time" if code is None else f"{launch._how(code)} before it was {word}"
                output = (folder / f"out{rank}").read_text(errors="replace").splitlines()
                raise launch.JobFailed("\n".join([f"rank {rank} {how}", *output[-20:]]))
        time.sleep(0.005)
    return said


def is_wrong(case: Case, victim: int, said: Mapping[str, Any]) -> bool:
    """Of hpcomm alone: who has been killed is not what the survivor raised."""
    return case.backend == "hpcomm" and (said["error"], said["peer"]) != ("RankFailed", victim)


def row_of(case: Case, jobs: Sequence[tuple[int, Mapping[int, Mapping[str, Any]]]]) -> dict[str, Any]:
    """The figures of a case, of what the survivors of each job said."""
    every = [what for _, said in jobs for what in said.values()]
    seconds = [what["seconds"] for what in every]
    wrong = [what for victim, said in jobs for what in said.values() if is_wrong(case, victim, what)]
    return {
        "backend": case.backend,
        "operation": case.operation,
        "touched_bytes": case.touched,
        "killed": [victim for victim, _ in jobs],
        "seconds": [[what["seconds"] for what in said.values()] for _, said in jobs],
        "median": statistics.median(seconds),
        "worst": max(seconds),
        "wrong": len(wrong),
        "errors": dict(Counter(what["error"] for what in every)),
        "text": (wrong or every)[0]["text"],
    }


def size_text(size: int) -> str:
    """1536 MiB is 1536M: as the flag takes it."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case, then what the errors say, once for each operation of a backend."""
    lines = [
        f"{'backend':<10}{'killed in':<14}{'touched':>10}{'median ms':>12}{'worst ms':>12}{'survivors':>12}"
        f"{'#wrong':>8}   raised"
    ]
    texts: dict[str, str] = {}
    for row in rows:
        survivors = sum(row["errors"].values())
        touched = size_text(row["touched_bytes"]) if row["touched_bytes"] else "-"
        lines.append(
            f"{row['backend']:<10}{row['operation']:<14}{touched:>10}{row['median'] * 1e3:>12.2f}"
            f"{row['worst'] * 1e3:>12.2f}{survivors:>12}{row['wrong']:>8}   {', '.join(row['errors'])}"
        )
        # Of several, one that was wrong.
        name = f"{row['backend']}, {row['operation']}"
        if row["wrong"] or name not in texts:
            texts[name] = " ".join(row["text"].split())
    return "\n".join([*lines, "", *(f"# {name}: {text}" for name, text in texts.items())])


def huge_pages() -> str:
    """What decides how long the kernel takes to free memory: the choice in brackets."""
    with contextlib.suppress(OSError):
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    return "unknown"


def available_memory() -> int:
    """Bytes, as the kernel says; a control group may allow less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=4, help="of each job (4)")
    parser.add_argument("--rounds", type=positive, default=10, help="kills of each case (10)")
    parser.add_argument("--touch", type=byte_count, default=0, help="memory of a large rank, such as 4G (none)")
    parser.add_argument("--vs", choices=("gloo",), help="another backend of torch.distributed")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        parser.error("--ranks: a job needs two ranks or more")
    if arguments.touch > 0.8 * available_memory():
        parser.error(f"--touch: {size_text(arguments.touch)} is more than four fifths of the memory that is available")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """All jobs, the table and the JSON; returns the exit code."""
    torch.set_num_threads(1)  # as the ranks do
    with hpcomm.init() as mesh:  # of this process alone
        described = environment(mesh)
    described["ranks"] = arguments.ranks
    described["transport"] = "shm"
    described["huge pages"] = huge_pages()
    print("".join(f"# {key:<18} {value}\n" for key, value in described.items()), flush=True)
    cases = [
        Case(backend, operation, touched)
        for backend in ("hpcomm", *filter(None, [arguments.vs]))
        for operation in OPERATIONS
        for touched in dict.fromkeys((0, arguments.touch))
    ]
    moments = random.Random(SEED)
    jobs: dict[Case, list[tuple[int, dict[int, dict[str, Any]]]]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        victim = (number + 1) % arguments.ranks
        for case in cases:
            jobs[case].append((victim, kill_once(case, arguments.ranks, victim, moments.uniform(0.05, 0.15))))
        print(f"# round {number + 1} of {arguments.rounds}: rank {victim} was killed in every case", flush=True)
    rows = [row_of(case, done) for case, done in jobs.items()]
    wrong = sum(row["wrong"] for row in rows)
    print(f"\n{table(rows)}\n\n# survivors of hpcomm that raised something else, or named another rank: {wrong}")
    if arguments.json:
        document = {
            "question": "faults",
            "environment": described,
            "arguments": vars(arguments),
            "rows": rows,
            "wrong": wrong,
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


def main() -> None:
    """The command; ``rank WORDS`` behind it is what it starts its ranks with."""
    if sys.argv[1:2] == ["rank"]:
        launch.adopt_mpi_environment()  # it ends with its parent, and at the deadline
        words = json.loads(sys.argv[2])
        victim, folder = words.pop("victim"), Path(words.pop("folder"))
        try:
            be_a_rank(Case(**words), victim, folder)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # at once: an orderly exit might wait for the other ranks
    try:
        sys.exit(run(parse()))
    except launch.JobFailed as error:
        sys.exit(f"benchmarks.faults: {error}")


if __name__ == "__main__":
    main()
