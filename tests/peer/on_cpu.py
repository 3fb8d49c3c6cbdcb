"""Runs tests that ask for GPUs on the CPU: most DDP tests of the suite need no GPU, but are written for one.

After :func:`pretend` a program believes in GPUs; what it puts on one stays in host memory. Stock DDP is run the same
way, so that a test which cannot work like this fails for both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COUNT = 8


def pretend() -> None:
    """From now on, in this process and its forks."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: _COUNT
    cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "init", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    ddp = torch.nn.parallel.DistributedDataParallel
    construct = ddp.__init__

    @functools.wraps(construct)
    def without_devices(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        del device_ids, output_device  # torch refuses them for modules on the CPU
        construct(self, module, None, None, *args, **kw)

    ddp.__init__ = without_devices  # type: ignore[method-assign]
    _OnCpu().__enter__()


def _moved(value: Any) -> Any:
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )
    return torch.device("cpu") if is_gpu else value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("cpu")
        if func is torch._C._nn._parse_to:  # Module.to()
            args = tuple(torch.device("cpu") if type(value) is int else _moved(value) for value in args)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], torch.device("cpu"), *args[2:])
        args = tuple(_moved(value) for value in args) if func is torch.Tensor.to else args
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        return func(*args, **kwargs)
