"""Which device a job communicates on."""

from __future__ import annotations

import os

import torch

from hpcomm import _C
from hpcomm.errors import InvalidArgument

__all__: list[str] = []


def pick_device(asked: str | torch.device | None) -> torch.device:
    """The device of this rank's tensors, with its index.

    Args:
        asked: "cpu"; "cuda" (the GPU of this process's ``LOCAL_RANK``; several ranks share one when there are fewer
            GPUs); "cuda:1"; None for ``HPCOMM_DEVICE``, and without that for the GPU of this rank where hpcomm was
            built with CUDA and every local rank has a GPU of its own, else the CPU.

    Raises:
        InvalidArgument: hpcomm was built without CUDA, there is no such GPU, or another kind of device was asked for.
    """
    wanted = asked if asked is not None else os.environ.get("HPCOMM_DEVICE", "")
    if wanted == "":
        wanted = "cuda" if _has_own_gpu() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise InvalidArgument(f"device={wanted!r}: {error}") from None
    if device.type == "cpu":
        if device.index:
            raise InvalidArgument(f"device={wanted!r}: there is one CPU device, 'cpu'")
        return torch.device("cpu")
    if device.type != "cuda":
        raise InvalidArgument(f"device={wanted!r}: hpcomm serves CPU and CUDA tensors")
    if not _C.built_with_cuda():
        raise InvalidArgument(
            f"device={wanted!r}: this copy of hpcomm was built without CUDA; "
            "build it with USE_CUDA=1 against a torch with CUDA"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise InvalidArgument(f"device={wanted!r}: torch sees no GPU here (torch.cuda.is_available() is False)")
    index = _local_rank() % count if device.index is None else device.index
    if index >= count:
        raise InvalidArgument(f"device={wanted!r}: torch sees {count} GPU{'s' if count > 1 else ''} here")
    return torch.device("cuda", index)


def _has_own_gpu() -> bool:
    if not _C.built_with_cuda() or not torch.cuda.is_available():
        return False
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
