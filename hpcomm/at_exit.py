"""What hpcomm does when Python ends: behind the exit handlers of the program, which may still communicate.

Handlers run in the reverse of their order, and a program registers its own after its imports: ``import hpcomm`` takes
the place at which everything of hpcomm runs, also what is registered with it later.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

__all__: list[str] = []

Step = TypeVar("Step", bound=Callable[[], object])

_steps: list[Callable[[], object]] = []


def register(step: Step) -> Step:
    """As :func:`atexit.register`: what is registered last runs first."""
    _steps.append(step)
    return step


def unregister(step: Callable[[], object]) -> None:
    """As :func:`atexit.unregister`."""
    _steps[:] = [other for other in _steps if other != step]


@atexit.register
def _run() -> None:
    while _steps:
        _attempt(_steps.pop())


def _attempt(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:
        if sys.stderr is not None:
            traceback.print_exc()
