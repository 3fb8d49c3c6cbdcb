"""Backwards until the one that reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.parallel.distributed import _find_tensors

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

__all__: list[str] = []


class Countdown:
    """Of ``reduce_on_last()``. A backward is seen when it reaches an output of its forward."""

    def __init__(self, backwards: int) -> None:
        self.left = backwards
        self._closing: list[Callable[[], None]] = []

    def watch(self, ddp: torch.nn.parallel.DistributedDataParallel, output: Any) -> None:
        """Counts the backward of a forward that gave ``output``."""
        tensors = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]  # type: ignore[no-untyped-call]
        # What holds outputs hangs at their own graph, a circle that no collection finds: it is cut when it is done.
        outputs = list(tensors) if ddp.find_unused_parameters else []
        handles: list[RemovableHandle] = []

        def close() -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            outputs.clear()

        def reached(_: torch.Tensor) -> None:
            if not handles:  # another output of the same forward
                return
            kept = list(outputs)
            close()
            self.left -= 1
            if self.left == 0:
                ddp.require_forward_param_sync = True
                ddp.reducer.prepare_for_backward(kept)

        handles.extend(tensor.register_hook(reached) for tensor in tensors)
        self._closing.append(close)

    def close(self) -> None:
        """Forgets forwards that got no backward."""
        for close in self._closing:
            close()
        self._closing.clear()
