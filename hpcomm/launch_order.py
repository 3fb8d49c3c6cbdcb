"""Asks NCCL to start kernels in the order of issue, before anything of this process can have called it.

NCCL reads NCCL_LAUNCH_ORDER_IMPLICIT once, in the first call of the process that needs it, whoever makes that: it may
be torch's. What is set later changes nothing, and NCCL does not say what it read. (From 2.31 on each communicator is
told, and this is not needed.)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__: list[str] = []

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"


def ask() -> bool:
    """Sets the variable, unless it is set; whether it says yes, and said so before the process could have used NCCL."""
    # Who has not initialised CUDA has no NCCL communicator.
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    unused = cuda is None or not cuda.is_initialized()
    asked = _says_yes(os.environ.setdefault(VARIABLE, "1"))
    return asked and (unused or _says_yes(_at_the_start()))


def _at_the_start() -> str:
    """The variable as the process was started with it: later changes do not show there."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    given = dict(entry.partition("=")[::2] for entry in text.split("\0"))
    return given.get(VARIABLE, "")


def _says_yes(value: str) -> bool:
    try:
        return int(value) != 0
    except ValueError:
        return False


IN_TIME = ask()  # read by the native module
