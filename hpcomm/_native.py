"""Loads the native module hpcomm._C, or says in one message why it cannot and what to do."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


@functools.cache
def load() -> ModuleType:
    """The native module; loaded at the first call, so that `import hpcomm` stays free of work.

    Raises:
        ImportError: torch is missing, the extension is not built, or built for another torch or of other sources.
    """
    import torch  # before _C: brings libtorch into the process, and its version is what we compare

    # Compared before loading: c10d's vtables change between minor versions, and a wrong one crashes later, elsewhere.
    try:
        from hpcomm import _build
    except ImportError:
        raise ImportError(_not_built()) from None
    problem = _mismatch(_build.TORCH_VERSION, _build.TORCH_CUDA, str(torch.__version__), torch.version.cuda or "")
    if problem:
        raise ImportError(f"{problem}\nRebuild it:\n\n    {_rebuild_command()}\n")
    try:
        return importlib.import_module("hpcomm._C")
    except ModuleNotFoundError as error:
        if error.name != "hpcomm._C":
            raise
        raise ImportError(_not_built(_build.PYTHON)) from None
    except ImportError as error:
        raise ImportError(
            f"hpcomm's native module does not load: {error}. If its Python files are newer than it is, build it again: "
            f"`make build` in a source tree; elsewhere:\n\n    {_rebuild_command()}\n"
        ) from error


def _mismatch(built: str, built_cuda: str, installed: str, installed_cuda: str) -> str:
    """Why a module built for one torch must not be loaded under another; empty when it may be.

    Patch releases keep the ABI. A CPU build is fine under a CUDA torch (it sees libtorch_cpu only), not the reverse.
    """
    if _minor(built) != _minor(installed):
        return f"hpcomm was built for torch {built}, but torch {installed} is installed."
    if built_cuda and built_cuda.split(".", maxsplit=1)[0] != installed_cuda.split(".", maxsplit=1)[0]:
        found = f"CUDA {installed_cuda}" if installed_cuda else "no CUDA"
        return f"hpcomm was built for torch {built} with CUDA {built_cuda}, but torch {installed} has {found}."
    return ""


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu" and of "2.13.0a0+git1234"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _source() -> Path | None:
    """The source tree of an editable install."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "CMakeLists.txt").exists() else None


def _rebuild_command() -> str:
    return f"pip install --no-build-isolation --force-reinstall --no-deps {_source() or '.'}"


def _not_built(built_for: str = "") -> str:
    tag = sys.implementation.cache_tag
    if built_for and built_for != tag:
        why = f"hpcomm's native module was built for Python {built_for}, but this is {tag}."
    else:
        why = "hpcomm's native module is not built."
    return f"{why} In a source tree run `make build`; elsewhere:\n\n    {_rebuild_command()}\n"
