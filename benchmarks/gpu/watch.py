"""Waits for the end of a process; kills one that does not come to it, and says where it was.

    python benchmarks/gpu/watch.py PID SECONDS

It imports nothing of ours: it has to start at once, beside a process that is about to end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DEBUGGERS = ("gdb", "cuda-gdb")
TOOLKIT = "/usr/local/cuda/bin"


def main(process: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    parent = os.getppid()
    while time.monotonic() < end:
        if os.getppid() != parent or not is_alive(process):
            return
        time.sleep(0.05)
    print(f"process {process} has not ended {seconds:.0f} s after its last line; killing it\n{stacks(process)}",
          file=sys.stderr, flush=True)  # fmt: skip
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def stacks(process: int) -> str:
    """Of its threads: by a debugger, or what the kernel says they wait in."""
    place = os.pathsep.join([os.environ.get("PATH", os.defpath), TOOLKIT])
    debugger = next(filter(None, (shutil.which(name, path=place) for name in DEBUGGERS)), None)
    if debugger is not None:
        command = [debugger, "-p", str(process), "-batch", "-ex", "thread apply all bt 14"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    lines = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            lines.append(f"  {(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text().strip()}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
