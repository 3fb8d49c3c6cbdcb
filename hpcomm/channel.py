"""Channel: ordered messages of many tensors between two ranks, both ways at once."""

from __future__ import annotations

import collections
import contextlib
import numbers
import operator
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcomm import _C
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import HpcommError, InvalidArgument, RankFailed, TimedOut

if TYPE_CHECKING:
    import torch

    from hpcomm._C import Communicator, Control, Receipt, RecvEdge, SendEdge, Work

    WireDtype = torch.dtype | Callable[[str, torch.Tensor], torch.dtype | None] | None

__all__: list[str] = []

SCHEMAS = ("per_message", "frozen")
SLOTS = 4


def require_schema(schema: str) -> bool:
    """Whether ``schema`` is "frozen"; raises InvalidArgument for anything unknown."""
    if schema not in SCHEMAS:
        raise InvalidArgument(f"schema={schema!r}: expected one of {SCHEMAS}")
    return schema == "frozen"


def require_wire_dtype(wire_dtype: WireDtype) -> None:
    """Raises InvalidArgument for a dtype that nothing is cast to; what a function says is seen at each message."""
    if wire_dtype is not None and not callable(wire_dtype):
        _C.require_wire_dtype(wire_dtype)


def whole_number(value: object) -> int | None:
    """``value`` as an int; None for what is no whole number."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _require_count(name: str, value: object, least: int, most: int) -> int:
    """``value`` as an int; raises InvalidArgument unless it is a whole number from ``least`` to ``most``."""
    count = whole_number(value)
    if count is None or not least <= count <= most:
        raise InvalidArgument(f"Channel: {name} is a whole number from {least} to {most}, not {value!r}")
    return count


def seconds(timeout: object) -> float:
    """``timeout`` as the native part takes it, below 0 for the communicator's own; InvalidArgument for no number."""
    if timeout is None:
        return -1.0
    if not isinstance(timeout, numbers.Real):
        raise InvalidArgument(f"timeout={timeout!r}: give seconds, or None for the communicator's own limit")
    return float(timeout)


class _End(NamedTuple):
    """Where a sending end is."""

    communicator: Communicator
    peer: int  # in the job


# Sending ends that were dropped with messages under way, which would end with their lanes.
_parting: dict[SendEdge, _End] = {}
# All others of this process.
_senders: weakref.WeakSet[Sender] = weakref.WeakSet()

# How long a message waits for a receiver that leaves as well: what it had asked for before may still come through.
LEAVING_GRACE = 1.0  # seconds
# And until it is known here what one that has left had taken.
_NEWS = 0.05  # seconds


def _part_with(edge: SendEdge, end: _End) -> None:
    edge.leave()
    if edge.is_under_way:
        _parting[edge] = end


def forget_parted(closed: Control | None = None) -> None:
    """Lets go of the ends whose messages have gone, and of those of a job that is over."""
    for edge, end in list(_parting.items()):
        if end.communicator.control is closed or not edge.is_under_way:
            _parting.pop(edge, None)


def let_go(control: Control, timeout: float) -> None:
    """Before this rank leaves the job in order: waits for messages that are under way, which would not come through.

    Until they have gone, their receivers have left, or the job has failed; ``timeout`` seconds at most. Every rank is
    told, not only the receivers: three ranks may each wait for the next one, which none of them hears from. A warning
    names those who leave without having taken what was sent to them.
    """
    ends = [*((sender._edge, sender._end) for sender in _senders), *_parting.items()]
    edges = {edge: end.peer for edge, end in ends if end.communicator.control is control}
    under_way = {edge: peer for edge, peer in edges.items() if edge.is_under_way}
    began = time.monotonic()
    leaving: dict[int, float] = {}  # peers that said so, and when
    left: dict[int, float] = {}  # peers that are gone, and since when
    try:
        for peer in range(control.size) if under_way else ():
            if peer != control.rank:
                with contextlib.suppress(RankFailed):  # it has left; there are others
                    control.send(peer, ControlChannel.LEAVING, b"")
        while under_way and time.monotonic() < began + timeout and control.failure() is None:
            time.sleep(1e-3)
            for peer in set(under_way.values()) - leaving.keys():
                with contextlib.suppress(TimedOut, RankFailed):
                    control.receive(peer, ControlChannel.LEAVING, 0.0)
                    leaving[peer] = time.monotonic()
            for edge, peer in list(under_way.items()):
                now = time.monotonic()
                if control.has_left(peer):
                    left.setdefault(peer, now)
                is_late = now > min(leaving.get(peer, now) + LEAVING_GRACE, left.get(peer, now) + _NEWS)
                if is_late or not edge.is_under_way:
                    del under_way[edge]
    except HpcommError:
        return  # the job has failed: this rank is free to go
    if control.failure() is None:
        _warn_of_untaken(control.rank, edges)


def _warn_of_untaken(rank: int, edges: Mapping[SendEdge, int]) -> None:
    untaken: collections.Counter[int] = collections.Counter()  # messages, by peer
    for edge, peer in edges.items():
        untaken[peer] += edge.untaken
    for peer, count in untaken.items():
        if count > 0:
            text = (
                f"rank {rank} leaves the job with {count} messages or more that rank {peer} has not received; "
                "they are lost. Those of hpcomm.nn may be gradients: does every token's backward run?"
            )
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            except (
                RuntimeWarning
            ):  # where warnings are errors; this rank has to leave all the same, or peers would wait
                print(text, file=sys.stderr)


class Sender:
    """The sending end of one edge; see :class:`Channel` for the arguments.

    Messages that it has issued go out also when it is dropped.
    """

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        *,
        schema: str = "per_message",
        wire_dtype: WireDtype = None,
        slots: int = SLOTS,
        slot_bytes: int = 0,
        max_bytes: int = 0,
        movable: bool = False,
        direct_from: int = 0,
    ) -> None:
        self._wire_dtype = wire_dtype
        require_wire_dtype(wire_dtype)
        self._edge: SendEdge = _C.SendEdge(
            communicator,
            peer,
            require_schema(schema),
            slots=slots,
            slot_bytes=slot_bytes,
            max_bytes=max_bytes,
            movable=movable,
            direct_from=direct_from,
        )
        self._end = _End(communicator, communicator.ranks[peer])
        forget_parted()
        _senders.add(self)
        weakref.finalize(self, _part_with, self._edge, self._end).atexit = False

    def send(self, tree: object, microbatch: int = -1, *, wire_dtype: WireDtype = None) -> Work:
        """Issues one message; see :meth:`Channel.send`."""
        return self._edge.send(tree, microbatch, self._wire_dtype if wire_dtype is None else wire_dtype)

    @property
    def untaken(self) -> int:
        """Messages that the receiver has not taken (on a GPU: 1 for any)."""
        return self._edge.untaken

    @property
    def slot_bytes(self) -> int:
        """Bytes of the buffers for packed messages that exist now."""
        return self._edge.slot_bytes


class Pending:
    """A message that was asked for."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._receipt.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The message. Raises what went wrong, or TimedOut after ``timeout`` seconds; None: the communicator's limit.

        Its memory is used again when its tensors and this Pending are gone; each call makes a tree of the same memory.
        """
        return self._receipt.wait(seconds(timeout))


class Receiver:
    """The receiving end of one edge; see :class:`Channel` for the arguments."""

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        *,
        schema: str = "per_message",
        slots: int = SLOTS,
        slot_bytes: int = 0,
        max_bytes: int = 0,
        movable: bool = False,
    ) -> None:
        self._edge: RecvEdge = _C.RecvEdge(
            communicator,
            peer,
            require_schema(schema),
            slots=slots,
            slot_bytes=slot_bytes,
            max_bytes=max_bytes,
            movable=movable,
        )

    def recv(self, microbatch: int = -1) -> Pending:
        """Issues the receipt of the next message; ``microbatch`` >= 0 is checked against its header."""
        return Pending(self._edge.recv(microbatch))

    def take(self, microbatch: int = -1) -> Any:
        """The next message: as ``recv(microbatch).wait()``, without a change of threads where nothing is before it."""
        return self._edge.take(microbatch)

    def take_answer(self, microbatch: int, sent: Sender) -> Any:
        """``take(microbatch)`` of what the peer answers to a message of ``sent``, unless it refused that."""
        return self._edge.take_answer(microbatch, sent._edge)

    def expect(self, tree: object) -> None:
        """From now on messages must be like ``tree``; see :meth:`Channel.expect`."""
        self._edge.expect(tree)

    @property
    def came(self) -> int:
        """The microbatch of the last message that came; -1 for one that has none."""
        return self._edge.came

    def missed(self, microbatch: int) -> bool:
        """Whether another message came to ``take(microbatch)``, which has ended this end."""
        return self._edge.missed == microbatch


def _connect(out: Communicator, back: Communicator, peer: int, *, sends_first: bool) -> None:
    """One byte each way, in the same order on both ends (collective over the two).

    NCCL connects two ranks in their first message of a communicator, a handshake in which the host waits until the peer
    has made the other half of that very message. Ends that both send before they receive would wait for ever.
    """
    if out.transport not in ("nccl", "emulated"):
        return
    import torch

    byte = torch.zeros(1, dtype=torch.uint8, device=out.device)
    for sends in (sends_first, not sends_first):
        if sends:
            out.send(byte, peer)
        else:
            back.recv(byte, peer)


def _lanes_between(communicator: Communicator, pair: list[int]) -> tuple[Communicator, Communicator]:
    """From the first rank of ``pair`` to the second, and back (collective over the two).

    Raises:
        TimedOut: the other one has not come.
    """
    try:
        return communicator.subgroup(pair, "up"), communicator.subgroup(pair, "down")
    except TimedOut as error:
        mine = communicator.ranks[communicator.rank]
        (theirs,) = {communicator.ranks[rank] for rank in pair} - {mine}
        raise TimedOut(
            f"Channel: rank {theirs} has not made its end of a channel with rank {mine} ({error}); both make it, "
            "and a rank that makes several does so in ascending order of their peers, or ranks in a circle wait "
            "for each other",
            rank=mine,
            peer=theirs,
        ) from error


class Channel:
    """Messages between this rank and ``peer``, in order in each direction.

    A message is any tree of dicts, OrderedDicts, lists, tuples, named tuples, dataclasses, None, numbers and strings
    around tensors of any shape (of up to 64 dimensions) and dtype (of whole bytes, not quantised) on the communicator's
    device. Parameters arrive as plain tensors; other classes derived from ``torch.Tensor`` are refused. Small tensors
    travel packed into one payload, tensors of ``direct_from`` bytes and more as they are; the structure goes ahead, and
    only when it changed.

    Args:
        communicator: a communicator that both ranks belong to, e.g. ``mesh.pp``.
        peer: the other rank, in that communicator.
        schema: "per_message" (structure and shapes may change) or "frozen" (fixed by the first message, its numbers and
            texts included; later ones carry no header, but where they have no elements, or on CPUs where one makes
            them faster); the same on both ranks.
        wire_dtype: what real floating point tensors are cast to on the way, and back on arrival: a dtype, or a function
            of a tensor's place (such as ``"message['h'][0]"``) and the tensor that returns a dtype or None. Rounded to
            nearest, ties to even; float64 to 8 and 16 bits by way of float32, as torch casts. Integers, bools, complex
            numbers and float8 other than e4m3fn and e5m2 are never cast.
        slots: buffers for packed messages, as many on both ends. On shared memory the receiver reads them in place, and
            a sender that is so many messages ahead waits, as it does with so many messages of which it has made copies
            (of large tensors that are no dense block).
        slot_bytes: size of the slots, if it is known: they are made here instead of when they are needed, and serve
            all messages up to it. A receiver on shared memory has none: it reads the sender's.
        max_bytes: the largest message as it travels, where each tensor takes a multiple of 64 bytes; 0 for 64 GiB. A
            larger one is refused before memory is taken.
        direct_from: bytes from which a tensor is not packed; 0 for what was measured (2 MB, over gloo 256 KB).

    Making a Channel is collective over the two ranks. A rank with several makes them in ascending order of their peers:
    in a ring, all would otherwise wait for the next one. Each direction has a lane of its own, so sending first on both
    sides is fine, whatever the size. Where a device runs one operation at a time, a message takes it when both ends are
    at it; a collective that stands between a send and a receipt on both sides then ends in TimedOut.

    Raises:
        InvalidArgument: no communicator, no such peer, an unknown schema, or a ``wire_dtype`` there is no cast to.
        TimedOut: the peer has not made its end.
    """

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        *,
        schema: str = "per_message",
        wire_dtype: WireDtype = None,
        slots: int = SLOTS,
        slot_bytes: int = 0,
        max_bytes: int = 0,
        direct_from: int = 0,
    ) -> None:
        self._is_frozen = require_schema(schema)
        require_wire_dtype(wire_dtype)
        if not isinstance(communicator, _C.Communicator):
            raise InvalidArgument(
                f"Channel: expected a communicator, such as mesh.pp, got {type(communicator).__name__}"
            )
        rank = communicator.rank
        other_rank = whole_number(peer)
        if other_rank is None or other_rank == rank or not 0 <= other_rank < communicator.size:
            raise InvalidArgument(f"Channel: rank {rank} of {communicator.size} has no peer {peer!r}")
        peer = other_rank
        slots = _require_count("slots", slots, 1, _C.SendEdge.MAX_SLOTS)
        max_bytes = _require_count("max_bytes", max_bytes, 0, 2**63 - 1)
        slot_bytes = _require_count("slot_bytes", slot_bytes, 0, max_bytes or _C.SendEdge.MAX_BYTES)
        direct_from = _require_count("direct_from", direct_from, 0, 2**63 - 1)
        pair = sorted((rank, peer))
        up, down = _lanes_between(communicator, pair)
        out, back = (up, down) if rank < peer else (down, up)
        other = pair.index(peer)
        self._sender = Sender(
            out,
            other,
            schema=schema,
            wire_dtype=wire_dtype,
            slots=slots,
            slot_bytes=slot_bytes,
            max_bytes=max_bytes,
            movable=True,
            direct_from=direct_from,
        )
        self._receiver = Receiver(
            back, other, schema=schema, slots=slots, slot_bytes=slot_bytes, max_bytes=max_bytes, movable=True
        )
        _connect(out, back, other, sends_first=rank < peer)
        # Straight to the edges: a call less is a twentieth of a small message.
        self._issue = self._sender._edge.send
        self._take = self._receiver._edge.take
        self._wire_dtype = wire_dtype
        # Of hpcomm.nn, by what is called: how many such calls have ended well, and the one that has not ended.
        self._numbers: dict[str, int] = {}
        self._calls: dict[str, object] = {}
        # The last to go when a channel is dropped, on both ends in one order: NCCL may wait for the peer to end each.
        self._lanes = (up, down)

    def _numbered(self, what: str, call: Callable[[int], Any]) -> tuple[int, Any]:
        """The number of the next call of ``hpcomm.nn.<what>``, and ``call(number)``; one that raises leaves the number.

        Raises:
            InvalidArgument: another call has not returned: its number may be taken, and its message not yet sent.
        """
        this = object()
        try:
            if self._calls.setdefault(what, this) is not this:
                raise InvalidArgument(
                    f"hpcomm.nn.{what}: a call on this channel has not returned, in another thread, or in this one, "
                    "where a signal's handler or wire_dtype calls again. They are numbered in order: one at a time"
                )
            number = self._numbers.get(what, 0)
            result = call(number)
            self._numbers[what] = number + 1
            return number, result
        finally:
            if self._calls.get(what) is this:
                del self._calls[what]

    def send(self, tree: object, *, wire_dtype: WireDtype = None) -> Work:
        """Issues ``tree`` and returns; its tensors must not be written before the Work has ended. It goes out also when
        the Work, or the channel, is dropped before, and the mesh is left only then.

        A message that has gone by then gives a Work that is the same for all such messages, with "ended" for its
        operation. What the receiver finds wrong with it, a later call raises.

        ``wire_dtype`` is for this message, instead of the channel's.

        Raises:
            InvalidArgument: something that cannot travel, with its place in the tree.
            SchemaMismatch: the schema is frozen and this message has another one; or the receiver refused an earlier
                message.
            TimedOut: there was no room for an earlier message within the communicator's limit; none can follow.
            PeerError: the receiver takes nothing more: its Channel was dropped, or its ``recv`` ended by Ctrl-C or a
                time-out.
            ProtocolError: an earlier message came to the receiver damaged.
        """
        return self._issue(tree, -1, self._wire_dtype if wire_dtype is None else wire_dtype)

    def recv(self, timeout: float | None = None) -> Any:
        """Waits for the next message. Its tensors live in a receive slot that is used again when they are gone.

        After TimedOut within a given ``timeout``, or Ctrl-C, the next call goes on with that message. But through
        shared memory and without a ``timeout``, where nothing else was waited for before, this call is the receiver
        itself: Ctrl-C ends that direction on this rank, whose next call raises Closed, unless the message had come.

        Raises:
            TimedOut: nothing came within ``timeout`` seconds. When None, or negative: within the communicator's own
                limit, and where nothing else was waited for before, the direction ends with it.
            SchemaMismatch: the message is not what :meth:`expect` said, or holds a class that this program has not; or
                the peer's channel has another ``schema``.
            ProtocolError: what came is no message of this edge.
            InvalidArgument: called by a signal's handler that interrupted a recv of this channel in the same thread; or
                a ``timeout`` that is no number.
            RankFailed, PeerError: the peer is gone, raised, or has dropped its Channel.
        """
        return self._take(-1) if timeout is None else self._take(-1, seconds(timeout))

    def irecv(self) -> Pending:
        """Asks for the next message without waiting. That message belongs to the Pending, and goes with it.

        It has the communicator's time-out, from this call on; when none has come by then, the direction ends.

        On a GPU only with ``schema="frozen"``, from the second message on: otherwise this waits for the message's
        header, by which its memory is chosen. Two ranks that both ask before they send wait for each other there.
        """
        return self._receiver.recv()

    def expect(self, tree: object) -> None:
        """From now on messages that come must be built like ``tree``.

        They must have its lists, tuples, dicts (with these keys, in this order) and classes, and in their places
        tensors of its dtypes and shapes, None, and numbers and strings of its types. ``tree`` may hold tensors of any
        device, ``meta`` included. Values do not count, nor does ``requires_grad``. Any other message is a
        SchemaMismatch on both ranks that names the first leaf which differs. With ``schema="frozen"`` the first message
        is compared, which the others are like; once it has come, ``tree`` is compared with it here and now.

        The sender hears of it in a later call. The direction carries nothing afterwards.
        """
        self._receiver.expect(tree)
