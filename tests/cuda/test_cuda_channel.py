"""Channel on a GPU: both ways at once, changing shapes, many and large tensors, without a wait of the host."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu_tools import blocking_calls, host_never_waits, mesh_on, run, sleep, synchronize, traced

import hpcomm

pytestmark = pytest.mark.multirank

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8, torch.float16)


def message(rank: int, number: int, device: str) -> dict[str, Any]:
    """A tree that says who sent it, and which one it is; shapes and structure change from message to message."""
    base = 1000 * rank + number
    return {
        "number": number,
        "hidden": (torch.arange(3 * (17 + 5 * (number % 3)), device=device) + base).view(3, -1).float(),
        "mask": [torch.arange(1 + number % 4, device=device) % 2 == rank, None],
        "ids": (torch.full((), base, dtype=torch.int64, device=device), "text"),
        **({"extra": torch.full((2, 0, 5), 1.0, device=device)} if number % 2 else {}),
    }


def require_equal(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            require_equal(got[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            require_equal(a, b)
    else:
        assert got == expected


def dropped(device: str) -> None:
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank)
        if mesh.rank == 0:
            for number in range(3):
                channel.send(message(0, number, device))
            del channel
            mesh.world.barrier()  # the receiver has not begun
        else:
            mesh.world.barrier()
            for number in range(3):
                require_equal(channel.recv(), message(0, number, device))
        mesh.world.barrier()


def test_a_channel_that_is_dropped_sends_what_was_issued(device: str) -> None:
    run(device, 2, dropped)


def leaves_at_once(device: str) -> None:
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank)
        mesh.world.barrier()
        if mesh.rank == 0:
            for number in range(3):
                channel.send(message(0, number, device))
        else:
            time.sleep(0.5)  # the sender is at its end by now
            for number in range(3):
                require_equal(channel.recv(), message(0, number, device))


def test_what_was_sent_arrives_though_the_sender_leaves_at_once(device: str) -> None:
    run(device, 2, leaves_at_once)


def both_ways(device: str) -> None:
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank)
        for number in range(12):
            work = channel.send(message(mesh.rank, number, device))
            require_equal(channel.recv(), message(1 - mesh.rank, number, device))
            work.wait()
        # Many at once in one direction, and kept by the receiver: no slot may be used twice.
        for sender in (0, 1):
            if mesh.rank == sender:
                for work in [channel.send(message(mesh.rank, number, device)) for number in range(10)]:
                    work.wait()
                continue
            received = [channel.recv() for _ in range(10)]
            for number, tree in enumerate(received):
                require_equal(tree, message(sender, number, device))


def test_both_ways_with_changing_shapes(device: str) -> None:
    run(device, 2, both_ways)


def many_tensors(device: str) -> None:
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank, schema="frozen")
        for repeat in range(4):
            mine, theirs = (
                [
                    (torch.arange(1 + 331 * i, device=device) % 2 if dtype == torch.bool else
                     torch.arange(1 + 331 * i, device=device) % 50 + 50 * rank + repeat).to(dtype)
                    for i in range(64)
                    for dtype in (DTYPES[i % len(DTYPES)],)
                ]
                for rank in (mesh.rank, 1 - mesh.rank)
            )  # fmt: skip
            sleep(device, 5.0)
            work = channel.send(mine)
            require_equal(channel.recv(), theirs)
            work.wait()
            for tensor in mine:
                tensor.zero_()


def test_sixty_four_tensors_of_all_dtypes(device: str) -> None:
    run(device, 2, many_tensors)


def large(device: str) -> None:
    count = 1 << 25 if device == "cuda" else 1 << 20  # 128 MiB
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank)
        for repeat in range(3):
            whole = torch.full((count,), 10.0 * mesh.rank + repeat, device=device)
            parts = [torch.full((count // 8,), 100.0 * mesh.rank + i, device=device) for i in range(8)]
            # One at a time: a second send may start only when the peer has taken the first one in.
            work = channel.send(whole)
            received = channel.recv()
            work.wait()
            whole.fill_(-1.0)
            work = channel.send(parts)
            received_parts = channel.recv()
            work.wait()
            assert bool((received == 10.0 * (1 - mesh.rank) + repeat).all())
            for i, part in enumerate(received_parts):
                assert bool((part == 100.0 * (1 - mesh.rank) + i).all())


def test_large_messages_both_ways(device: str) -> None:
    """Beyond what any transport buffers: each side sends before it receives."""
    run(device, 2, large)


def late_input(device: str) -> None:
    """What is sent is what the stream writes before the send, not what lies there when the host calls."""
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank)
        one, two = (torch.zeros(1 << 16, device=device) for _ in range(2))
        for number in range(8):
            sleep(device, 10.0)
            one.fill_(number + 100.0 * mesh.rank)
            two.fill_(number + 100.0 * mesh.rank + 0.5)
            work = channel.send([one, two] if number % 2 else one)
            received = channel.recv()
            work.wait()
            one.fill_(-1.0)
            two.fill_(-1.0)
            expected = number + 100.0 * (1 - mesh.rank)
            first = received[0] if number % 2 else received
            assert bool((first == expected).all())
            assert number % 2 == 0 or bool((received[1] == expected + 0.5).all())


def test_a_message_holds_what_was_written_before_it(device: str) -> None:
    run(device, 2, late_input)


def sends_do_not_wait(device: str) -> list[str]:
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank, schema="frozen")
        tree = [torch.full((1000 + i,), float(mesh.rank), device=device) for i in range(8)]

        def exchange() -> None:
            with host_never_waits(device):
                sleep(device, 5.0)
                work = channel.send(tree)
                received = channel.recv()
                work.wait()
                for tensor in received:
                    tensor.add_(1.0)

        for _ in range(3):
            exchange()
        synchronize(device)
        return blocking_calls(traced(device, exchange))


def test_no_hidden_synchronization(device: str) -> None:
    assert run(device, 2, sends_do_not_wait) == [[], []]


def changing_messages_do_not_wait(device: str) -> list[str]:
    """With a header and, for the first of each kind, a schema ahead: casts, holes and sizes that change."""
    with mesh_on(device, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank, wire_dtype=torch.bfloat16)
        trees = [
            {"x": [torch.full((1000 + 64 * i + j,), float(mesh.rank), device=device) for j in range(4)],
             "t": torch.full((32, 48 + i), float(mesh.rank), device=device).t(),
             "i": torch.arange(5 + i, device=device)}
            for i in range(3)
        ]  # fmt: skip

        def exchange() -> None:
            with host_never_waits(device):
                sleep(device, 5.0)
                for tree in trees:
                    work = channel.send(tree)
                    received = channel.recv()
                    work.wait()
                    received["x"][0].add_(1.0)
                    received["t"].add_(1.0)

        for _ in range(4):  # by then all schemas are known, and slots of these sizes are there
            exchange()
        synchronize(device)
        return blocking_calls(traced(device, exchange))


def test_no_hidden_synchronization_where_messages_change(device: str) -> None:
    assert run(device, 2, changing_messages_do_not_wait) == [[], []]


def captured(_: str, count: int) -> None:
    with mesh_on("cuda", pp=2) as mesh:
        side = torch.cuda.Stream()
        tensor = torch.zeros(count, device="cuda")
        step = torch.zeros((), device="cuda")
        with torch.cuda.stream(side):
            channel = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank, schema="frozen")

            def move() -> None:
                if mesh.rank == 0:
                    torch.mul(torch.arange(count, device="cuda") % 1000, step, out=tensor)
                    channel.send(tensor).wait()
                else:
                    tensor.copy_(channel.recv())

            for _ in range(3):
                move()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            move()
        wrong = []
        for number in (1.0, 2.0, 3.0):
            step.fill_(number)
            graph.replay()
            torch.cuda.synchronize()
            wrong.append(int((tensor != torch.arange(count, device="cuda") % 1000 * number).sum()))
        del graph  # before the mesh closes
        assert wrong == [0, 0, 0]


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1 << 4, 1 << 16, 1 << 20, 1 << 23])
def test_a_message_in_a_graph_is_sent_anew(count: int) -> None:
    """Sent from where it lies, into a slot: NCCL must not use the slot in place, which it may in captures."""
    run("cuda", 2, captured, count)
