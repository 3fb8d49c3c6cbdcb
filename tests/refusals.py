"""Channels whose receiver refuses a message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hpcomm


def send_until_told(channel: hpcomm.Channel, tree: object, microbatch: int = -1) -> None:
    """What has left before the receiver looks at it is refused at a later one: raises what the receiver said."""
    for _ in range(2000):
        channel._sender.send(tree, microbatch).wait()
        time.sleep(0.01)
