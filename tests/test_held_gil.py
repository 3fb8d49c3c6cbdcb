"""A program whose C code keeps the GIL: what others wait for goes on, also where memory is to end that Python owns."""

from __future__ import annotations

import ctypes
import struct
import time

import ranks
import torch
import torch.distributed as dist
from pairs import TRANSPORTS

import hpcomm

HELD = 3  # seconds
TOLD = 997  # a Control channel of the test


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(HELD)


def owned_by_python(count: int, value: float) -> torch.Tensor:
    """In memory whose end takes the GIL, as numpy's."""
    return torch.frombuffer(bytearray(struct.pack("<f", value) * count), dtype=torch.float32)


def beats_meanwhile() -> None:
    with hpcomm.init(timeout=30.0) as mesh:
        channel = hpcomm.Channel(mesh.world, 1 - mesh.rank)
        if mesh.rank == 0:
            for number in range(2):
                channel.send({"x": owned_by_python(240_000, number)})
            assert channel.recv() == "go on"
            for number in range(2, 6):
                channel.send({"x": owned_by_python(240_000, number)})
            hold_the_gil()
        else:
            for number in range(6):
                assert channel.recv()["x"].mean() == number
                if number == 1:
                    channel.send("go on")
            time.sleep(HELD)
        mesh.control.check()
        mesh.barrier()


def test_a_rank_that_keeps_the_gil_is_not_taken_for_dead() -> None:
    ranks.run(2, beats_meanwhile, env=TRANSPORTS["gloo"] | {"HPCOMM_HEARTBEAT_TIMEOUT": "1"}, timeout=60)


def moves_meanwhile() -> None:
    mesh = hpcomm.init(timeout=60.0)
    group = dist.new_group(backend="hpcomm")
    count = 2_000_000
    if mesh.rank == 0:
        works = [dist.isend(owned_by_python(count, value), 1, group=group) for value in (1.0, 2.0)]
        del works
        hold_the_gil()
        free = time.monotonic()
        arrived = float(mesh.control.receive(1, TOLD, 60.0))
        assert arrived < free
    else:
        time.sleep(0.5)
        got = torch.zeros(count)
        for value in (1.0, 2.0):
            dist.recv(got, 0, group=group)
            assert got.min() == got.max() == value
        mesh.control.send(0, TOLD, str(time.monotonic()).encode())
    mesh.barrier()
    mesh.close()


def test_messages_that_nobody_waits_for_move_while_the_gil_is_kept() -> None:
    ranks.run(2, moves_meanwhile, env=TRANSPORTS["shm"] | {"HPCOMM_CMA": "0"}, timeout=60)
