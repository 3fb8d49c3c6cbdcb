"""What is refused: messages, by their receiver; communication, in forked children."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import hpcomm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def send_until_told(channel: hpcomm.Channel, tree: object, microbatch: int = -1) -> None:
    """What has left before the receiver looks at it is refused at a later one: raises what the receiver said."""
    for _ in range(2000):
        channel._sender.send(tree, microbatch).wait()
        time.sleep(0.01)


def require_refused_in_children(calls: Sequence[Callable[[], object]]) -> None:
    """Each of ``calls``, in a forked child of its own, raises Closed that says so."""
    for number, call in enumerate(calls):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                call()
            except hpcomm.Closed as error:
                code = 0 if "forked child" in str(error) else 2
            except BaseException as error:  # noqa: BLE001 - a child must not go on as this test
                print(f"call {number}: {type(error).__name__}: {error}", flush=True)
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, number
