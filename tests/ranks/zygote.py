"""The fork server: one process per pytest session that has imported torch and waits; forks a supervisor per run.

It must never have a second thread: a fork copies only the calling one, and a lock that another held stays locked for
ever. That is checked at every fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Imported before the first fork. torch._dynamo because the first optimizer imports it, a second in every rank;
# encodings.idna because the first name of a host does.
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "pytest", "hypothesis", "encodings.idna")

# A page as large as one entry of the page table's second level, on x86-64 and ARM; madvise(2), since Linux 6.1.
_LARGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25

_finalizers: list[weakref.finalize[..., Any]] = []


# --- In pytest --------------------------------------------------------------------------------------------------------


class _Client:
    """pytest's end: the zygote process and the socket to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        root = Path(__file__).resolve().parents[1]
        # One thread each for OpenMP and BLAS: their pools would be threads of the zygote.
        single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ranks.zygote", str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **single, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for pytest, which then closes us
        )
        theirs.close()
        self._expect(b"ready")

    def fork_supervisor(self, folder: Path, control: socket.socket) -> None:
        socket.send_fds(self.socket, [str(folder).encode()], [control.fileno()])
        self._expect(b"forked")

    def close(self) -> None:
        self.socket.close()  # the zygote leaves when it reads the end
        self.process.wait()
        self.errors.close()

    def _expect(self, word: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            if self.socket.recv(64) == word:
                return
        self.errors.seek(0)
        raise RuntimeError(f"the fork server of the test ranks died:\n{self.errors.read()}")


_client: _Client | None = None


def fork_supervisor(folder: Path, control: socket.socket) -> None:
    """Starts a run: its request is in ``folder``, ``control`` is the supervisor's end of the run's socket."""
    start_zygote()
    assert _client is not None
    _client.fork_supervisor(folder, control)


def start_zygote() -> None:
    """Starts the zygote unless it runs; takes as long as ``import torch``."""
    global _client  # noqa: PLW0603 - one per session by design
    if _client is None:
        _client = _Client()


def close_zygote() -> None:
    """Ends the zygote, at the end of the session."""
    global _client  # noqa: PLW0603
    if _client is not None:
        _client.close()
        _client = None


# --- In the zygote ----------------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """SIGKILL for this process when ``parent`` dies, also if it has died already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Processes whose parents die become children of this one, so that it can end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def finalize_preloaded(*, at_exit: bool) -> None:
    """Whether what is imported here is finalized at exit: torch takes back thousands of operators, one by one."""
    if not _finalizers:
        _finalizers.extend(one for one in weakref.finalize._registry if one.atexit)  # type: ignore[attr-defined]
    for finalizer in _finalizers:
        finalizer.atexit = at_exit


def checked_fork() -> int:
    """fork(), in a process that has one thread."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads at fork: something that the test ranks preload has started one")
    return os.fork()


def _preload() -> None:
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A native module that is not built fails in the rank that wants it, with its own message.
    with contextlib.suppress(ImportError):
        importlib.import_module("hpcomm._native").load()
        hpcomm = importlib.import_module("hpcomm")
        for name in hpcomm.__all__:
            getattr(hpcomm, name)
    # Children share these objects: a collection in one of them would copy every page.
    gc.collect()
    gc.freeze()
    finalize_preloaded(at_exit=False)
    _use_large_pages()


def _use_large_pages() -> None:
    """A fork copies the page table, an exit walks it: with large pages both are short. Does what the kernel can."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_ = line.split()
        if "w" in rights:
            first, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-first // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
                _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_LARGE_PAGE), _MADV_COLLAPSE)


def _serve(requests: socket.socket) -> None:
    from ranks import supervisor

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps our supervisors
    while True:
        message, files, _, _ = socket.recv_fds(requests, 4096, 1)
        if not message:
            return
        control = socket.socket(fileno=files[0])
        if checked_fork() == 0:
            requests.close()
            supervisor.main(Path(message.decode()), control)
            os._exit(0)
        control.close()
        requests.send(b"forked")


if __name__ == "__main__":
    # The module of this name and not __main__: ranks import it, too.
    from ranks import zygote  # noqa: PLW0406

    zygote.die_with(int(sys.argv[2]))
    zygote._preload()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    zygote._serve(connection)
