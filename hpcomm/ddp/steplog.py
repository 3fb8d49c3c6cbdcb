"""Times of steps under the names of torch's DDP log, taken as often as torch takes them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcomm._C import DdpReducer

__all__: list[str] = []

_ALWAYS = 10  # the first steps, which are all logged
_RATE = 100  # torch's: every so many steps later


class StepLog:
    """The log of one reducer."""

    def __init__(self, reducer: DdpReducer) -> None:
        self.rate = _RATE
        self.data: dict[str, int] = {}
        self._reducer = reducer
        self._forward = 0.0
        self._sums = dict.fromkeys(_times((0.0,) * 5, 0.0), 0)
        self._samples = 0

    def begin(self) -> None:
        """At the beginning of a forward: the step before it is over."""
        steps, *times = self._reducer.stats
        if steps > 0 and (steps < _ALWAYS or steps % self.rate == 0) and steps != self.data.get("iteration"):
            sample = _times(tuple(times), self._forward)
            self._samples += 1
            for name, value in sample.items():
                self._sums[name] += value
            averages = {f"avg_{name}": total // self._samples for name, total in self._sums.items()}
            self.data = {**sample, **averages, **_moments(tuple(times), self._forward), "iteration": steps}
        self._forward = time.monotonic()


def _times(seen: tuple[float, ...], forward: float) -> dict[str, int]:
    prepared, first_ready, first_issued, computed, finished = seen
    seconds = {
        "forward_compute_time": prepared - forward,
        "backward_compute_time": computed - first_ready,
        "backward_comm_time": finished - first_issued,
        "backward_compute_comm_overlap_time": computed - first_issued,
    }
    return {name: max(1, int(value * 1e9)) for name, value in seconds.items()}


def _moments(seen: tuple[float, ...], forward: float) -> dict[str, int]:
    _, first_ready, first_issued, computed, finished = seen
    seconds = {
        "forward_compute_time_start": forward,
        "backward_compute_time_start": first_ready,
        "backward_comm_time_start": first_issued,
        "backward_compute_time_end": computed,
        "backward_comm_time_end": finished,
    }
    return {name: int(value * 1e9) for name, value in seconds.items()}
