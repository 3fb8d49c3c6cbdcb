"""Programs on the backend "hpcomm" behind a fault: who is left goes on, reads why, and loses no signal of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import world
from losing import before_the_wait, kill_rank_1
from test_faults import run_under_torchrun
from torch import nn

import hpcomm

pytestmark = pytest.mark.filterwarnings("ignore")


def go_on_without_rank_1(directory: str) -> list[float]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    old = dist.new_group([0, 2])
    dist.barrier()
    before_the_wait(directory, rank)
    with pytest.raises(hpcomm.RankFailed):
        dist.all_reduce(torch.ones(3))
    sums = []
    for _ in range(2):  # with connections of their own, then with the same
        left = dist.new_group([0, 2], use_local_synchronization=True, timeout=timedelta(seconds=20))
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, group=left)
        sums.append(tensor[0].item())
    with pytest.raises(hpcomm.RankFailed, match="rank 1 is gone"):
        dist.all_reduce(torch.ones(3), group=old)
    return sums


def test_those_who_are_left_make_new_groups(tmp_path: Path) -> None:
    for sums in kill_rank_1(tmp_path, go_on_without_rank_1).values():
        assert sums == [4.0, 4.0]


@pytest.mark.parametrize("wrapper", ["torch.nn.parallel", "hpcomm"])
def test_an_uncaught_exception_is_read_by_those_who_wait(wrapper: str, tmp_path: Path) -> None:
    done = run_under_torchrun(
        f"""
        import hpcomm, pathlib, signal, torch, torch.nn.parallel
        import torch.distributed as dist
        dist.init_process_group("hpcomm")
        model = {wrapper}.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 1:
            raise ValueError("the data loader of rank 1 broke")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's answer to the end of rank 1; it has patience
        try:
            model(torch.ones(2, 4)).sum().backward()
        except (hpcomm.RankFailed, hpcomm.PeerError) as error:
            pathlib.Path(__file__).with_name("heard").write_text(str(error))
        """,
        tmp_path,
        2,
    )
    assert done.returncode != 0
    heard = (tmp_path / "heard").read_text().splitlines()
    how = "has left the job" if wrapper == "torch.nn.parallel" else "failed"
    assert heard[0].endswith(f": rank 1 {how}: ValueError: the data loader of rank 1 broke"), done.stdout
    assert heard[1] == "Traceback (most recent call last):", done.stdout


def interrupted_amid_an_error() -> None:
    with world() as (rank, _):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        store = dist.distributed_c10d._get_default_store()
        for _ in range(3):  # in the second one it makes its buckets anew, together
            model(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            store.wait(["pressed"], timedelta(seconds=20))
            time.sleep(0.3)  # torch's reducer waits without a look at signals
            # SchemaMismatch, unless a slow machine let the other one leave first.
            with pytest.raises(hpcomm.HpcommError):
                dist.all_reduce(torch.ones(7))
            return

        def press() -> None:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            store.set("pressed", "")

        def backward_with_a_finger() -> None:
            thread.start()
            loss.backward()

        loss = model(torch.ones(2, 4)).sum()
        thread = threading.Thread(target=press)
        with pytest.raises(KeyboardInterrupt):
            backward_with_a_finger()
        thread.join()


def test_a_signal_that_comes_before_an_error_of_a_backward_is_not_lost() -> None:
    ranks.run(2, interrupted_amid_an_error)
