"""An optimizer whose state is divided by the ranks (ZeRO stage 1): each steps its slice of every bucket.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.ddp.native import NativeReducer

__all__: list[str] = []

_LINE = 64  # bytes


class ShardedParameters:
    """The parameters of a wrapper, moved into memory with the places of their gradient buckets.

    Rank r owns part r of each bucket. Where a parameter crosses the border of two parts, each rank has a piece of it.
    """

    def __init__(self, lane: Communicator, reducer: NativeReducer, parameters: list[torch.nn.Parameter]) -> None:
        self._lane = lane
        self._reducer = reducer
        self._flats: list[torch.Tensor] = []
        # Parameter -> the rank's piece of it: a leaf of one dimension, its bucket, and where it lies there.
        self._pieces: dict[int, list[tuple[torch.nn.Parameter, int, int]]] = {id(p): [] for p in parameters}
        for bucket, members in enumerate(reducer.plan.buckets):
            self._move(bucket, [parameters[index] for index in members])

    def _move(self, bucket: int, members: list[torch.nn.Parameter]) -> None:
        dtype = members[0].dtype
        size = dtype.itemsize
        # As the reducer pads: to equal parts on cache lines.
        grain = _LINE * self._lane.size
        count = -(-self._reducer.plan.bytes[bucket] // grain) * grain // size
        flat = self._lane.allocate([count], dtype).zero_()
        self._flats.append(flat)
        each = count // self._lane.size
        begin, end = self._lane.rank * each, (self._lane.rank + 1) * each
        for parameter, offset in zip(members, _C.Layout(members).offsets, strict=True):
            place = offset // size
            view = flat.as_strided(parameter.shape, parameter.stride(), place)
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view
            first, last = max(place, begin), min(place + parameter.numel(), end)
            if first < last:
                piece = torch.nn.Parameter(flat[first:last])
                self._pieces[id(parameter)].append((piece, bucket, first))

    def make(
        self, optimizer: type[torch.optim.Optimizer], parameters: Iterable[Any], **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer over this rank's pieces of ``parameters``, which may be groups as torch's optimizers take them.

        Its ``step()`` is collective: it takes the reduced gradients, and gathers the parameters afterwards.
        """
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        mine: list[tuple[torch.nn.Parameter, int, int]] = []
        sharded = []
        for group in groups:
            members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            for parameter in members:
                if id(parameter) not in self._pieces:
                    raise InvalidArgument("a sharded optimizer steps parameters of its wrapper that require a gradient")
            pieces = [piece for parameter in members for piece in self._pieces[id(parameter)]]
            mine += pieces
            sharded.append({**group, "params": [piece for piece, _, _ in pieces]})
        # Torch refuses an optimizer without parameters; a rank of a small model may own nothing.
        nothing: list[Any] = [torch.nn.Parameter(torch.zeros(0))]
        made = optimizer([group for group in sharded if group["params"]] or nothing, **options)
        made.register_step_pre_hook(lambda *_: self._give_gradients(mine))
        made.register_step_post_hook(lambda *_: self._gather(mine))
        return made

    def _give_gradients(self, pieces: list[tuple[torch.nn.Parameter, int, int]]) -> None:
        for piece, bucket, first in pieces:
            gradients = self._reducer.gradients_of(bucket)
            piece.grad = None if gradients is None else gradients[first : first + piece.numel()]

    def _gather(self, pieces: list[tuple[torch.nn.Parameter, int, int]]) -> None:
        for piece, _, _ in pieces:
            piece.grad = None  # so that nobody holds the bucket in the next step
        for flat in self._flats:
            each = flat.numel() // self._lane.size
            begin = self._lane.rank * each
            self._lane.all_gather(flat, flat[begin : begin + each])
