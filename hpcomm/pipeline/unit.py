"""What losses and weights are counted in under a loss scale.

With it a backward starts from scale x weight x loss / unit, as large as one process's scale x mean, and overflows where
that does. The unit is part of the weights as well, so it does not change the result.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from hpcomm.control_channels import ControlChannel

if TYPE_CHECKING:
    from hpcomm.mesh import Mesh

__all__: list[str] = []


class Unit:
    """The sum of the weights of a global batch, agreed by the ranks of the last stage: backwards start there.

    Args:
        last: the place of that stage's ranks on the axis pp.
        of_two: the power of two next to it: a division by that is exact.
    """

    def __init__(self, mesh: Mesh, last: int, *, of_two: bool) -> None:
        self._control, self._timeout = mesh.control, mesh.timeout
        self._ranks = range(last * mesh.dp.size, (last + 1) * mesh.dp.size)
        self._of_two = of_two
        self._per_sample: float | None = None  # weight, in the last batch
        self.value = 1.0

    def agree(self, weight: float, first: int, samples: int) -> float:
        """From what this replica's weights will be (collective over those ranks): as much for a sample as in the last
        batch, or else in the first microbatch, which has ``weight`` and as many samples; the batch has ``samples``.
        """
        mine = [self._per_sample or (weight / first if weight > 0 else 1.0), samples]
        told = [mine]
        if len(self._ranks) > 1:
            body = json.dumps(mine).encode()
            told = list(map(json.loads, self._control.exchange(self._ranks, ControlChannel.UNIT, body, self._timeout)))
        # The first microbatch of the global batch is the same for every mesh.
        weights = sum((told[0] if self._of_two else each)[0] * each[1] for each in told)
        self.value = weights or 1.0
        if self._of_two:
            self.value = 2.0 ** round(math.log2(self.value))
        return self.value

    def note(self, weight: float, samples: int) -> None:
        """A batch of this replica has had so much weight."""
        if weight > 0 and samples > 0 and not self._of_two:
            self._per_sample = weight / samples
