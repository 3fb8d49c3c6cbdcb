"""send and recv with autograd: what the receiver's backward finds travels back to the sender's.

Rank 0, which has the first half of a model, and rank 1, which has the rest:

    token = hpcomm.nn.send(channel, first(x))        h = hpcomm.nn.recv(channel)
    token.backward()                                 loss(second(h)).backward()

The idea of a token that stands for the other rank's part of the graph is ChainerMN's delegate variable (T. Akiba,
K. Fukuda, S. Suzuki, "ChainerMN: Scalable Distributed Deep Learning Framework", 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from hpcomm import _C
from hpcomm.channel import seconds
from hpcomm.errors import InvalidArgument, SchemaMismatch, TimedOut

if TYPE_CHECKING:
    from hpcomm._C import Work
    from hpcomm.channel import Channel

__all__ = ["recv", "send"]

# Gradients travel as {_KEY: [...]}: neither they nor a program's messages are taken for the other.
_KEY = "hpcomm.nn gradients"


def send(channel: Channel, tree: object, *, works: list[Work] | None = None) -> torch.Tensor:
    """Sends ``tree``; its backward receives the gradients.

    One call on a channel at a time: threads that share one take turns. Gradients are cast on the way as ``wire_dtype``
    of the receiver's channel says; a function is not asked by the names in ``tree``, but for
    ``"message['hpcomm.nn gradients'][i]"``, where i counts the tensors that require a gradient.

    With ``schema="frozen"`` gradients carry no numbers. So each message has one backward, in the order of the messages;
    any other one raises before it sends or takes anything. The first one says which gradients are None in all others.
    Messages under ``torch.no_grad()`` have another schema, and take a channel of their own.

    Args:
        channel: towards the rank that calls :func:`recv`. Gradients come back on its other direction, which must not
            carry anything else meanwhile: a second Channel serves messages the other way.
        tree: as for :meth:`hpcomm.Channel.send`. Tensors that require a gradient get one, those for which the receiver
            finds none get None. They must not be written before the message's Work has ended.
        works: gets the Work appended, as :meth:`hpcomm.Channel.send` returns it.

    Returns:
        A token: a 0-dim float32 zero. ``token.backward()``, or that of a sum with it, waits for the gradients of this
        message; the gradient of the token itself does not count. Every token with a graph needs its backward: gradients
        that nobody takes stay in memory. Without a tensor that requires a gradient, or under
        ``torch.no_grad()``, it has no graph, and the receiver sends nothing back.

    Raises:
        SchemaMismatch: in the backward, when the receiver's backwards run in another order than the sender's, or what
            came is a message of the receiver's own, or other gradients than this message takes; or when the receiver
            refused this message, or one before it, and raised the same there.
        TimedOut: in the backward, when the receiver's did not reach what it got of this message.
        ProtocolError: likewise, for one that came damaged.
        InvalidArgument: another call has not returned; in a backward, with ``schema="frozen"``, when another message's
            is due; in a backward through the backward (``create_graph=True``), which would need both ranks.
    """
    structure, tensors = _C.flatten(tree)
    if not torch.is_grad_enabled():
        tree = _C.unflatten(structure, [tensor.detach() for tensor in tensors])
    number, work = channel._numbered("send", lambda number: channel._sender.send(tree, number))
    if works is not None:
        works.append(work)
    token: torch.Tensor = _Send.apply(channel, number, *tensors)  # type: ignore[no-untyped-call]
    return token


def recv(channel: Channel, timeout: float | None = None) -> Any:
    """The next message of :func:`send`; the backward of its tensors sends their gradients back, None where one is.

    Every message that has a tensor with a gradient must take part in exactly one backward, or the sender waits: also
    one that was received under ``torch.no_grad()``, so evaluate under it on both ranks. ``torch.autograd.grad`` with
    respect to what was received sends nothing. Sparse gradients travel dense. With ``schema="frozen"`` backwards run in
    the order of the messages; see :func:`send`.

    One call on a channel at a time. ``timeout`` is that of :meth:`hpcomm.Channel.recv`: after TimedOut within it, or
    Ctrl-C, the next call goes on with that message. But through shared memory without a ``timeout``, where nothing else
    was waited for before, Ctrl-C ends that direction on this rank, unless the message had come.

    Raises:
        what :meth:`hpcomm.Channel.recv` raises.
        SchemaMismatch: what came is no message of :func:`send`, or gradients.
        InvalidArgument: another call has not returned; in the backward, two of them reached different tensors of this
            message, or, with ``schema="frozen"``, another message's is due.
    """
    limit = seconds(timeout)

    def due(number: int) -> str:
        return f"message {number} of hpcomm.nn.send was due"

    def take(number: int) -> Any:
        try:
            message = channel._take(number, limit)
        except SchemaMismatch as error:
            if channel._receiver.missed(number):
                came = channel._receiver.came
                what = f"message {came} came, or gradients of one" if came >= 0 else _OF_CHANNEL
                raise _mismatch(channel, due(number), what, error.sequence) from error
            raise
        if _are_gradients(message):
            raise _mismatch(channel, due(number), "gradients came")
        return message

    number, message = channel._numbered("recv", take)
    structure, tensors = _C.flatten(message)
    # An input that requires a gradient makes the outputs do so; it gets none.
    anchor = torch.empty(0, requires_grad=True, device=tensors[0].device if tensors else None)
    outputs = _Recv.apply(channel, number, anchor, *tensors) if tensors else ()  # type: ignore[no-untyped-call]
    return _C.unflatten(structure, list(outputs))


def _are_gradients(message: object) -> bool:
    return type(message) is dict and list(message) == [_KEY]


_ORDER = "Backwards run in one order on both ranks, and messages the other way take a second Channel"
_OF_CHANNEL = "a message of Channel.send came"


def _mismatch(channel: Channel, due: str, came: str, sequence: int = -1, hint: str = _ORDER) -> SchemaMismatch:
    end = channel._sender._end
    return SchemaMismatch(
        f"hpcomm.nn: {due}: {came}. {hint}",
        rank=end.communicator.control.rank,
        peer=end.peer,
        operation="recv",
        sequence=sequence,
    )


def _in_turn(channel: Channel, what: str, number: int, call: Callable[[], Any]) -> Any:
    """``call()``; on a frozen channel only for the message whose backward is the next one, as at the other end.

    Raises:
        InvalidArgument: it is not.
    """
    if not channel._is_frozen:
        return call()

    def of_next(due: int) -> Any:
        if number != due:
            raise InvalidArgument(
                f"hpcomm.nn.{what}: that of message {number}, where that of message {due} is due. With "
                'schema="frozen" gradients carry no numbers: each message has one backward, in the order of the '
                "messages, on both ranks. For another order, for messages without a backward, and for graphs that go "
                'backward again, make the Channel with schema="per_message"'
            )
        return call()

    return channel._numbered(what, of_next)[1]


def _take_gradients(channel: Channel, number: int, shapes: list[torch.Size]) -> list[torch.Tensor | None]:
    """``shapes``: of the tensors of the message that require a gradient."""
    due = f"the gradients of message {number} were due"
    try:
        answer = channel._receiver.take_answer(number, channel._sender)
    except SchemaMismatch as error:
        if not channel._receiver.missed(number):
            raise
        came = channel._receiver.came
        if came < 0:
            raise _mismatch(channel, due, _OF_CHANNEL, error.sequence) from error
        hint = (
            f"Did the backward of rank {channel._sender._end.peer} reach what it received as message {number} (add "
            "0 * x.sum() for an x that a loss leaves out), and did the backward of this rank's token of message "
            f"{came} run? {_ORDER}"
        )
        raise _mismatch(channel, due, f"those of message {came} came", error.sequence, hint) from error
    except TimedOut as error:
        raise TimedOut(
            f"hpcomm.nn: the gradients of message {number} did not come: has the backward of rank {error.peer} "
            f"reached what it received as message {number}? ({error})",
            rank=error.rank,
            peer=error.peer,
            operation=error.operation,
            sequence=error.sequence,
        ) from error
    if not _are_gradients(answer):
        raise _mismatch(channel, due, "a message of the peer's own came")
    gradients: list[torch.Tensor | None] = answer[_KEY]
    if wrong := _difference(gradients, shapes):
        end = channel._sender._end
        edge = f"edge {end.peer}->{end.communicator.control.rank}"
        raise _mismatch(
            channel, due, f"on {edge} came {wrong}", hint="What hpcomm.nn.recv sends back is like the message"
        )
    return gradients


def _difference(gradients: object, shapes: list[torch.Size]) -> str:
    """What an answer has that :func:`recv` does not send; programs may send by hand what looks like one."""
    if not isinstance(gradients, list):
        return f"{type(gradients).__name__} in place of a list of {len(shapes)} gradients"
    if len(gradients) != len(shapes):
        return f"{len(gradients)} gradients, for {len(shapes)} tensors that require one"
    for i, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
        if gradient is not None and not isinstance(gradient, torch.Tensor):
            return f"{type(gradient).__name__} in place of gradient {i}"
        if gradient is not None and gradient.shape != shape:
            return f"a gradient {i} of shape {tuple(gradient.shape)}, for a tensor of shape {tuple(shape)}"
    return ""


# Autograd lets go of what a node saved when its graph is freed. Whoever asks for it then raises torch's error of a
# second backward, before the peer is asked for anything.
_FREED_WITH_GRAPH = torch.empty(0)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, number: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(_FREED_WITH_GRAPH)
        ctx.channel = channel
        ctx.number = number
        ctx.shapes = [tensor.shape for tensor in tensors]
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device if tensors else None)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        channel, number = ctx.channel, ctx.number
        needed = ctx.needs_input_grad[2:]
        shapes = [shape for shape, is_needed in zip(ctx.shapes, needed, strict=True) if is_needed]
        answer = _in_turn(channel, "send's backward", number, lambda: _take_gradients(channel, number, shapes))
        taken = [None if g is None else g.detach() for g in answer]
        if torch.is_grad_enabled():  # create_graph=True; once_differentiable takes what came for a constant
            taken = [None if g is None else _Last.apply(g.requires_grad_()) for g in taken]  # type: ignore[no-untyped-call]
        gradients = iter(taken)
        return None, None, *(next(gradients) if is_needed else None for is_needed in needed)


class _Last(torch.autograd.Function):
    """A gradient that came from the other rank: how it depends on this rank's tensors is not known here."""

    @staticmethod
    def forward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
        raise InvalidArgument("hpcomm.nn.send: derivatives of derivatives are not sent between ranks")


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, channel: Channel, number: int, _: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(_FREED_WITH_GRAPH)
        ctx.channel = channel
        ctx.number = number
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(t for t, wanted in zip(outputs, ctx.wanted, strict=True) if not wanted))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        channel, number = ctx.channel, ctx.number  # type: ignore[attr-defined]
        wanted = [g for g, is_wanted in zip(gradients, ctx.wanted, strict=True) if is_wanted]  # type: ignore[attr-defined]
        # Copies: they may be on their way when the program goes on, and autograd may have made the same memory the
        # .grad of a parameter (of one that was added to what came, through a view), which is clipped then, or zeroed.
        wanted = [None if g is None else g.clone() if g.layout == torch.strided else g.to_dense() for g in wanted]
        reached = [g is not None for g in wanted]
        if ctx.__dict__.get("reached", reached) != reached:
            raise InvalidArgument(
                f"hpcomm.nn.recv: two backwards reached different tensors of message {number}; each sends a gradient "
                "back, and the sender's backward takes one. Add the losses, then run one backward"
            )
        _ = ctx.saved_tensors  # type: ignore[attr-defined]
        _in_turn(channel, "recv's backward", number, lambda: channel._sender.send({_KEY: wanted}, number))
        ctx.__dict__["reached"] = reached  # of what has gone
        return (None, None, None, *(None for _ in gradients))
