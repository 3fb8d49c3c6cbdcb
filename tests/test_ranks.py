"""The launcher of test ranks itself: values, tracebacks, deadlines, kills, and that nothing is left behind."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience
from ranks import job, zygote

FOREVER = 3600.0


def my_rank() -> int:
    return int(os.environ["RANK"])


# --- Values and environment -------------------------------------------------------------------------------------------


def rank_and(value: torch.Tensor) -> tuple[int, torch.Tensor]:
    return my_rank(), value + my_rank()


def test_values_come_back_by_rank() -> None:
    results = ranks.run(3, rank_and, torch.tensor([10.0, 20.0]))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert torch.equal(results[2][1], torch.tensor([12.0, 22.0]))


def all_reduced() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_torchruns_environment_serves_a_real_all_reduce() -> None:
    assert ranks.run(3, all_reduced) == [111.0, 111.0, 111.0]


def test_a_run_within_the_life_of_another() -> None:
    with ranks.spawn(2, all_reduced) as job:
        assert ranks.run(2, all_reduced) == [11.0, 11.0]
        assert [outcome.value for outcome in job.wait()] == [11.0, 11.0]


def environment() -> dict[str, str]:
    found = dict(os.environ)
    os.environ["LEFT_BEHIND"] = "1"
    random.seed(my_rank())
    torch.manual_seed(my_rank())
    return found


def test_environment_is_this_process_plus_env_and_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_TEST", "yes")
    first = ranks.run(2, environment, env={"EXTRA": "1"})[1]
    assert (first["FROM_TEST"], first["EXTRA"], first["OMP_NUM_THREADS"]) == ("yes", "1", "1")
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"]) == ("1", "1", "2")
    monkeypatch.delenv("FROM_TEST")
    second = ranks.run(2, environment)[1]
    assert not {"FROM_TEST", "EXTRA", "LEFT_BEHIND"} & set(second)
    assert first["MASTER_PORT"] != "0"
    assert "LEFT_BEHIND" not in os.environ


def random_numbers() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def test_every_run_starts_from_the_same_seeds() -> None:
    ranks.run(1, environment)
    assert ranks.run(2, random_numbers) == ranks.run(2, random_numbers)


def threads_of_rank() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_rank_starts_with_one_thread() -> None:
    assert ranks.run(1, threads_of_rank) == [1]


# --- Failures ---------------------------------------------------------------------------------------------------------


def until_rank_1_has_ended(folder: str) -> None:
    """Its result is told and its process gone: nothing that follows can come before it."""
    file = Path(folder, "pid")
    while not file.exists():
        time.sleep(0.01)
    while alive(int(file.read_text())):
        time.sleep(0.01)


def tell_pid(folder: str) -> None:
    partial = Path(folder, "pid.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder, "pid"))


def second_fails_first(folder: str) -> None:
    print(f"hello from {my_rank()}")
    if my_rank() == 1:
        tell_pid(folder)
        raise KeyError("the cause")
    until_rank_1_has_ended(folder)
    raise RuntimeError("a consequence")


def test_the_first_failure_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(3, second_fails_first, str(tmp_path))
    text = str(caught.value)
    assert "[rank 1] KeyError: 'the cause'" in text
    assert 'raise KeyError("the cause")' in text
    assert text.index("KeyError") < text.index("[rank 0] RuntimeError: a consequence")
    for rank in range(3):
        assert f"[rank {rank}] hello from {rank}" in text


def first_fails_rest_sleeps() -> None:
    if my_rank() == 0:
        raise ValueError("early")
    time.sleep(FOREVER)


def test_the_others_are_killed_soon_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GRACE", 0.5)
    with pytest.raises(ranks.RankError, match=r"(?s)\[rank 0\] ValueError: early.*\[rank 1\] still running, killed"):
        ranks.run(2, first_fails_rest_sleeps, timeout=FOREVER)


def wrong_sum() -> None:
    got, expected = 4, 5
    assert got == expected


def test_a_failed_assertion_shows_its_variables() -> None:
    with pytest.raises(ranks.RankError, match=r"(?s)got = 4.*expected = 5"):
        ranks.run(1, wrong_sum)


def sleeps_forever() -> None:
    time.sleep(FOREVER)


def returns_or_sleeps() -> str:
    print("about to")
    if my_rank() == 0:
        sleeps_forever()
    return "done"


def test_the_deadline_shows_stacks_and_kills() -> None:
    def attempt(limit: float) -> None:
        jobs: list[ranks.Job] = []

        def spawn_and_wait() -> None:
            jobs.append(ranks.spawn(2, returns_or_sleeps, timeout=limit))
            jobs[0].wait()

        with pytest.raises(ranks.RankError) as caught:
            spawn_and_wait()  # the limit is that of the start as well
        text = str(caught.value)
        assert f"not done after {limit} s" in text
        assert "in sleeps_forever" in text
        assert "[rank 0] about to" in text
        assert "[rank 1] returned 'done'" in text
        assert len(jobs[0].pids) == 2
        assert not any(alive(pid) for pid in jobs[0].pids)

    with_patience(attempt, 1.0)  # both have to be there by then


def hangs_at_exit() -> None:
    import atexit

    atexit.register(sleeps_forever)


def test_a_rank_that_cannot_end_is_a_failure() -> None:
    def attempt(limit: float) -> None:
        with pytest.raises(ranks.RankError) as caught:
            ranks.run(1, hangs_at_exit, timeout=limit)
        assert "in sleeps_forever" in str(caught.value)

    with_patience(attempt, 1.0)


def dies_of_signal() -> None:
    if my_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_signal_is_a_failure_with_its_name_and_stack() -> None:
    with pytest.raises(ranks.RankError, match=r"(?s)\[rank 1\] killed by SIGSEGV.*in dies_of_signal"):
        ranks.run(2, dies_of_signal)


def leaves_without_a_word() -> None:
    os._exit(3)


def test_an_exit_code_is_a_failure() -> None:
    with pytest.raises(ranks.RankError, match="exited with code 3"):
        ranks.run(1, leaves_without_a_word)


def not_to_be_sent() -> object:
    return lambda: None


def test_a_value_that_does_not_pickle_is_a_failure() -> None:
    with pytest.raises(ranks.RankError, match=r"pickle|local object"):  # as this Python says it
        ranks.run(1, not_to_be_sent)


def skips() -> None:
    pytest.skip("no such thing here")


def test_a_skip_in_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        ranks.run(2, skips)


def four_ways(folder: str) -> str:
    rank = my_rank()
    if rank == 1:
        tell_pid(folder)
        raise ValueError("one")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if rank == 3:
        os._exit(4)
    until_rank_1_has_ended(folder)
    return "fine"


def test_outcomes_tell_how_each_rank_ended(tmp_path: Path) -> None:
    value, raised, killed, left = ranks.run(4, four_ways, str(tmp_path), expect_failure=True)
    assert (value.ok, value.value) == (True, "fine")
    assert (raised.ok, raised.exception, raised.message) == (False, "ValueError", "one")
    assert 'raise ValueError("one")' in raised.traceback
    assert (killed.ok, killed.signal) == (False, signal.SIGTERM)
    assert (left.ok, left.exit_code) == (False, 4)
    assert 0 < raised.seconds < value.seconds


def tell_then_sleep() -> None:
    ranks.tell({"rank": my_rank()})
    time.sleep(FOREVER)


def test_a_test_can_kill_a_rank_when_it_is_where_it_wants_it() -> None:
    with ranks.spawn(2, tell_then_sleep) as job:
        assert job.told(1) == {"rank": 1}
        assert job.told(0) == {"rank": 0}
        job.kill(1)
        job.kill(0, signal.SIGTERM)
        first, second = job.wait()
    assert (first.signal, second.signal) == (signal.SIGTERM, signal.SIGKILL)


def test_waiting_for_a_word_from_a_rank_that_has_ended() -> None:
    with ranks.spawn(1, my_rank) as job, pytest.raises(ranks.RankError, match="ended without telling"):
        job.told(0)


# --- Nothing is left --------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def starts_a_daemon() -> int:
    """A process that has left the rank's process group and session, as torch's workers or a shell may."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"], start_new_session=True)
    if my_rank() == 0:
        ranks.tell(child.pid)
        time.sleep(FOREVER)
    return child.pid


def test_processes_that_ranks_started_end_with_the_run() -> None:
    with ranks.spawn(2, starts_a_daemon) as job:
        orphan = job.told(0)
        assert alive(orphan)
    assert not alive(orphan)
    assert not any(alive(pid) for pid in job.pids)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_hundred_runs_leave_no_file_and_no_process() -> None:
    ranks.run(2, my_rank)
    assert zygote._client is not None
    zygotes_files = Path(f"/proc/{zygote._client.process.pid}/fd")
    mine, its = open_files(), len(list(zygotes_files.iterdir()))
    pids = []
    for _ in range(100):
        with ranks.spawn(2, my_rank) as job:
            pids += job.pids
            assert [outcome.value for outcome in job.wait()] == [0, 1]
    assert open_files() <= mine
    assert len(list(zygotes_files.iterdir())) <= its
    assert not any(alive(pid) for pid in pids)


PROGRAM = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import ranks, test_ranks
job = ranks.spawn(2, test_ranks.tell_then_sleep)
job.told(0), job.told(1)
print(*job.pids, ranks.zygote._client.process.pid, flush=True)
sys.stdin.read()
"""


def test_all_end_when_the_process_that_started_them_is_killed() -> None:
    tests = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tests], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        process.kill()
    until = time.monotonic() + 20.0
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def finalizers_of_torch(tmp_path: Path) -> int:
    """How many run at exit; into a file as well, once it has begun."""

    def count() -> int:
        return sum(finalizer.atexit for finalizer in zygote._finalizers)

    atexit.register(lambda: (tmp_path / str(my_rank())).write_text(str(count())))
    return count()


@pytest.mark.parametrize("full", [False, True])
def test_what_was_imported_before_the_fork_is_finalized_at_a_full_exit_only(tmp_path: Path, *, full: bool) -> None:
    assert ranks.run(2, finalizers_of_torch, tmp_path, full_exit=full) == [0, 0]
    assert [int((tmp_path / str(rank)).read_text()) > 0 for rank in (0, 1)] == [full, full]
