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
    """``process`` is the parent: as long as it is, its number is nobody else's."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != process:
            return
        time.sleep(0.05)
    try:
        print(f"process {process} has not ended {seconds:.0f} s after its last line; killing it\n{stacks(process)}",
              file=sys.stderr, flush=True)  # fmt: skip
    finally:
        if os.getppid() == process:
            os.kill(process, signal.SIGKILL)


def stacks(process: int) -> str:
    """Of its threads: by a debugger, or what the kernel says they wait in."""
    place = os.pathsep.join([os.environ.get("PATH", os.defpath), TOOLKIT])
    for debugger in filter(None, (shutil.which(name, path=place) for name in DEBUGGERS)):
        command = [debugger, "-p", str(process), "-batch", "-ex", "thread apply all bt 14"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
            if "#0" in done.stdout:
                return done.stdout
            print(f"{debugger}: {done.stderr.strip()[-300:]}", file=sys.stderr)
    with contextlib.suppress(OSError):
        return "\n".join(
            f"  {(task / 'comm').read_text().strip()}: waits in {(task / 'wchan').read_text().strip()}"
            for task in Path(f"/proc/{process}/task").iterdir()
        )
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
