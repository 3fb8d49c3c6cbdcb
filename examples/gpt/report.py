"""What the demo prints: a progress bar on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows step, loss, learning rate and tokens per second. Silent unless ``visible`` (rank 0)."""

    def __init__(self, steps: int, tokens_per_step: int, *, visible: bool, lines: int = 20) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._visible = visible
        self._every = max(1, steps // lines)
        self._since = (0, time.perf_counter())  # steps done and the time of the last line
        self._bar: Any = None
        if visible and sys.stdout.isatty():
            self._bar = _rich_bar()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, loss: float, learning_rate: float) -> None:
        """Call it after every step; ``done`` counts from 1."""
        if not self._visible:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"loss {loss:.3f}")
        if done % self._every and done not in (1, self._steps):
            return
        steps, then = self._since
        now = time.perf_counter()
        speed = (done - steps) * self._tokens_per_step / (now - then)
        self._since = (done, now)
        line = f"step {done:4d}/{self._steps}   loss {loss:.3f}   lr {learning_rate:.1e}   {speed:7,.0f} tokens/s"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def _rich_bar() -> Any:
    """A bar of rich, or None where rich is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    shown = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return Bar(*shown, TimeRemainingColumn())


def title(text: str) -> None:
    """The heading of one part of the output."""
    print(f"\n== {text}", flush=True)


def table(rows: dict[str, str]) -> None:
    """Names and values in two columns."""
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}   {value}", flush=True)
