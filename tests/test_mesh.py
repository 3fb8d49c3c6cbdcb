"""init() and Mesh: who sits where, what each axis holds, and what is said when it cannot be."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from losing import interrupt
from programs import with_environment
from torch import nn

import hpcomm
from hpcomm import _C, at_exit, nccl_variables
from hpcomm.mesh import axis_sizes

_PEER = 10  # a Control channel of these tests


def test_axis_sizes() -> None:
    assert axis_sizes(8, {"dp": -1, "pp": 2, "tp": 1}) == {"pp": 2, "dp": 4, "tp": 1}
    assert axis_sizes(1, {"dp": 1, "pp": 1, "tp": 1}) == {"pp": 1, "dp": 1, "tp": 1}
    assert list(axis_sizes(2, {"dp": 2, "pp": 1, "tp": 1}, ("dp", "pp", "tp"))) == ["dp", "pp", "tp"]


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (4, {"dp": 3, "pp": 1, "tp": 1}, "mesh dp=3 needs 3 ranks"),
        (4, {"dp": 2, "pp": 4, "tp": 1}, "mesh pp=4 x dp=2 needs 8 ranks"),
        (4, {"dp": -1, "pp": 3, "tp": 1}, "needs a multiple of 3 ranks, the job has"),
        (4, {"dp": -1, "pp": -1, "tp": 1}, "only one axis"),
        (4, {"dp": 0, "pp": 1, "tp": 1}, "dp=0: expected a positive number"),
    ],
)
def test_axis_sizes_that_do_not_fit(world: int, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=re.escape(words)):
        axis_sizes(world, sizes)


def shape_of_a_mesh() -> tuple[dict[str, int], list[int], list[int], list[int]]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        assert (mesh.rank, mesh.size) == (dist.get_rank(), 4)
        for axis, comm in (("dp", mesh.dp), ("pp", mesh.pp), ("tp", mesh.tp)):
            assert comm.rank == mesh.coordinate[axis]
            assert comm.ranks == mesh.ranks(axis)
            assert comm.lane == axis
            assert comm.name == f"{mesh.world.name}/{axis}:{','.join(map(str, comm.ranks))}#0"
            assert mesh.lane(comm.ranks, axis) is comm  # and no second one of these ranks on this lane
            assert dist.get_process_group_ranks(mesh.group(axis)) == comm.ranks
        total = torch.tensor([float(mesh.rank)])
        mesh.pp.all_reduce(total)
        assert total.item() == sum(mesh.ranks("pp"))
        stock = torch.tensor([float(mesh.rank)])
        dist.all_reduce(stock, group=mesh.group("pp"))
        assert stock.item() == total.item()
        names = mesh.device_mesh.mesh_dim_names
        assert names == ("pp", "dp", "tp")
        assert mesh.device_mesh.get_group("dp") is mesh.group("dp")
        return mesh.coordinate, mesh.ranks("pp"), mesh.ranks("dp"), mesh.ranks("tp")


def test_pp_is_outermost() -> None:
    assert ranks.run(4, shape_of_a_mesh) == [
        ({"pp": 0, "dp": 0, "tp": 0}, [0, 2], [0, 1], [0]),
        ({"pp": 0, "dp": 1, "tp": 0}, [1, 3], [0, 1], [1]),
        ({"pp": 1, "dp": 0, "tp": 0}, [0, 2], [2, 3], [2]),
        ({"pp": 1, "dp": 1, "tp": 0}, [1, 3], [2, 3], [3]),
    ]


def other_order() -> list[int]:
    with hpcomm.init(dp=2, pp=2, order=("dp", "pp", "tp")) as mesh:
        return mesh.ranks("pp")


def test_order_can_be_chosen() -> None:
    assert ranks.run(4, other_order) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def twice() -> None:
    for _ in range(3):
        with hpcomm.init(dp=2) as mesh:
            value = torch.ones(1)
            mesh.dp.all_reduce(value)
            assert value.item() == 2


def test_init_again_after_close_and_over_an_existing_group() -> None:
    ranks.run(2, over_an_existing_group)


def over_an_existing_group() -> None:
    dist.init_process_group("gloo")
    twice()
    assert dist.is_initialized()  # it was not ours
    dist.destroy_process_group()


def different_axes() -> None:
    hpcomm.init(dp=2, pp=1) if int(os.environ["RANK"]) == 0 else hpcomm.init(dp=1, pp=2)


def test_ranks_that_ask_for_different_meshes() -> None:
    for outcome in ranks.run(2, different_axes, expect_failure=True):
        assert outcome.exception == "SchemaMismatch"
        assert "ranks disagree on the mesh" in outcome.message
        assert "pp=1" in outcome.message
        assert "pp=2" in outcome.message


def wrong_size() -> None:
    hpcomm.init(dp=3, pp=2)


def test_a_mesh_that_is_too_large() -> None:
    for outcome in ranks.run(2, wrong_size, expect_failure=True):
        assert outcome.exception == "InvalidArgument"
        assert "needs 6 ranks, the job has 2 ranks" in outcome.message


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_torchrun() -> dict[str, str]:
    """The environment of pytest, as of a program that nothing has started ranks for."""
    return {k: v for k, v in os.environ.items() if k not in TORCHRUN}


def run_alone(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=without_torchrun() | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused_alone(env: dict[str, str], **arguments: Any) -> str:
    """Type and text of what init() raises in a process that has these of torchrun's variables."""
    start = (with_environment, without_torchrun() | env, partial(hpcomm.init, **arguments))
    (outcome,) = ranks.run(1, *start, expect_failure=True, full_exit=True)
    assert outcome.exception, outcome
    return f"{outcome.exception}: {outcome.message}"


@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        *(({"HPCOMM_TIMEOUT": text}, {}, "HPCOMM_TIMEOUT=") for text in ("nan", "inf", "1e300", "0", "-1", "soon")),
        *(({}, {"timeout": seconds}, r"init\(\): timeout=") for seconds in (-1, 0, float("nan"), 1e300, "soon")),
        *(
            ({}, {"dp": size}, "mesh axis dp=.*: expected a positive number of ranks")
            for size in (0, -2, 2.0, "1", None)
        ),
        ({}, {"device": "cpu:3"}, "there is one CPU device"),
        ({"HPCOMM_DEVICE": "cpu:3"}, {}, "there is one CPU device"),
        ({"RANK": "a", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, {}, "RANK='a' in the env"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: dict[str, Any], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        hpcomm.init(**arguments)


def test_a_plain_program_is_a_mesh_of_one() -> None:
    done = run_alone("import hpcomm; mesh = hpcomm.init(); print(mesh.size, mesh.dp.size, mesh.group('dp').size())")
    assert done.stdout == "1 1 1\n", done.stderr


def test_a_missing_torchrun_environment() -> None:
    told = refused_alone({}, dp=2, pp=2)
    assert "needs 4 ranks, the job has 1 process (no torchrun environment)" in told
    assert "torchrun --nproc-per-node 4" in told
    assert "has RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT" in refused_alone({"RANK": "0", "WORLD_SIZE": "2"})


def start_of(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a rank that nobody has started the others of."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_that_do_not_start_are_named_by_the_one_that_keeps_the_store() -> None:
    for _ in range(5):
        told = refused_alone(start_of(0, 3, unused_port()), timeout=1.0)
        if "cannot listen" not in told:  # else another program has taken the port meanwhile
            break
    assert told.startswith("TimedOut: rank 1, rank 2 did not come within 1 s")


def test_rank_0_does_not_start() -> None:
    done = run_alone("import hpcomm; hpcomm.init(timeout=1.0)", **start_of(1, 2, port := unused_port()))
    assert f"TimedOut: rank 0 did not come within 1 s: no store of torch's answers at 127.0.0.1:{port}" in done.stderr
    assert done.returncode == 1
    assert "terminate called" not in done.stderr  # by the thread that still waits in torch


def test_a_stranger_on_the_port_where_ranks_meet_holds_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # takes connections and says nothing
        port = int(stranger.getsockname()[1])
        done = run_alone("import hpcomm; hpcomm.init(timeout=1.0)", **start_of(1, 2, port))
        assert "TimedOut: rank 0 did not come within 1 s" in done.stderr
        assert done.returncode == 1
        told = refused_alone(start_of(0, 2, port), timeout=1.0)
    assert f"TransportError: rank 0 cannot listen at 127.0.0.1:{port}, where ranks meet" in told


def rank_one_never_comes() -> None:
    dist.init_process_group("gloo")
    dist.barrier()  # gloo's connections may be half made still; a rank that left now would fail the other's start
    if dist.get_rank() == 0:
        hpcomm.init(dp=2, timeout=1.0)


def fails_behind_its_connections(start: Callable[[], object]) -> None:
    if os.environ["RANK"] == "1":

        def broken(*_: Any) -> None:
            raise ArithmeticError("no such neighbour")

        _C.near_control = broken
    start()


def start_of_a_backend() -> None:
    dist.init_process_group("hpcomm")
    dist.barrier()


def test_what_fails_behind_the_connections_is_told() -> None:
    """And not that the rank has left in order."""
    for start in (partial(hpcomm.init, dp=3), start_of_a_backend):
        first, failed, last = ranks.run(3, fails_behind_its_connections, start, expect_failure=True)
        assert failed.exception == "ArithmeticError"
        for other in (first, last):
            assert other.exception == "PeerError", other
            assert "rank 1 failed: ArithmeticError: no such neighbour" in other.message


def test_a_rank_that_never_comes() -> None:
    outcome = ranks.run(2, rank_one_never_comes, expect_failure=True)[0]
    assert outcome.exception == "TimedOut"
    assert "rank 1 did not come within 1 s" in outcome.message


def closed_over_operations() -> tuple[list[float], list[str]]:
    mesh = hpcomm.init(dp=2, timeout=20.0)
    total = torch.ones(4)
    lane = mesh.lane(mesh.ranks("dp"), "of its own")
    lane.all_reduce(total)
    if mesh.rank == 1:
        mesh.control.receive(0, _PEER, 20.0)
    works = [each.all_reduce(total, async_op=True) for each in (lane, lane, lane)]
    if mesh.rank == 0:
        mesh.control.send(1, _PEER, b"issued")
    del lane
    mesh.close()
    assert all(work.done() for work in works)
    for work in works:
        work.wait()
    said = []
    for use in (lambda: mesh.dp, lambda: mesh.pp, lambda: mesh.tp, lambda: mesh.lane([0, 1], "dp"), mesh.barrier):
        with pytest.raises(hpcomm.Closed) as caught:
            use()  # type: ignore[operator]
        said.append(str(caught.value).split(" was used after close()")[0])
    with pytest.raises(hpcomm.Closed):
        mesh.world.barrier()
    return total.tolist(), said


def test_what_was_issued_ends_before_its_mesh_does() -> None:
    for total, said in ranks.run(2, closed_over_operations):
        assert total == [16.0] * 4
        assert said == ["mesh.dp", "mesh.pp", "mesh.tp", "mesh.lane()", "mesh.barrier()"]


def closed_by_ctrl_c() -> None:
    mesh = hpcomm.init(dp=2, timeout=60.0)
    if mesh.rank == 0:
        waits = mesh.dp.recv(torch.empty(1), 1, async_op=True)  # for what is sent once this rank was interrupted
        interrupt(mesh.close)
        mesh.control.send(1, _PEER, b"interrupted")
        waits.wait()
    else:
        mesh.control.receive(0, _PEER, 30.0)
        mesh.dp.send(torch.ones(1), 0)
    mesh.close()


def test_ctrl_c_ends_the_wait_for_what_was_issued_and_the_mesh_stays() -> None:
    ranks.run(2, closed_by_ctrl_c)


def lose(why: str = "rank 1 is gone") -> threading.Thread:
    """As a lane does whose GPU ends operations without a result while the program waits for none of them."""
    thread = threading.Thread(target=_C.lose_operations, args=(why,))
    thread.start()
    return thread


def goes_on(steps: int) -> None:
    """As one that is ahead of its device."""
    for _ in range(steps):
        time.sleep(0.001)


def loses_and_goes_on() -> None:
    lose()
    goes_on(10_000)


def hears_of_a_loss() -> None:
    with pytest.raises(hpcomm.RankFailed, match="ended without a result") as caught:
        loses_and_goes_on()
    assert "rank 1 is gone" in str(caught.value)
    lose().join()  # now it knows of the failure
    goes_on(20)


def test_what_was_lost_is_raised_in_the_main_thread_and_once() -> None:
    ranks.run(1, hears_of_a_loss)
    (ended,) = ranks.run(1, loses_and_goes_on, expect_failure=True)
    assert ended.exception == "RankFailed", ended


def knows_of_a_loss() -> tuple[str, int, list[str]]:
    """It handles an error, and hears of it when its mesh ends; it is a fork of who was told."""
    read, write = os.pipe()
    try:
        raise ValueError
    except ValueError:
        lose().join()
        goes_on(20)
    goes_on(20)
    if os.fork() == 0:
        try:
            lose().join()
            goes_on(20)
            os.write(write, b"child")
        except BaseException as error:  # noqa: BLE001 - a child must not go on as this test
            os.write(write, type(error).__name__[:5].encode())
            os._exit(1)
        os._exit(0)
    child, status, told = os.read(read, 5).decode(), os.wait()[1], []
    try:
        _C.check_lost_operations()  # as the end of a mesh does
    except hpcomm.RankFailed:
        told.append("at the end")
    _C.check_lost_operations()
    return child, status, told


def test_what_was_lost_is_not_raised_where_the_program_knows() -> None:
    assert ranks.run(1, knows_of_a_loss) == [("child", 0, ["at the end"])]


def knows_from_its_step() -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(nn.Sequential(nn.Linear(2, 2)), mesh=mesh, num_microbatches=1, loss_fn=lambda *_: 1 / 0)
        try:
            raise ValueError
        except ValueError:
            lose().join()  # the program handles an error, and is not told now
            goes_on(20)
        with pytest.raises(ZeroDivisionError):
            pipe.step(torch.ones(1, 2), target=torch.ones(1, 2))


def test_what_a_step_lost_is_not_raised_where_the_step_has_raised() -> None:
    ranks.run(1, knows_from_its_step)


def several_meshes(own_group: bool) -> None:
    if own_group:
        dist.init_process_group("gloo")
    for _ in range(3):
        with hpcomm.init(dp=2, pp=2) as mesh:
            value = torch.ones(1)
            dist.all_reduce(value, group=mesh.group("dp"))
            mesh.dp.all_reduce(value)
            assert value.item() == 4
    assert dist.is_initialized() == own_group


@pytest.mark.parametrize("own_group", [False, True])
def test_one_mesh_after_another(own_group: bool) -> None:
    """With groups of the same names in a store that stays."""
    ranks.run(4, several_meshes, own_group)


def dropped_mesh() -> None:
    # Registered first, so run last, of what hpcomm does at the exit.
    at_exit.register(lambda: print("a group is left" if dist.is_initialized() else "no group is left"))
    hpcomm.init(dp=2, timeout=20.0)


def test_a_mesh_that_was_dropped_leaves_no_group_of_torchs_behind() -> None:
    for outcome in ranks.run(2, dropped_mesh, expect_failure=True, full_exit=True):
        assert outcome.ok, outcome
        assert outcome.output.splitlines()[-1:] == ["no group is left"]


def lanes_of_each_use() -> tuple[set[str], set[str]]:
    """Names of the lanes that DistributedDataParallel and a Pipeline of two stages ask for."""

    def asked(make: Callable[[], object]) -> set[str]:
        before = set(mesh._lanes)
        make()
        return {name for _, name in set(mesh._lanes) - before}

    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with hpcomm.init(dp=2, timeout=20.0) as mesh:
        ddp = asked(lambda: hpcomm.DistributedDataParallel(layers, mesh=mesh))
    with hpcomm.init(pp=2, timeout=20.0) as mesh:
        loss = torch.nn.functional.mse_loss
        return ddp, asked(lambda: hpcomm.Pipeline(layers, mesh=mesh, num_microbatches=2, loss_fn=loss))


def test_lanes_have_the_names_that_decide_their_priority_on_a_gpu() -> None:
    """csrc/stream/cuda_lanes.cpp goes by them; tests/native/test_cuda_lanes.cpp has the priorities."""
    for ddp, pipeline in ranks.run(2, lanes_of_each_use):
        assert ddp == {"gradient"}
        assert {"forward", "backward", "scalar"} <= pipeline <= {"forward", "backward", "scalar", "gradient", "alone"}


def test_memory_that_nccl_may_use_in_place_inside_captures_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for value, lines in (("0", 0), ("1", 1)):
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", value)
        nccl_variables.warn_of_registration.cache_clear()
        for _ in range(2):
            nccl_variables.warn_of_registration()
        assert len(capfd.readouterr().err.splitlines()) == lines
    nccl_variables.warn_of_registration.cache_clear()


def ordered() -> None:
    with hpcomm.init(dp=2, order=("dp", "pp", "tp")) as mesh:
        assert mesh.device_mesh.mesh_dim_names == ("dp", "pp", "tp")
        assert mesh.device_mesh["dp"].size() == 2
        assert list(mesh.device_mesh.get_coordinate() or ()) == [mesh.rank, 0, 0]


def test_a_device_mesh_has_the_order_of_its_mesh() -> None:
    ranks.run(2, ordered)


def taken_again() -> None:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
    for turn in range(2):  # not env://, through which torch may find what the first group left in its store
        dist.init_process_group("gloo", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=2)
        for seconds in (40.0, 50.0):
            with hpcomm.init(dp=2, timeout=seconds) as mesh:
                group = mesh.group("pp")
                assert dist.get_rank(group) == 0
                assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=seconds)
        dist.destroy_process_group()


def test_groups_that_are_taken_again() -> None:
    ranks.run(2, taken_again)
