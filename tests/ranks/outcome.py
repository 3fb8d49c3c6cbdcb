"""How a rank ended, and how a failed run is told."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any


class RankError(Exception):
    """A run failed; the message has the first failing rank's traceback, then the others' last lines."""


@dataclass
class Outcome:
    """How one rank ended: exactly one of a value, an exception, a signal or an exit code without a value.

    ``seconds`` is the time from the start of the run to the exception, or without one to the end of the process.
    """

    rank: int
    value: Any = None
    exception: str = ""  # the name of the exception's type
    message: str = ""
    traceback: str = ""
    signal: int = 0
    exit_code: int = 0
    seconds: float = 0.0
    output: str = ""  # stdout and stderr
    killed: bool = False  # by the launcher, because another rank had failed

    @property
    def ok(self) -> bool:
        """The function returned and the process ended well."""
        return not (self.exception or self.signal or self.exit_code)

    def __str__(self) -> str:
        if self.killed:
            return "still running, killed by the launcher"
        if self.exception:
            return f"{self.exception}: {self.message}"
        if self.signal:
            return f"killed by {signal.Signals(self.signal).name}"
        if self.exit_code:
            return f"exited with code {self.exit_code}"
        return f"returned {self.value!r:.200}"


def report(outcomes: list[Outcome]) -> str:
    """The first failure in full, then one paragraph for every other rank."""
    failed = [outcome for outcome in outcomes if not outcome.ok and not outcome.killed]
    first = min(failed, key=lambda outcome: outcome.seconds)
    what = first.traceback or f"{first}, {first.seconds:.2f} s after the start\n"
    parts = [prefixed(first.rank, what), prefixed(first.rank, titled("its output:", first.output))]
    parts += [
        prefixed(outcome.rank, f"{outcome}\n{titled('its last lines:', tail(outcome.output))}")
        for outcome in outcomes
        if outcome is not first
    ]
    return "\n" + "\n".join(part for part in parts if part)


def prefixed(rank: int, text: str) -> str:
    """Every line of ``text`` with the rank before it."""
    return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines())


def titled(title: str, text: str) -> str:
    """``text`` under a title; nothing when there is no text."""
    return f"{title}\n{text}" if text.strip() else ""


def tail(text: str, lines: int = 20) -> str:
    """The last lines of a text."""
    return "\n".join(text.splitlines()[-lines:])
