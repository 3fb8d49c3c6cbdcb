"""The name of a group on the backend ``hpcomm``: what ``group.name()`` says, and DDP's logging data.

c10d's own ProcessGroup says "custom" for every plugin. From a plugin that returns a ProcessGroup torch takes that in
place of its own, and leaves to it what it would do otherwise: the backends of other devices, the bound device, the
checks of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from hpcomm import _C

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Backend

__all__: list[str] = []

_HELPER = "_new_process_group_helper"


def in_named_group(backend: Backend, name: str, options: Any, caller: FrameType) -> Backend | dist.ProcessGroup:
    """A group called ``name`` with ``backend`` for all its devices; ``backend`` itself where torch has more to do.

    torch does not tell a plugin whether the program asked for other backends beside it ("cpu:hpcomm,cuda:nccl"), nor
    for which device. Both are arguments of torch's function that calls us, by the same names from 2.11 to 2.15: they
    are read there and nothing is changed. Where they cannot be read, torch makes the group, and it is called "custom".

    Args:
        backend: serves all devices that it is registered for.
        name: under which it is registered.
        options: torch's ``_DistributedBackendOptions``.
        caller: the frame of torch's function.
    """
    arguments = caller.f_locals if caller.f_code.co_name == _HELPER else {}
    if arguments.get("backend") != name or "device_id" not in arguments:
        return backend
    if get_debug_level() == DebugLevel.DETAIL:  # torch wraps a Backend, and no ProcessGroup
        return backend
    store = options.store.underlying_store  # without the prefix of the first device
    group = _C.named_group(store, options.group_rank, options.group_size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    if arguments["device_id"]:
        group.bound_device_id = arguments["device_id"]
    for device in dist.Backend.backend_capability[name]:
        group._register_backend(torch.device(device), custom, backend)
    return group
