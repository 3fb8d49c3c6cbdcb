"""Where the ranks of a wrapper find out before the first step whether they have alike what must be alike."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hpcomm.communicator import disagreement
from hpcomm.ddp.choice import Under
from hpcomm.ddp.lane import hear
from hpcomm.errors import HpcommError, SchemaMismatch
from hpcomm.seats import Seat, is_crowded, seat

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []

_PATIENCE = 5.0  # seconds for a rank that has not come as far, where ranks disagree


class Meeting:
    """What the ranks of a wrapper must have alike, and who lacks a core: told when the reducer is chosen, heard at the
    first reduction. In between nobody waits, as the first forwards of several wrappers may come in another order on
    another rank.

    A rank with torch's reducer may have told of hpcomm's before, when it had run a forward and no backward; with
    hpcomm's it never told of torch's. So hpcomm's reducer refuses what differs as soon as it has heard it, and says so
    to the others; and torch's refuses a rank that has said so.

    Args:
        channel: of the wrapper.
        lines: the reducer, and what :func:`agree_among` would compare.
        lacks_core: the lane of this rank has no core of its own.
    """

    def __init__(self, lane: Communicator, channel: int, lines: Sequence[str], lacks_core: bool) -> None:
        self._lane = lane
        self._channel = channel
        self._mine = json.dumps([list(lines), core(lacks_core), False]).encode()
        self._told = {lane.ranks[lane.rank]: self._mine}
        for peer in lane.ranks:
            if peer not in self._told:
                with contextlib.suppress(HpcommError):  # one that has left: a forward does not need it, hear() does
                    lane.control.send(peer, channel, self._mine)

    def hear(self) -> bool:
        """Whether nobody has a core left.

        Raises:
            SchemaMismatch: on every rank, and again when it is called again.
        """
        lane = self._lane
        hear(lane, self._channel, lane.ranks, self._told)  # after a Ctrl-C it goes on
        found = self._difference()
        if found is not None:
            mine = self._lines_of(lane.ranks[lane.rank])[0]
            hearing = [rank for rank in lane.ranks if self._lines_of(rank)[0] == mine]
            self._refuse(rank for rank in lane.ranks if rank not in hearing)
            with contextlib.suppress(HpcommError):  # nobody leaves before everybody knows, see agree()
                lane.control.exchange(hearing, self._channel, b"", min(lane.timeout, _PATIENCE))
            raise found
        return nobody_has_a_core_left([json.loads(self._told[peer])[1] for peer in lane.ranks])

    def hear_others(self, timeout: float) -> bool:
        """Where torch's reducer works: whether all ranks have said that it works there as well.

        Args:
            timeout: seconds, for each of them; 0 takes what has come already.

        Raises:
            SchemaMismatch: a rank with hpcomm's reducer has refused this one.
            HpcommError: with a ``timeout``; somebody has said nothing.
        """
        for peer in self._lane.ranks:
            # One with hpcomm's says more: that it has torch's now, or that it refuses.
            while peer not in self._told or (self._has_native(peer) and not self._has_refused(peer)):
                body = self._receive(peer, timeout)
                if body is None:
                    break
                self._told[peer] = body
        found = self._difference()
        if found is not None and any(map(self._has_refused, self._told)):
            raise found
        return len(self._told) == len(self._lane.ranks) and not any(map(self._has_native, self._told))

    def _receive(self, peer: int, timeout: float) -> bytes | None:
        try:
            return self._lane.control.receive(peer, self._channel, timeout)
        except HpcommError:
            if timeout > 0:
                raise
            return None  # nothing yet, or nothing more

    def _lines_of(self, rank: int) -> list[str]:
        lines: list[str] = json.loads(self._told[rank])[0]
        return lines

    def _has_native(self, rank: int) -> bool:
        return self._lines_of(rank)[0] == Under.NATIVE.value

    def _has_refused(self, rank: int) -> bool:
        return bool(json.loads(self._told[rank])[2])

    def _difference(self) -> SchemaMismatch | None:
        known = [rank for rank in self._lane.ranks if rank in self._told]
        lines = [self._lines_of(rank) for rank in known]
        return disagreement("gradient reduction", known, lines, self._lane.control.rank)

    def _refuse(self, ranks: Iterable[int]) -> None:
        lines, its_core, _ = json.loads(self._mine)
        for peer in ranks:
            with contextlib.suppress(HpcommError):
                self._lane.control.send(peer, self._channel, json.dumps([lines, its_core, True]).encode())


def core(lacks_core: bool) -> tuple[bool, Seat]:
    """What a rank says of its cores."""
    return lacks_core, seat()


def nobody_has_a_core_left(told: Sequence[tuple[bool, Seat]]) -> bool:
    """Whether all ranks of a lane, which share a host, lack cores, and have none that only others may use."""
    return all(lacks for lacks, _ in told) and is_crowded([its for _, its in told])


class Attendance:
    """Of a rank with torch's reducer at its meeting, until it knows that all have torch's: it looks in forwards, and
    waits before the first gradient of a backward that is reduced.

    Args:
        parameters: of torch's reducer. Their hooks do not keep this, and end with it.
        timeout: seconds, for each other rank.
    """

    def __init__(self, meeting: Meeting, parameters: Iterable[torch.nn.Parameter], timeout: float) -> None:
        self._meeting: Meeting | None = meeting
        self._timeout = timeout
        self._reduces = False  # the backward of the last forward
        self._hooks = []
        if torch._dynamo.config.compiled_autograd:  # which would trace hooks
            return
        alive = weakref.ref(self)

        def before_the_first(_: torch.Tensor) -> None:
            if (myself := alive()) is not None:
                myself._wait()

        self._hooks = [
            parameter.register_post_accumulate_grad_hook(before_the_first)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad  # else it has no place for a hook, and no gradient
        ]

    def __del__(self) -> None:
        self._end()

    @property
    def is_over(self) -> bool:
        return self._meeting is None

    def look(self, reduces: bool) -> None:
        """In a forward, whose backward ``reduces``. Raises SchemaMismatch as :meth:`Meeting.hear_others`."""
        self._reduces = reduces
        if self._meeting is not None and self._meeting.hear_others(0.0):
            self._end()

    def _wait(self) -> None:
        if self._meeting is not None and self._reduces:
            self._meeting.hear_others(self._timeout)
            self._end()

    def _end(self) -> None:
        self._meeting = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
