"""Programs in ranks of the pool: forks of a process that has imported torch, which takes a new one two seconds.

Not for a test of how programs start: of what is read before or while torch is imported (OMP_NUM_THREADS, malloc's
variables), of torchrun, or of the last moments of an interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def with_environment(environment: Mapping[str, str], fn: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``fn`` with these variables and no others, of torchrun's least of all."""
    os.environ.clear()
    os.environ.update(environment)
    return fn(*arguments)


def as_module(name: str, arguments: Sequence[str] = ()) -> int:
    """``python -m NAME ARGUMENTS``; its exit code."""
    sys.argv = [name, *arguments]
    return _exit_code(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def as_script(path: Path, arguments: Sequence[str] = ()) -> int:
    """``python PATH ARGUMENTS``; its exit code."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    return _exit_code(lambda: runpy.run_path(str(path), run_name="__main__"))


def _exit_code(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0
