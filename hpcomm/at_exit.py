"""What hpcomm does when Python ends: behind the exit handlers of the program, which may still communicate.

Handlers run in the reverse of their order, and a program registers its own after its imports: ``import hpcomm`` takes
the place at which everything of hpcomm runs, also what is registered with it later.
"""

from __future__ import annotations

import atexit

# Their own handlers are to run behind ours: logging's, which closes what an error is written to, and multiprocessing's,
# which waits for children that may wait for this process to leave.
import logging as _logging  # noqa: F401
import multiprocessing.util as _multiprocessing  # noqa: F401
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import TypeVar

__all__: list[str] = []

Step = TypeVar("Step", bound=Callable[[], object])

_steps: list[Callable[[], object]] = []


class _Place:
    """Lives as long as :func:`_run` is registered."""


def _take_place() -> weakref.ref[_Place]:
    place = _Place()
    atexit.register(_run, place)
    return weakref.ref(place)


def register(step: Step) -> Step:
    """As :func:`atexit.register`: what is registered last runs first."""
    if _places[-1]() is None:  # in children of multiprocessing, which forget what their parent has registered
        _places.append(_take_place())
    _steps.append(step)
    return step


def unregister(step: Callable[[], object]) -> None:
    """As :func:`atexit.unregister`."""
    _steps[:] = [other for other in _steps if other != step]


def _run(_: _Place) -> None:
    while _steps:
        _attempt(_steps.pop())


def _attempt(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # Ctrl-C as well: others are to run
        if sys.stderr is not None:
            traceback.print_exc()


_places = [_take_place()]
