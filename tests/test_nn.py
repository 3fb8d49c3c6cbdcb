"""hpcomm.nn: gradients over a channel are those of one process; None, order, no_grad, one call at a time, limits."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING

import pytest
import ranks
import torch
from pairs import paired
from refusals import send_until_told

import hpcomm

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSPORTS = {
    "shm": {},
    "gloo": {"HPCOMM_CPU_TRANSPORT": "gloo"},
    "one slot": {"HPCOMM_EMULATE": "nccl:seed=2:delay=500"},
}
SCHEMAS = ("per_message", "frozen")

over_all = pytest.mark.parametrize("env", TRANSPORTS.values(), ids=TRANSPORTS)


def send_number(channel: hpcomm.Channel, i: int) -> None:
    """Message ``i``, whose gradient comes back from :func:`take_number`."""
    x = torch.full((2,), float(i), requires_grad=True)
    hpcomm.nn.send(channel, x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [i + 1.0] * 2


def take_number(got: torch.Tensor, i: int) -> None:
    assert got.tolist() == [float(i)] * 2
    (got * (i + 1)).sum().backward()


@dataclasses.dataclass
class Hidden:
    states: torch.Tensor
    unused: torch.Tensor
    mask: torch.Tensor | None


def layers() -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(3)
    return torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)


def batch(i: int) -> torch.Tensor:
    return torch.arange(15.0).view(3, 5) / 7 + i


def two_halves(microbatches: int, schema: str) -> None:
    first, second = layers()
    with paired(schema=schema) as (mesh, channel):
        if mesh.rank == 0:
            tokens = []
            for i in range(microbatches):
                h = first(batch(i))
                tokens.append(hpcomm.nn.send(channel, Hidden(h, h * 2, h.detach() > 0)))
            for token in tokens:
                assert token.shape == ()
                token.backward()
        else:
            received = [hpcomm.nn.recv(channel) for _ in range(microbatches)]
            for hidden in received:
                assert type(hidden) is Hidden
                assert hidden.states.requires_grad
                assert hidden.unused.requires_grad
                assert not hidden.mask.requires_grad
                (second(hidden.states) * hidden.mask.any()).sum().backward()
    # What one process finds.
    mine = (first, second)[mesh.rank]
    a, b = layers()
    for i in range(microbatches):
        h = a(batch(i))
        (b(h) * (h.detach() > 0).any()).sum().backward()
    for got, expected in zip(mine.parameters(), (a, b)[mesh.rank].parameters(), strict=True):
        assert got.grad is not None
        assert torch.allclose(got.grad, expected.grad)


@pytest.mark.parametrize("schema", SCHEMAS)
@over_all
def test_gradients_are_those_of_one_process(env: dict[str, str], schema: str) -> None:
    ranks.run(2, two_halves, 4, schema, env=env)


def a_gradient_that_nobody_finds() -> None:
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
            (hpcomm.nn.send(channel, [used, unused]) + 1).backward()
            assert used.grad is not None
            assert torch.equal(used.grad, torch.tensor([1.0, 2.0, 3.0]))
            assert unused.grad is None
        else:
            used, _ = hpcomm.nn.recv(channel)
            (used * torch.tensor([1.0, 2.0, 3.0])).sum().backward()


@over_all
def test_a_gradient_that_nobody_finds_is_none(env: dict[str, str]) -> None:
    ranks.run(2, a_gradient_that_nobody_finds, env=env)


def a_sparse_gradient() -> None:
    """An embedding whose table came in a message."""
    with paired() as (mesh, channel):
        table = torch.arange(8.0).view(4, 2).requires_grad_()
        if mesh.rank == 0:
            hpcomm.nn.send(channel, table).backward()
            assert table.grad is not None
            assert torch.equal(table.grad, torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]))
        else:
            rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), hpcomm.nn.recv(channel), sparse=True)
            rows.sum().backward()


def test_a_sparse_gradient_travels_dense() -> None:
    ranks.run(2, a_sparse_gradient)


def both_ways() -> None:
    """Each rank has half of two models: messages cross, and so do their gradients, whatever runs first."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        me, peer = mesh.rank, 1 - mesh.rank
        channels = [hpcomm.Channel(mesh.pp, peer) for _ in range(2)]  # channel r carries what rank r sends
        x = [torch.full((3,), 10.0**me + i, requires_grad=True) for i in range(4)]
        tokens, received = [], []
        for i in range(4):
            tree = {"x": x[i], "deep": [x[i] * 2, (None, {"n": x[i].detach()})]}
            tokens.append(hpcomm.nn.send(channels[me], tree))
            received.append(hpcomm.nn.recv(channels[peer]))
        for i, got in enumerate(received):
            assert got["x"].requires_grad
            assert got["deep"][0].requires_grad
            assert not got["deep"][1][1]["n"].requires_grad
            used = got["deep"][0] * (10.0**peer + i) if i % 2 else got["x"] * 5
            used.sum().backward()
        for token in tokens:
            token.backward()
        for i in range(4):
            expected = 2 * (10.0**me + i) if i % 2 else 5.0
            assert x[i].grad is not None
            assert torch.equal(x[i].grad, torch.full((3,), expected))


@over_all
def test_both_ways_at_once(env: dict[str, str]) -> None:
    ranks.run(2, both_ways, env=env)


def nothing_to_differentiate() -> None:
    with paired() as (mesh, channel):
        weight = torch.ones(2, requires_grad=True)
        if mesh.rank == 0:
            assert not hpcomm.nn.send(channel, {"n": None, "i": 3}).requires_grad
            assert not hpcomm.nn.send(channel, torch.ones(2)).requires_grad
            with torch.no_grad():
                assert not hpcomm.nn.send(channel, weight).requires_grad
        else:
            assert hpcomm.nn.recv(channel) == {"n": None, "i": 3}
            assert not hpcomm.nn.recv(channel).requires_grad
            assert not hpcomm.nn.recv(channel).requires_grad


def test_messages_without_a_gradient() -> None:
    ranks.run(2, nothing_to_differentiate)


def another_order() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    if mesh.rank == 0:
        tokens = [hpcomm.nn.send(channel, torch.full((2,), float(i), requires_grad=True)) for i in range(2)]
        due = "hpcomm.nn: the gradients of message 0 were due: .*"
        with pytest.raises(
            hpcomm.SchemaMismatch,
            match=due + "those of message 1 came.* as message 0 .* of message 1 run.* in one order",
        ) as raised:
            tokens[0].backward()
        assert vars(raised.value) == vars(raised.value.__cause__)
        assert (raised.value.peer, raised.value.operation) == (1, "recv")
    else:
        received = [hpcomm.nn.recv(channel) for _ in range(2)]
        received[1].sum().backward()
    mesh.world.barrier()


@over_all
def test_backwards_in_another_order_are_not_mixed_up(env: dict[str, str]) -> None:
    ranks.run(2, another_order, env=env)


def another_order_frozen() -> None:
    """No header says which message a gradient belongs to: each rank refuses what is not the next one by itself."""
    with paired(schema="frozen") as (mesh, channel):
        if mesh.rank == 0:
            x = [torch.full((2,), 1.0 + i, requires_grad=True) for i in range(3)]
            tokens = [hpcomm.nn.send(channel, x[i] * 1) for i in range(3)]
            for wrong in (tokens[1], tokens[2], tokens[0] + tokens[1]):
                with pytest.raises(hpcomm.InvalidArgument, match="message [12], where that of message 0 is due"):
                    wrong.backward(retain_graph=True)
            tokens[0].backward(retain_graph=True)
            for wrong, number in ((tokens[0], 0), (tokens[2], 2)):
                with pytest.raises(hpcomm.InvalidArgument, match=f"message {number}, where that of message 1 is due"):
                    wrong.backward(retain_graph=True)
            tokens[1].backward()
            tokens[2].backward()
            for i in range(3):
                assert x[i].grad is not None
                assert x[i].grad.tolist() == [10.0 + i] * 2
        else:
            h = [hpcomm.nn.recv(channel) for _ in range(3)]
            for wrong in (h[1], h[2], h[0] + h[1]):
                with pytest.raises(hpcomm.InvalidArgument, match="message [12], where that of message 0 is due"):
                    wrong.sum().backward(retain_graph=True)
            for i in range(3):
                loss = (h[i] * (10.0 + i)).sum()
                loss.backward(retain_graph=True)
                with pytest.raises(hpcomm.InvalidArgument, match='schema="frozen" gradients carry no numbers'):
                    loss.backward()


@over_all
def test_frozen_gradients_go_in_the_order_of_the_messages(env: dict[str, str]) -> None:
    ranks.run(2, another_order_frozen, env=env)


def other_nones_frozen() -> None:
    """The first backward says which gradients are None. Others raise, and nothing is sent; one that fits may follow."""
    with paired(schema="frozen") as (mesh, channel):
        for i in range(3):
            if mesh.rank == 0:
                used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
                hpcomm.nn.send(channel, [used, unused]).backward()
                assert used.grad is not None
                assert used.grad.tolist() == [i + 1.0] * 3
                assert unused.grad is None
            else:
                used, unused = hpcomm.nn.recv(channel)
                for other in (used + unused, unused) if i > 0 else ():
                    with pytest.raises(hpcomm.SchemaMismatch, match="the schema is frozen and this message has"):
                        other.sum().backward(retain_graph=True)
                (used * (i + 1)).sum().backward()


@over_all
def test_frozen_gradients_are_none_where_the_first_were(env: dict[str, str]) -> None:
    ranks.run(2, other_nones_frozen, env=env)


def both_send(schema: str) -> None:
    """On one channel, which the documentation forbids: what the other rank sent has the number of the gradients due."""
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=schema)
    token = hpcomm.nn.send(channel, [torch.full((2,), 1.0 + mesh.rank, requires_grad=True)])
    with pytest.raises(
        hpcomm.SchemaMismatch, match="the gradients of message 0 were due: a message of .* own came.* second Channel"
    ) as raised:
        token.backward()
    error = raised.value
    assert (error.rank, error.peer, error.operation) == (mesh.rank, 1 - mesh.rank, "recv")
    mesh.world.barrier()
    mesh.close()


def gradients_for_a_message(schema: str) -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=schema)
    if mesh.rank == 0:
        token = hpcomm.nn.send(channel, [torch.ones(2, requires_grad=True)])
        with pytest.raises(
            hpcomm.SchemaMismatch, match=r"message 0 of hpcomm\.nn\.send was due: gradients came.* second Channel"
        ):
            hpcomm.nn.recv(channel)
        del token
    else:
        hpcomm.nn.recv(channel)[0].sum().backward()
    mesh.world.barrier()
    mesh.close()


@pytest.mark.parametrize("schema", SCHEMAS)
@over_all
@pytest.mark.parametrize("misuse", [both_send, gradients_for_a_message])
def test_messages_and_gradients_are_not_taken_for_each_other(
    misuse: Callable[[str], None], env: dict[str, str], schema: str
) -> None:
    ranks.run(2, misuse, schema, env=env)


def no_message_of_nn() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    if mesh.rank == 0:
        channel.send(torch.ones(2))
    else:
        due = r"message 0 of hpcomm\.nn\.send was due: .*"
        with pytest.raises(
            hpcomm.SchemaMismatch, match=due + r"a message of Channel\.send came.* a second Channel"
        ) as raised:
            hpcomm.nn.recv(channel)
        assert vars(raised.value) == vars(raised.value.__cause__)
    mesh.world.barrier()
    mesh.close()


@over_all
def test_a_message_of_the_channel_is_none_of_nn(env: dict[str, str]) -> None:
    ranks.run(2, no_message_of_nn, env=env)


def answers_by_hand() -> None:
    answers: list[tuple[object, str]] = [
        ([torch.ones(2)], "1 gradients, for 2 tensors that require one"),
        ([torch.ones(2), None, None], "3 gradients, for 2 tensors"),
        ([torch.ones(2), torch.ones(1)], r"a gradient 1 of shape \(1,\), for a tensor of shape \(3,\)"),
        ([None, "none"], "str in place of gradient 1"),
        (None, "NoneType in place of a list of 2 gradients"),
    ]
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    for number, (answer, complaint) in enumerate(answers):
        if mesh.rank == 0:
            token = hpcomm.nn.send(channel, [torch.ones(n, requires_grad=True) for n in (2, 3)])
            due = rf"the gradients of message {number} were due: on edge 1->0 came {complaint}"
            with pytest.raises(hpcomm.SchemaMismatch, match=due):
                token.backward()
        else:
            hpcomm.nn.recv(channel, timeout=None)
            channel._sender.send({"hpcomm.nn gradients": answer}, number)
    mesh.world.barrier()
    mesh.close()


def test_gradients_that_nn_did_not_send_are_refused_by_name() -> None:
    ranks.run(2, answers_by_hand)


def sent_within_a_send(schema: str) -> None:
    """By another thread, and by the same one: refused, and the numbers go on."""
    busy = "nn.send: a call on this channel has not returned"
    refused: list[str] = []

    def send_again(channel: hpcomm.Channel) -> None:
        with pytest.raises(hpcomm.InvalidArgument, match=busy):
            hpcomm.nn.send(channel, torch.ones(2, requires_grad=True))
        refused.append(threading.current_thread().name)

    with hpcomm.init(dp=1, pp=2) as mesh:

        def rule(_: str, __: torch.Tensor) -> None:
            if mesh.rank == 0:
                send_again(channel)
                thread = threading.Thread(target=send_again, args=(channel,), name="other")
                thread.start()
                thread.join()

        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=schema, wire_dtype=rule)
        for i in range(3):
            if mesh.rank == 0:
                send_number(channel, i)
                assert refused == [threading.current_thread().name, "other"] * (i + 1)
            else:
                got = hpcomm.nn.recv(channel)
                take_number(got, i)


@pytest.mark.parametrize("schema", SCHEMAS)
@over_all
def test_one_send_at_a_time(env: dict[str, str], schema: str) -> None:
    ranks.run(2, sent_within_a_send, schema, env=env)


def received_within_a_recv() -> None:
    """By the handler of a signal, and by another thread that it waits for."""
    refused: list[str] = []
    with paired() as (mesh, channel):

        def recv_again() -> None:
            with pytest.raises(hpcomm.InvalidArgument, match="nn.recv: a call on this channel has not returned"):
                hpcomm.nn.recv(channel, timeout=0.1)
            refused.append(threading.current_thread().name)

        def handle(*_: object) -> None:
            with contextlib.suppress(hpcomm.InvalidArgument):
                with pytest.raises(hpcomm.TimedOut):
                    hpcomm.nn.recv(channel, timeout=0.0)
                signal.setitimer(signal.ITIMER_REAL, 0.2)  # this machine was slow: once more
                return
            recv_again()
            thread = threading.Thread(target=recv_again, name="other")
            thread.start()
            thread.join()
            mesh.control.send(0, 997, b"handled")

        for i in range(2):
            if mesh.rank == 0:
                assert mesh.control.receive(1, 997, 30) == b"handled"
                send_number(channel, i)
            else:
                before = signal.signal(signal.SIGALRM, handle)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                got = hpcomm.nn.recv(channel)
                signal.signal(signal.SIGALRM, before)
                assert refused == [threading.current_thread().name, "other"] * (i + 1)
                take_number(got, i)


@over_all
def test_one_recv_at_a_time(env: dict[str, str]) -> None:
    ranks.run(2, received_within_a_recv, env=env)


def cast_gradients() -> None:
    """Each rank's rule is asked for what it sends: the names of the gradients are those of their own message."""
    asked: list[str] = []

    def rule(name: str, tensor: torch.Tensor) -> torch.dtype:
        asked.append(name)
        return torch.bfloat16 if tensor.numel() == 3 else torch.float32

    with paired(wire_dtype=rule) as (mesh, channel):
        if mesh.rank == 0:
            x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
            hpcomm.nn.send(channel, {"x": x, "ids": torch.arange(2), "y": y}).backward()
            assert asked == ["message['x']", "message['y']"]
            assert x.grad is None
            assert y.grad is not None
            assert torch.equal(y.grad, torch.full((3,), 1 / 3).bfloat16().float())
        else:
            (hpcomm.nn.recv(channel)["y"] / 3).sum().backward()
            assert asked == ["message['hpcomm.nn gradients'][1]"]


@over_all
def test_a_function_says_how_gradients_travel(env: dict[str, str]) -> None:
    ranks.run(2, cast_gradients, env=env)


def written_after_the_work() -> None:
    with paired() as (mesh, channel):
        sizes = (2, 1 << 19, 1 << 12)
        if mesh.rank == 0:
            x, works = torch.ones((), requires_grad=True), []
            buffers = [torch.empty(size) for size in sizes]
            tokens = []
            for buffer in buffers:
                for i in range(2):
                    tokens.append(hpcomm.nn.send(channel, [x * (i + 1), buffer.fill_(float(i))], works=works))
                    works[-1].wait()
            assert len(works) == 6
            for token in tokens:
                token.backward()
            assert x.grad is not None
            assert x.grad.item() == 3 * (1 + 2)
        else:
            for size in sizes:
                for i in range(2):
                    scale, buffer = hpcomm.nn.recv(channel)
                    assert torch.equal(buffer, torch.full((size,), float(i)))
                    scale.backward()


@over_all
def test_a_work_says_when_tensors_may_be_written(env: dict[str, str]) -> None:
    ranks.run(2, written_after_the_work, env=env)


def backward_again() -> None:
    """A graph that is kept sends its gradients once for each backward, on both sides as often."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            x = torch.full((3,), 2.0, requires_grad=True)
            token = hpcomm.nn.send(channel, [x * 5, x])
            for i in range(3):
                token.backward(retain_graph=i < 2)
                assert torch.equal(x.grad, torch.full((3,), (i + 1) * (5 * 7.0 + 11)))
            y = torch.ones(2, requires_grad=True)
            hpcomm.nn.send(channel, {"y": y}).backward()  # the next message is in step
            assert torch.equal(y.grad, torch.full((2,), 13.0))
        else:
            a, b = hpcomm.nn.recv(channel)
            loss = (a * 7).sum() + (b * 11).sum()
            for i in range(3):
                loss.backward(retain_graph=i < 2)
            (hpcomm.nn.recv(channel)["y"] * 13).sum().backward()


@over_all
def test_a_graph_that_is_kept_may_go_backward_again(env: dict[str, str]) -> None:
    ranks.run(2, backward_again, env=env)


def derivatives_of_derivatives() -> None:
    """They would need a graph across the ranks: an error, no wrong number, and the channel stays in step."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            x = torch.full((3,), 2.0, requires_grad=True)
            token = hpcomm.nn.send(channel, x**2)
            (gradient,) = torch.autograd.grad(token, x, create_graph=True)
            assert torch.equal(gradient.detach(), torch.full((3,), 4 * 3 * 16.0))  # 2x of 3 (x^2)^2
            with pytest.raises(hpcomm.InvalidArgument, match="derivatives of derivatives are not sent"):
                gradient.sum().backward()
        else:
            h = hpcomm.nn.recv(channel)
            (h**3).sum().backward()
        work = channel.send(mesh.rank)
        assert channel.recv() == 1 - mesh.rank
        work.wait()


def test_derivatives_of_derivatives_are_refused() -> None:
    ranks.run(2, derivatives_of_derivatives)


def two_partial_backwards() -> None:
    """Each would send a gradient of its part, of which the sender's backward takes the first."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            x = torch.ones(3, requires_grad=True)
            hpcomm.nn.send(channel, [x * 2, x * 3]).backward()
        else:
            a, b = hpcomm.nn.recv(channel)
            a.sum().backward()
            with pytest.raises(hpcomm.InvalidArgument, match="message 0; .* run one backward"):
                b.sum().backward()


def test_two_backwards_over_parts_of_a_message_are_refused() -> None:
    ranks.run(2, two_partial_backwards)


def changed_in_place() -> None:
    """A stage may begin with an operation in place, and one tensor may stand in a tree twice."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
            h = x * 2
            hpcomm.nn.send(channel, {"h": h, "again": h, "other": x * 3}).backward()
            assert torch.equal(x.grad, torch.tensor([0.0, 2 * 5.0, 2 * 5.0]) + 2 * 7 + 3 * 4)
        else:
            got = hpcomm.nn.recv(channel)
            h = torch.nn.functional.relu(got["h"], inplace=True)
            assert torch.equal(h.detach(), torch.tensor([0.0, 4.0, 6.0]))
            assert torch.equal(got["again"].detach(), torch.tensor([-2.0, 4.0, 6.0]))
            other = got["other"]
            other *= 4
            ((h * 5).sum() + (got["again"] * 7).sum() + other.sum()).backward()


@over_all
def test_what_was_received_may_be_changed_in_place(env: dict[str, str]) -> None:
    ranks.run(2, changed_in_place, env=env)


def no_gradient_at_all() -> None:
    """A backward that reaches one of a message's tensors sends None for all others; complex numbers have gradients."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            tensors = [torch.full((2,), 1.0 + i, requires_grad=True) for i in range(4)]
            z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
            hpcomm.nn.send(channel, [*tensors, z, torch.arange(3)]).backward()
            assert [tensor.grad is None for tensor in tensors] == [True, True, False, True]
            assert torch.equal(tensors[2].grad, torch.zeros(2))
            assert torch.equal(z.grad, 2 * z.detach())
        else:
            got = hpcomm.nn.recv(channel)
            ((got[2] * 0).sum() + (got[4].abs() ** 2).sum()).backward()


@over_all
def test_most_tensors_have_no_gradient(env: dict[str, str]) -> None:
    ranks.run(2, no_gradient_at_all, env=env)


def refused_sends() -> None:
    with paired(max_bytes=4096) as (mesh, channel):
        for i in range(3):
            if mesh.rank == 0:
                with pytest.raises(hpcomm.InvalidArgument, match="sparse"):
                    hpcomm.nn.send(channel, torch.eye(2).to_sparse())
                with pytest.raises(hpcomm.InvalidArgument, match="takes up to max_bytes=4096"):
                    hpcomm.nn.send(channel, torch.ones(4096))
                send_number(channel, i)
            else:
                take_number(hpcomm.nn.recv(channel), i)


@over_all
def test_a_message_that_was_not_sent_has_no_number(env: dict[str, str]) -> None:
    ranks.run(2, refused_sends, env=env)


def refused_by_the_receiver(why: str, then: str) -> None:
    """The receiver catches the error, and has the gradients of what it took before to send, but none for the rest."""
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    hidden = Hidden(torch.ones(2, requires_grad=True), torch.ones(2), None)
    words = "edge 0->1, message #1, microbatch 1: "
    words += {
        "class": r"message\[0\]: a .*:Hidden, which",
        "shape": r".*message\[0\]\.states: float32\[2\] instead of float32\[3\]",
    }[why]
    if mesh.rank == 0:
        x = torch.ones(2, requires_grad=True)
        tokens = [hpcomm.nn.send(channel, tree) for tree in (x, [hidden], [hidden])]
        mesh.control.send(1, 996, b"sent")  # once it has refused one, no other is sent
        mesh.control.receive(1, 995, 30)  # it has refused the second
        tokens[0].backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3.0, 3.0]
        for token in tokens[1:]:
            with pytest.raises(hpcomm.SchemaMismatch, match=f"rank 1 refused a message of this rank: {words}"):
                token.backward()
        with pytest.raises(hpcomm.SchemaMismatch, match="rank 1 refused"):
            hpcomm.nn.send(channel, hidden)
    else:
        good = hpcomm.nn.recv(channel)
        mesh.control.receive(0, 996, 30)
        with pytest.MonkeyPatch.context() as here:
            if why == "shape":
                channel.expect([Hidden(torch.ones(3), torch.ones(2), None)])
            else:
                here.delattr(sys.modules[Hidden.__module__], "Hidden")
            for _ in range(2):
                with pytest.raises(hpcomm.SchemaMismatch, match=words):
                    hpcomm.nn.recv(channel)
        mesh.control.send(0, 995, b"refused")
        time.sleep(0.2)
        (good * 3).sum().backward()
    if then == "stays":
        mesh.world.barrier()
        if mesh.rank == 1:  # its gradients have nowhere to go
            with pytest.raises(hpcomm.SchemaMismatch, match="rank 0 refused .*: edge 1->0 ended with what it answers"):
                send_until_told(channel, torch.ones(2))
        mesh.world.barrier()
    mesh.close()


@pytest.mark.parametrize("then", ["stays", "leaves"])
@pytest.mark.parametrize("why", ["class", "shape"])
@over_all
def test_a_backward_hears_that_its_message_was_refused(env: dict[str, str], why: str, then: str) -> None:
    ranks.run(2, refused_by_the_receiver, why, then, env=env)


class Alarm(Exception):
    pass


def interrupted_recvs(limit: float) -> None:
    def ring(*_: object) -> None:
        raise Alarm

    def recv_with_an_alarm(channel: hpcomm.Channel) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        hpcomm.nn.recv(channel, limit)

    with paired() as (mesh, channel):
        for i in range(3):
            if mesh.rank == 0:
                assert mesh.control.receive(1, 997, 30) == b"again"
                send_number(channel, i)
            else:
                before = signal.signal(signal.SIGALRM, ring)
                with pytest.raises(Alarm):
                    recv_with_an_alarm(channel)
                signal.signal(signal.SIGALRM, before)
                mesh.control.send(0, 997, b"again")
                take_number(hpcomm.nn.recv(channel), i)


@pytest.mark.parametrize(
    ("transport", "limit"),
    # Over shared memory without a limit the interrupted receiver ends its direction: docs/explanation/channel.md.
    [(transport, limit) for transport in TRANSPORTS for limit in (-1.0, 30.0) if transport != "shm" or limit >= 0],
)
def test_an_interrupted_recv_can_be_repeated(transport: str, limit: float) -> None:
    ranks.run(2, interrupted_recvs, limit, env=TRANSPORTS[transport])


def looks_again() -> None:
    with paired() as (mesh, channel):
        for i in range(3):
            if mesh.rank == 0:
                assert mesh.control.receive(1, 997, 30) == b"again"
                send_number(channel, i)
            else:
                for limit in (0.05, 0.0):
                    with pytest.raises(hpcomm.TimedOut):
                        hpcomm.nn.recv(channel, timeout=limit)
                mesh.control.send(0, 997, b"again")
                limits = [30.0] if i % 2 else []
                got = hpcomm.nn.recv(channel, *limits)
                take_number(got, i)


@over_all
def test_a_recv_that_timed_out_can_be_repeated(env: dict[str, str]) -> None:
    ranks.run(2, looks_again, env=env)


def skips(limit: float) -> None:
    """The receiver's loss leaves out the second message."""
    with hpcomm.init(dp=1, pp=2, timeout=limit) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            tokens = [hpcomm.nn.send(channel, torch.ones(2, requires_grad=True)) for _ in range(2)]
            tokens[0].backward()
            with pytest.raises(
                hpcomm.TimedOut, match=r"hpcomm\.nn: the gradients of message 1 did not .* rank 1 .* 1\?"
            ):
                tokens[1].backward()
        else:
            first, _ = hpcomm.nn.recv(channel), hpcomm.nn.recv(channel)
            first.sum().backward()
            mesh.control.receive(0, 997, 60)
        if mesh.rank == 0:
            mesh.control.send(1, 997, b"over")


def test_gradients_that_do_not_come_are_named() -> None:
    ranks.run(2, skips, 2.0)


def forgets(size: int) -> list[str]:
    """The sender takes no gradient but one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with paired() as (mesh, channel):
            for i in range(70):
                if mesh.rank == 0:
                    token = hpcomm.nn.send(channel, torch.ones(size, requires_grad=True))
                    token.backward() if i == 0 else None
                else:
                    hpcomm.nn.recv(channel).sum().backward()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


@over_all
def test_gradients_that_nobody_takes_are_told(env: dict[str, str]) -> None:
    quiet, (told,) = ranks.run(2, forgets, 300_000, env=env)
    assert quiet == []
    assert told.startswith("rank 1 leaves the job with 69 messages or more that rank 0 has not received")


def backward_a_second_time() -> None:
    """Torch's error on both ranks, before anything is sent; the next message is all right."""
    with paired() as (mesh, channel):
        for _ in range(2):
            if mesh.rank == 0:
                x = torch.ones(3, requires_grad=True)
                token = hpcomm.nn.send(channel, x * x)
                token.backward()
                again = token.backward
                assert x.grad is not None
                assert x.grad.tolist() == [6.0] * 3
            else:
                loss = (hpcomm.nn.recv(channel) + 3).sum() * 3  # none of which saves anything
                loss.backward()
                again = loss.backward
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                again()


@over_all
def test_a_second_backward_raises_before_it_waits(env: dict[str, str]) -> None:
    ranks.run(2, backward_a_second_time, env=env)


def zeroed_behind_the_backward() -> None:
    with hpcomm.init(pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        size = 2 << 20  # too large to be packed: it is read where it lies
        if mesh.rank == 0:
            x = torch.zeros(1, size, requires_grad=True)
            token = hpcomm.nn.send(channel, x)
            mesh.barrier()
            token.backward()
            assert torch.equal(x.grad, torch.full((1, size), 3.0))
        else:
            shift = torch.nn.Parameter(torch.zeros(size))
            h = hpcomm.nn.recv(channel)
            ((h + shift[None]) * 3.0).sum().backward()
            shift.grad.zero_()
            mesh.barrier()


def test_what_the_receiver_writes_behind_its_backward_does_not_travel() -> None:
    ranks.run(2, zeroed_behind_the_backward)
