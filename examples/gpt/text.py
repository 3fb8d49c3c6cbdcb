"""Text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT_EVERY = 10  # one file in ten is never trained on


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes that are held out, both 1-dim uint8."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int


def load() -> Text:
    """The top-level modules of the standard library, in the order of their names.

    Raises:
        SystemExit: this Python came without its source files.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(files) < HELD_OUT_EVERY:
        raise SystemExit("this Python's standard library has no source files to train on")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for i, file in enumerate(files):
        parts[i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(parts[out])), dtype=torch.uint8) for out in (False, True))
    return Text(train, held_out, len(files))


@dataclass(frozen=True)
class Sampler:
    """Draws the rows of one replica out of a global batch that depends on ``seed`` and the step alone.

    So every mesh trains on the same global batches, however many replicas share them.
    """

    text: torch.Tensor
    context: int
    batch_size: int  # of the global batch
    seed: int
    replica: int
    replicas: int

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of this replica, both (rows, context) int64; the target is the byte after each input."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.context, (self.batch_size,), generator=random)
        mine = starts[self.replica :: self.replicas]
        rows = self.text[mine[:, None] + torch.arange(self.context + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
