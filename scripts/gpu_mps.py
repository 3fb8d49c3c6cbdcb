"""NVIDIA's Multi-Process Service, for as long as benchmarks run: processes that share a GPU run on it together.

Without it they take turns of about two milliseconds, and a rank that waits for another in a kernel holds the GPU until
its turn is over: what is measured then is turns. Nothing of the GPU's settings is changed; the control has folders of
its own, so another one that runs on this machine is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"
BESIDE = "/usr/local/nvidia/bin"  # where drivers of virtual machines put it
LIMIT = 20.0  # seconds for a call of it


def find() -> str:
    """The control program; empty where the driver came without it."""
    return shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), BESIDE])) or ""


@contextlib.contextmanager
def running(control: str) -> Iterator[dict[str, str]]:
    """Variables for the processes that are to share a GPU; none when the service does not start, which is said."""
    # In /tmp, whatever TMPDIR is: the name of a socket in it has a limit. The service may write to it to its end.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        try:
            why = start(control, environment)
            if why:
                print(f"\n== no MPS: {why}", file=sys.stderr, flush=True)
            yield {} if why else variables
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([control], input=b"quit -t 5\n", env=environment, check=False, timeout=LIMIT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def start(control: str, environment: dict[str, str]) -> str:
    """Why it did not; empty when it did."""
    try:
        subprocess.run([control, "-d"], env=environment, check=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""
