"""Parameters and buffers of rank 0 on all ranks of a wrapper, over its lane: torch's own broadcast, over its group,
does not hear of a rank that is stopped, nor of Ctrl-C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hpcomm._C import Communicator

__all__: list[str] = []

_PIECE = 25 << 20  # bytes that are broadcast at once


def begin_equal(
    lane: Communicator, module: torch.nn.Module, ignored: Collection[str], options: Mapping[str, Any]
) -> bool:
    """All ranks start with the state of the first one, but for what is ``ignored`` (collective); False, with nothing
    done, where torch has to do it.

    Args:
        options: torch's of DistributedDataParallel.
    """
    buffers = options.get("forward_sync_buffers") is not None or options.get("broadcast_buffers") is not False
    states = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return broadcast_all(lane, [state for name, state in states if name not in ignored], 0)


def broadcast_all(lane: Communicator | None, tensors: Sequence[torch.Tensor], root: int) -> bool:
    """The values of rank ``root`` of ``lane`` on all of its ranks, in place (collective); False, with nothing done,
    where there is no lane, or a tensor is on another device, not dense, or a wrapper of others (DTensor).
    """
    if lane is None or any(
        t.device != torch.device(lane.device) or t.layout is not torch.strided or is_traceable_wrapper_subclass(t)
        for t in tensors
    ):
        return False
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors if lane.size > 1 else ():
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    with torch.no_grad():
        for alike in by_type.values():
            for few in _pieces(alike):
                dense = [tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in few]
                flat = dense[0].contiguous() if len(dense) == 1 else torch.cat(dense)
                lane.broadcast(flat.view(torch.uint8), root)
                if lane.rank != root and (len(dense) > 1 or flat.data_ptr() != few[0].data_ptr()):
                    parts = torch.split(flat, [tensor.numel() for tensor in few])
                    torch._foreach_copy_(few, [part.view(t.shape) for part, t in zip(parts, few, strict=True)])
    return True


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order, of 25 MB, or one tensor."""
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece
