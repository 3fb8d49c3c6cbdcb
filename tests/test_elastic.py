"""Workers that are started again: they find each other, and nothing of the old ones is in their way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from patience import left_in_shared_memory, shared_memory
from test_examples import kill_tree

import hpcomm
from hpcomm.rendezvous import own_store

HERE = Path(__file__).resolve().parent
WORLD = 3
LIMIT = 120.0  # seconds; ten times what it takes, and more


def test_workers_that_are_started_again(tmp_path: Path) -> None:
    before = shared_memory()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", "--no-python"]
    command += [sys.executable, str(HERE / "under_torchrun.py"), "work", str(tmp_path)]
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HPCOMM_CPU_TRANSPORT": "shm"}
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code = agent.wait(timeout=LIMIT)
        finally:
            if agent.poll() is None:
                kill_tree(agent.pid, signal.SIGABRT)
                agent.wait()
    text = (tmp_path / "log").read_text()
    assert code == 0, text
    for rank in range(WORLD):
        attempt, name, found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (attempt, name) == (2, "hpcomm")
        assert found == [[111.0 + WORLD * attempt, 11.0 if rank < 2 else 0.0]] * 5
    assert left_in_shared_memory(before) == set()


def started_together(store: dist.Store) -> set[str]:
    """The names that three ranks, as threads, agree on."""
    with ThreadPoolExecutor(WORLD) as threads:
        starts = [threads.submit(own_store, store, rank, WORLD, timeout=20.0) for rank in range(WORLD)]
        return {start.result()[1] for start in starts}


def test_what_an_earlier_start_left_is_not_believed() -> None:
    store = dist.HashStore()
    # All who left no word are named; rank 1 left one before rank 2 looked.
    for rank, absent in ((1, "rank 0, rank 2"), (2, "rank 0")):
        with pytest.raises(hpcomm.TimedOut, match=f"^{absent} did not come within 0.05 s"):
            own_store(store, rank, WORLD, timeout=0.05)
    first = started_together(store)
    assert len(first) == 1
    # The words of all are there, and a roster, but nobody who reads it.
    with pytest.raises(hpcomm.TimedOut, match="^rank 1, rank 2 did not come"):
        own_store(store, 0, WORLD, timeout=0.05)
    with pytest.raises(hpcomm.TimedOut, match="^rank 0 did not come"):
        own_store(store, 2, WORLD, timeout=0.05)
    second = started_together(store)
    assert len(second) == 1
    assert first != second


def meet(store: dist.Store, *ranks_and_sizes: tuple[int, int]) -> list[BaseException | None]:
    """What each of these, as threads, ends with that come one after the other."""
    with ThreadPoolExecutor(len(ranks_and_sizes)) as threads:
        starts = []
        for rank, size in ranks_and_sizes:
            starts.append(threads.submit(own_store, store, rank, size, timeout=2.0))
            time.sleep(0.05)
        return [start.exception() for start in starts]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 4)])
@pytest.mark.parametrize("backwards", [False, True])
def test_ranks_that_disagree_on_their_number_say_so(sizes: tuple[int, ...], *, backwards: bool) -> None:
    store = dist.HashStore()
    assert meet(store, *((rank, 4) for rank in range(4))) == [None] * 4  # of a number that is none any more
    come = list(enumerate(sizes))
    other = next(rank for rank, size in come if size != sizes[0])
    for error in meet(store, *(reversed(come) if backwards else come)):
        assert isinstance(error, hpcomm.SchemaMismatch), error
        assert "ranks disagree on how many they are" in str(error)
        assert {error.rank, error.peer} & {0, other}
        assert "do two jobs meet at one MASTER_ADDR and MASTER_PORT?" in str(error)
    assert meet(store, (0, 2), (1, 2)) == [None, None]


def test_a_rank_in_whose_place_another_process_comes_says_so() -> None:
    first, second, zero = meet(dist.HashStore(), (1, 2), (1, 2), (0, 2))
    assert isinstance(first, hpcomm.SchemaMismatch)
    assert "another process came as rank 1 of 2" in str(first)
    assert (second, zero) == (None, None)


def test_a_store_that_has_gone_is_not_a_rank_that_did_not_come() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
    client.set("is", "there")
    del server
    with pytest.raises(hpcomm.TransportError, match="the store through which ranks find each other has gone"):
        own_store(client, 1, 2, timeout=20.0)
