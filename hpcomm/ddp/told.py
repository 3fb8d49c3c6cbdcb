"""What torch does over its own group names no rank when it fails: the lane's Control knows which one is gone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hpcomm.errors import HpcommError
from hpcomm.rendezvous import ask_once_more

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcomm._C import Communicator

__all__: list[str] = []


@contextlib.contextmanager
def told_by(lane: Communicator | None, what: str) -> Iterator[None]:
    """Torch's error of its own group inside names no rank: where one is gone, or has failed, the lane's Control does.

    Raises:
        RankFailed, PeerError: instead of that error.
    """
    try:
        yield
    except HpcommError:
        raise
    except RuntimeError as error:
        if lane is not None:
            try:
                ask_once_more(lane.control.check)
            except HpcommError as why:
                raise type(why)(f"{what}: {why}", rank=why.rank, peer=why.peer, operation=what) from error
        raise


class Told:
    """Torch's ``join()`` of a wrapper, whose end waits for the other ranks.

    Args:
        joined: what torch's returned.
        lane: of the wrapper.
    """

    def __init__(self, joined: Any, lane: Communicator | None) -> None:
        self._joined, self._lane = joined, lane

    def __enter__(self) -> Any:
        return self._joined.__enter__()

    def __exit__(self, *error: Any) -> Any:
        with told_by(self._lane, "join()"):
            return self._joined.__exit__(*error)
