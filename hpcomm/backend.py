"""The torch.distributed backend ``hpcomm``: ``dist.init_process_group("hpcomm")`` after ``import hpcomm``.

Registered by ``import hpcomm``, which imports neither torch nor the native module for it: :func:`register_with_torch`
waits for the program to import ``torch.distributed``, and the first group brings in the rest.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch._C._distributed_c10d import Backend, ProcessGroup

__all__: list[str] = []

NAME = "hpcomm"
_HOME = "torch.distributed.distributed_c10d"


def create(options: Any, backend_options: Any = None) -> Backend | ProcessGroup:
    """What torch calls on every member of a new group; collective over them.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: ``pg_options`` of the caller; there are none.

    Raises:
        InvalidArgument: ``HPCOMM_CPU_TRANSPORT`` asks for what these ranks cannot do.
        SchemaMismatch: ranks have different environments.
        TimedOut, RankFailed: a rank did not come.
    """
    from hpcomm.job import create_group
    from hpcomm.named_group import in_named_group

    return in_named_group(create_group(options), NAME, options, sys._getframe(1))


def register_with_torch() -> None:
    """Registers the backend now, or as soon as the program has imported ``torch.distributed``."""
    home = sys.modules.get(_HOME)
    if home is not None and hasattr(home, "Backend"):
        _register(home)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(home: ModuleType) -> None:
    if not hasattr(home, "ProcessGroup"):  # a torch without distributed
        return
    if NAME.upper() not in home.Backend._plugins:
        # A torch that has no such tensors asks that device for its current one wherever a backend is registered for it.
        version = home.torch.version
        devices = ["cpu", "cuda"] if version.cuda or version.hip else ["cpu"]
        home.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch.distributed's own module like everybody else, and registers when it has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect and torch.compile read its source through it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)
