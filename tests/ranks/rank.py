"""What happens in a rank: it becomes a process as torchrun would have started it, calls the function, reports, ends."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import random
import reprlib
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ranks import supervisor, zygote

# Asks a rank for its Python stacks. A real-time signal: SIGUSR1 and 2 belong to the code under test.
STACK_SIGNAL = signal.SIGRTMIN + 5

_rank = -1
_control: socket.socket | None = None


def tell(value: Any) -> None:
    """In a rank: sends ``value`` (JSON) to the test, which reads it with :meth:`Job.told`. "I am in the loop now"."""
    if _control is None:
        raise RuntimeError("ranks.tell() is for functions that run in a rank")
    supervisor.send(_control, told=_rank, value=value)


def main(number: int, request: dict[str, Any], folder: Path, control: socket.socket, parent: int) -> NoReturn:
    """The life of a rank; the process ends in here."""
    global _rank, _control  # noqa: PLW0603 - one rank per process
    _rank, _control = number, control
    os.setpgid(0, 0)
    zygote.die_with(parent)
    _redirect(folder, number)
    result = _call(number, request)
    try:
        data = pickle.dumps(result)
    except Exception as error:
        result = _failure(error)
        data = pickle.dumps(result)
    # Complete or absent, never half: the rank may be killed at any moment.
    partial = folder / f"{number}.partial"
    partial.write_bytes(data)
    partial.rename(folder / f"{number}.result")
    if "exception" in result:
        supervisor.send(control, failed=number, time=result["time"])
    _end(1 if "exception" in result else 0, full=request["full_exit"])


def _redirect(folder: Path, number: int) -> None:
    out = os.open(folder / f"{number}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)  # a segfault tells where
    stacks = os.open(folder / f"{number}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)


def _call(number: int, request: dict[str, Any]) -> dict[str, Any]:
    """What the function returned, or how it failed."""
    os.environ.clear()
    os.environ.update(request["env"], RANK=str(number), LOCAL_RANK=str(number), ROLE_RANK=str(number))
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    # The hooks of a real program run, hpcomm's among them; the last one would print what we report anyhow.
    sys.excepthook = lambda *_: None
    try:
        _seed()
        fn, args = pickle.loads(request["call"])
        return {"value": fn(*args)}
    except BaseException as error:
        return _failure(error)


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _failure(error: BaseException) -> dict[str, Any]:
    when = time.monotonic()
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and trace:
        text += _locals(trace)
    sys.excepthook(type(error), error, trace)
    return {"exception": type(error).__name__, "message": str(error), "traceback": text, "time": when}


def _locals(trace: Any) -> str:
    """The variables where an assertion failed: pytest, which would show them, did not import this module."""
    while trace.tb_next:
        trace = trace.tb_next
    short = reprlib.Repr()
    short.maxother = short.maxstring = 300
    lines = [f"    {name} = {short.repr(value)}\n" for name, value in trace.tb_frame.f_locals.items()]
    return "  with\n" + "".join(lines) if lines else ""


def _end(code: int, *, full: bool) -> NoReturn:
    """Ends the process: threads are joined and exit handlers run.

    Only if ``full`` is the interpreter torn down, and what was there before the fork finalized.

    The teardown after `import torch` takes 0.3 s, more than all the rest of a short run.
    """
    if full:
        zygote.finalize_preloaded(at_exit=True)
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
