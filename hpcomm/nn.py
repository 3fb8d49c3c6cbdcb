"""send and recv with autograd: what the receiver's backward finds travels back to the sender's.

Rank 0, which has the first half of a model, and rank 1, which has the rest:

    token = hpcomm.nn.send(channel, first(x))        h = hpcomm.nn.recv(channel)
    token.backward()                                 loss(second(h)).backward()

The idea of a token that stands for the other rank's part of the graph is ChainerMN's delegate variable (T. Akiba,
K. Fukuda, S. Suzuki, "ChainerMN: Scalable Distributed Deep Learning Framework", 2017).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from hpcomm import _C
from hpcomm.errors import InvalidArgument, ProtocolError, SchemaMismatch

if TYPE_CHECKING:
    from hpcomm.channel import Channel

__all__ = ["recv", "send"]


def send(channel: Channel, tree: object) -> torch.Tensor:
    """Sends ``tree``; its backward receives the gradients.

    Args:
        channel: towards the rank that calls :func:`recv`. Gradients come back on its other direction, which must not
            carry anything else meanwhile: a second Channel serves messages the other way.
        tree: as for :meth:`hpcomm.Channel.send`. Tensors that require a gradient get one, those for which the receiver
            finds none get None. They must not be written in place until the message has been received.

    Returns:
        A token: a 0-dim float32 zero. ``token.backward()``, or that of a sum with it, waits for the gradients of this
        message; the gradient of the token itself does not count. Without a tensor that requires a gradient, or under
        ``torch.no_grad()``, it has no graph, and the receiver sends nothing back.

    Raises:
        SchemaMismatch: in the backward, when the receiver's backwards run in another order than the sender's; or when
            the receiver refused this message, or one before it, and raised the same there.
        ProtocolError: likewise, for one that came damaged.
        InvalidArgument: in a backward through the backward (``create_graph=True``), which would need both ranks.
    """
    structure, tensors = _C.flatten(tree)
    if not torch.is_grad_enabled():
        tree = _C.unflatten(structure, [tensor.detach() for tensor in tensors])
    token: torch.Tensor = _Send.apply(channel, tree, *tensors)  # type: ignore[no-untyped-call]
    return token


def recv(channel: Channel) -> Any:
    """The next message of :func:`send`; the backward of its tensors sends their gradients back, None where one is.

    Every message that has a tensor with a gradient must take part in exactly one backward, or the sender waits: also
    one that was received under ``torch.no_grad()``, so evaluate under it on both ranks. ``torch.autograd.grad`` with
    respect to what was received sends nothing. Sparse gradients travel dense.

    After TimedOut or Ctrl-C the next call goes on with that message, as :meth:`hpcomm.Channel.recv` does.

    Raises:
        what :meth:`hpcomm.Channel.recv` raises.
    """
    number = channel._take_number("received")
    try:
        message = channel._receiver.take(number)
    except (SchemaMismatch, ProtocolError):
        raise  # that message is gone
    except BaseException:
        channel._give_back("received", number)
        raise
    structure, tensors = _C.flatten(message)
    # An input that requires a gradient makes the outputs do so; it gets none.
    anchor = torch.empty(0, requires_grad=True, device=tensors[0].device if tensors else None)
    outputs = _Recv.apply(channel, number, anchor, *tensors) if tensors else ()  # type: ignore[no-untyped-call]
    return _C.unflatten(structure, list(outputs))


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, tree: object, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.channel = channel
        ctx.number = channel._take_number("sent")
        try:
            channel._sender.send(tree, ctx.number)
        except BaseException:
            channel._give_back("sent", ctx.number)
            raise
        return torch.zeros((), device=tensors[0].device if tensors else None)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        answer = ctx.channel._receiver.take_answer(ctx.number, ctx.channel._sender)
        taken = [None if g is None else g.detach() for g in answer]
        if torch.is_grad_enabled():  # create_graph=True; once_differentiable takes what came for a constant
            taken = [None if g is None else _Last.apply(g.requires_grad_()) for g in taken]  # type: ignore[no-untyped-call]
        gradients = iter(taken)
        return None, None, *(next(gradients) if needed else None for needed in ctx.needs_input_grad[2:])


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
        wanted = [g for g, is_wanted in zip(gradients, ctx.wanted, strict=True) if is_wanted]  # type: ignore[attr-defined]
        wanted = [g.to_dense() if g is not None and g.layout != torch.strided else g for g in wanted]
        reached = [g is not None for g in wanted]
        if ctx.__dict__.setdefault("reached", reached) != reached:
            raise InvalidArgument(
                f"hpcomm.nn.recv: two backwards reached different tensors of message {ctx.number}; each sends a "  # type: ignore[attr-defined]
                "gradient back, and the sender's backward takes one. Add the losses, then run one backward"
            )
        ctx.channel._sender.send(wanted, ctx.number)  # type: ignore[attr-defined]
        return (None, None, None, *(None for _ in gradients))
