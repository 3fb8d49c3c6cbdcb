"""Backwards until the one that reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel.distributed import _find_tensors

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    import weakref

    from torch.utils.hooks import RemovableHandle

__all__: list[str] = []


class Countdown:
    """Of ``reduce_on_last()``. A backward is seen when it reaches an output of its forward."""

    def __init__(self, backwards: int) -> None:
        self._backwards = backwards
        self._left = backwards
        self._last: int | None = None  # autograd's number of the backward that reduces
        self._closing: list[Callable[[], None]] = []

    def refuse_join(self, ddp: torch.nn.parallel.DistributedDataParallel, hook: weakref.ref[Any] | None) -> None:
        """Raises InvalidArgument inside ``join()``, where its ``hook`` is alive: torch leaves the rest behind."""
        if ddp._join_config.enable and hook is not None and hook() is not None:
            raise InvalidArgument(
                f"reduce_on_last({self._backwards}) in join(): ranks without inputs hear in each forward whether its "
                "backward reduces; use no_sync() for all but the last"
            )

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
            if self._is_last():
                ddp.require_forward_param_sync = True
                ddp.reducer.prepare_for_backward(kept)

        handles.extend(tensor.register_hook(reached) for tensor in tensors)
        self._closing.append(close)

    def _is_last(self) -> bool:
        backward = torch._C._current_graph_task_id()
        if self._left == 0 and backward != self._last:  # the last one may reach several forwards
            raise InvalidArgument(
                f"reduce_on_last({self._backwards}): this is one backward more, behind the one that reduced, and its "
                "gradients would stay this rank's"
            )
        if self._left == 0:
            return False
        self._left -= 1
        if self._left == 0:
            self._last = backward
        return self._left == 0

    def require_all(self) -> None:
        """Raises InvalidArgument where backwards are missing."""
        if self._left > 0:
            raise InvalidArgument(f"reduce_on_last({self._backwards}): {self._left} backwards are missing")

    def close(self) -> None:
        """Forgets forwards that got no backward."""
        for close in self._closing:
            close()
        self._closing.clear()
