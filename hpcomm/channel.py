"""Channel: ordered messages of many tensors between two ranks, both ways at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcomm import _C
from hpcomm.errors import InvalidArgument
from hpcomm.tree import flatten, unflatten

if TYPE_CHECKING:
    from hpcomm._C import Communicator, Receipt, RecvEdge, SendEdge, Work

__all__: list[str] = []

SCHEMAS = ("per_message", "frozen")


def require_schema(schema: str) -> bool:
    """Whether ``schema`` is "frozen"; raises InvalidArgument for anything unknown."""
    if schema not in SCHEMAS:
        raise InvalidArgument(f"schema={schema!r}: expected one of {SCHEMAS}")
    return schema == "frozen"


class Sender:
    """The sending end of one edge."""

    def __init__(self, communicator: Communicator, peer: int, *, schema: str = "per_message") -> None:
        self._edge: SendEdge = _C.SendEdge(communicator, peer, require_schema(schema))

    def send(self, tree: object, microbatch: int = -1) -> Work:
        """Issues one message; see :meth:`Channel.send`."""
        structure, tensors = flatten(tree)
        return self._edge.send(structure, tensors, microbatch)


class Pending:
    """A message that was asked for."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._receipt.done()

    def wait(self, timeout: float = -1.0) -> Any:
        """The message. Raises what went wrong, or TimedOut after ``timeout`` seconds."""
        structure, tensors = self._receipt.wait(timeout)
        return unflatten(structure, tensors)


class Receiver:
    """The receiving end of one edge."""

    def __init__(self, communicator: Communicator, peer: int, *, schema: str = "per_message") -> None:
        self._edge: RecvEdge = _C.RecvEdge(communicator, peer, require_schema(schema))

    def recv(self, microbatch: int = -1) -> Pending:
        """Issues the receipt of the next message; ``microbatch`` >= 0 is checked against its header."""
        return Pending(self._edge.recv(microbatch))


class Channel:
    """Messages between this rank and ``peer``, in order in each direction.

    A message is any tree of dicts, lists, tuples, None, numbers and strings around CPU tensors of any dtype and
    shape. It travels as one packed payload; its structure goes ahead, and only when it changed.

    Args:
        communicator: a communicator that both ranks belong to, e.g. ``mesh.pp``.
        peer: the other rank, in that communicator.
        schema: "per_message" (structure and shapes may change) or "frozen" (fixed by the first message; later ones
            carry no header).

    Making a Channel is collective over the two ranks. Each direction has a lane of its own, so sending first on both
    sides is fine.

    Raises:
        InvalidArgument: no such peer, or an unknown schema.
    """

    def __init__(self, communicator: Communicator, peer: int, *, schema: str = "per_message") -> None:
        require_schema(schema)
        rank = communicator.rank
        if peer == rank or not 0 <= peer < communicator.size:
            raise InvalidArgument(f"Channel: rank {rank} of {communicator.size} has no peer {peer}")
        pair = sorted((rank, peer))
        up, down = (communicator.subgroup(pair, lane) for lane in ("up", "down"))
        out, back = (up, down) if rank < peer else (down, up)
        other = pair.index(peer)
        self._sender = Sender(out, other, schema=schema)
        self._receiver = Receiver(back, other, schema=schema)

    def send(self, tree: object) -> Work:
        """Issues ``tree`` and returns; its tensors must not be written before the Work has ended.

        Raises:
            InvalidArgument: something that cannot travel, with its place in the tree.
            SchemaMismatch: the schema is frozen and this message has another one.
        """
        return self._sender.send(tree)

    def recv(self, timeout: float = -1.0) -> Any:
        """Waits for the next message. Its tensors live in a receive slot that is reused when they are gone.

        Raises:
            TimedOut: nothing came within ``timeout`` seconds (the communicator's own limit when negative).
            RankFailed, PeerError: the peer is gone or raised.
        """
        return self._receiver.recv().wait(timeout)

    def irecv(self) -> Pending:
        """Asks for the next message without waiting."""
        return self._receiver.recv()
