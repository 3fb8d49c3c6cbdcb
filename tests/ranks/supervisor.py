"""One process per run, between the zygote and the ranks: forks the ranks, reports their ends, leaves nothing behind.

It speaks JSON with pytest over one socket. To pytest: {"pids": [...]}, {"exit": rank, "status": n, "time": t}; the
ranks write to the same socket, {"failed": rank, "time": t} and {"told": rank, "value": ...}. From pytest:
{"signal": n, "rank": r}.
When pytest closes its end, or dies, every process that came out of this run is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from ranks import rank, zygote


def main(folder: Path, control: socket.socket) -> None:
    """The life of a supervisor."""
    os.setsid()
    zygote.adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # not ignored any more: we want the exit codes
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    request: dict[str, Any] = pickle.loads((folder / "request").read_bytes())
    ranks: dict[int, int] = {}  # pid -> rank, while it lives
    for number in range(request["world_size"]):
        parent = os.getpid()
        pid = zygote.checked_fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(wake_read)
            os.close(wake_write)
            rank.main(number, request, folder, control, parent)  # does not return
        with contextlib.suppress(OSError):  # the rank does it as well: whoever comes first
            os.setpgid(pid, pid)
        ranks[pid] = number
    try:
        send(control, pids=list(ranks))
        while ranks:
            readable, _, _ = select.select([control, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 512)
                _reap(ranks, control)
            if control in readable:
                message = control.recv(4096)
                if not message:
                    break
                order = json.loads(message)
                for pid, number in ranks.items():
                    if number == order["rank"]:
                        os.kill(pid, order["signal"])
    except ConnectionError:
        pass  # pytest is gone
    finally:
        _kill_all(ranks)


def send(control: socket.socket, **message: Any) -> None:
    """One message to pytest."""
    control.send(json.dumps(message).encode())


def _reap(ranks: dict[int, int], control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in ranks:  # else an orphan that a rank had started
            send(control, exit=ranks.pop(pid), status=status, time=time.monotonic())


def _kill_all(ranks: dict[int, int]) -> None:
    """Kills until there is no child: ranks, their process groups, and what we adopted while doing so."""
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid": the name may hold blanks and brackets of its own.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == me:
                    found.append(int(entry.name))
    return found
