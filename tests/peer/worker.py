"""Runs tests of the suite one after the other, each in a fork with a deadline; prints one line of JSON per test. A name
that the suite does not have is "absent".

python -m peer.worker BACKEND WORLD_SIZE SECONDS [TEST ...]
python -m peer.worker --list|--list-ddp WORLD_SIZE SECONDS
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from contextlib import suppress
from pathlib import Path

from peer.suite import load, with_ddp


def main() -> None:
    """The command."""
    backend, world_size, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    cases = load(backend, world_size)
    everything = unittest.defaultTestLoader.getTestCaseNames(cases)
    if backend.startswith("--list"):
        print("\n".join(with_ddp(cases) if backend == "--list-ddp" else everything))
        return
    names = sys.argv[4:] or everything
    for name in names:
        started = time.monotonic()
        outcome, detail = in_fork(cases, name, seconds) if name in everything else ("absent", "")
        line = {"test": name, "outcome": outcome, "detail": detail, "seconds": round(time.monotonic() - started, 2)}
        print(json.dumps(line), flush=True)


def in_fork(cases: type[unittest.TestCase], name: str, seconds: float) -> tuple[str, str]:
    """Outcome and detail of one test; its whole process group is killed at the deadline."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            with log.open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            tempfile.tempdir = folder  # the suite leaves its file stores behind
            report.write_text(json.dumps(run(cases, name)))
            os._exit(0)
        with suppress(OSError):
            os.setpgid(child, child)
        deadline = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hung", log.read_text(errors="replace")[-3000:]
            time.sleep(0.01)
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # ranks that the test left behind
        if not report.exists():
            return "failed", "the process of the test died\n" + log.read_text(errors="replace")[-3000:]
        outcome, detail = json.loads(report.read_text())
        if outcome == "failed":
            detail += log.read_text(errors="replace")[-6000:]
        return outcome, detail


def run(cases: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Runs one test here."""
    result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(cases(name))
    if result.errors or result.failures:
        return "failed", (result.errors + result.failures)[0][1][-3000:]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


if __name__ == "__main__":
    main()
