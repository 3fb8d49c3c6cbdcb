"""Which gradients there are on any rank: what one replica's samples do not reach (an expert, a branch that the data
choose) another's may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpcomm._C import Communicator, Work

__all__: list[str] = []


class Presence:
    """Finds out, once a step, which of some parameters have a gradient on any rank of ``lane``: one number for each,
    behind the gradients themselves. Only a rank that lacks one looks at the answer: no other host waits for it.
    """

    def __init__(self, lane: Communicator, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._lane = lane
        self._parameters = list(parameters)
        self._has = [True] * len(self._parameters)
        self._mine = torch.ones(len(self._parameters), dtype=torch.int32, device=lane.device)
        self._sent = self._mine
        self._anywhere = torch.empty_like(self._mine)
        self._work: Work | None = None

    def issue(self) -> None:
        """Issues the question (collective): no gradient of this step is to come any more."""
        has = [parameter.grad is not None for parameter in self._parameters]
        if has != self._has:
            self._has = has
            # Pinned, so that the host does not wait for a GPU's copy; kept, for that may run later.
            self._sent = torch.tensor(has, dtype=torch.int32, device="cpu", pin_memory=self._mine.device.type == "cuda")
            self._mine.copy_(self._sent, non_blocking=True)
        self._wait()  # nobody may have asked for the last answer
        self._anywhere.copy_(self._mine)
        self._work = self._lane.all_reduce(self._anywhere, "max", async_op=True)

    def granted(self) -> list[int]:
        """The parameters that lack a gradient here and have one on another rank. In a CUDA graph there is none: its
        host cannot decide anything.
        """
        on_gpu = self._mine.device.type == "cuda"
        if on_gpu:
            self._wait()  # in the order of streams
        if all(self._has) or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return []
        self._wait()
        answers = zip(self._has, self._anywhere.tolist(), strict=True)
        return [i for i, (here, anywhere) in enumerate(answers) if anywhere and not here]

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
