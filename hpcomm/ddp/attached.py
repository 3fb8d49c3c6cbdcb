"""hpcomm's reduction as the communication hook of torch's reducer, under any DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpcomm import _C
from hpcomm.ddp.choice import choose_lane, has_sparse
from hpcomm.ddp.lane import backend_name, lane_over
from hpcomm.ddp.module import device_of
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []


def attach(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Puts hpcomm's reduction under an existing stock DDP object (collective over its group).

    As with any communication hook, ``join(divide_by_initial_world_size=False)`` divides by all ranks all the same.

    Raises:
        InvalidArgument: not a DDP object; its parameters are on several devices; sparse gradients, or of a dtype that
            hpcomm does not sum.
        RuntimeError: it has a communication hook already (torch's own error).
    """
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgument(f"attach() takes a DistributedDataParallel, got {type(ddp).__name__}")
    device = device_of(ddp)
    managed = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    without_lane = choose_lane(managed, has_sparse(ddp.module))
    if without_lane is not None:
        raise InvalidArgument(f"attach(): {without_lane.why}; leave it to torch's reducer")
    install(ddp, lane_over(ddp.process_group, device), backend_name(ddp.process_group, device))


def install(ddp: torch.nn.parallel.DistributedDataParallel, lane: Communicator, events: str) -> None:
    """The hook under torch's reducer as it is now; on one rank there is nothing to reduce."""
    if lane.size > 1:
        _C.register_ddp_hook(ddp.reducer, lane, events)
