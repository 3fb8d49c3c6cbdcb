"""The operations that benchmarks.collectives times: sizes, bandwidth factors, the bytes they must move, and checks.

Sizes and factors are those of nccl-tests (its doc/PERFORMANCE.md and src/*.cu), for n ranks and a time t:

    size    all_reduce, broadcast, sendrecv: the buffer. all_gather, reduce_scatter, all_to_all: the larger buffer of a
            rank, n parts of ``count`` elements.
    algbw   size / t
    busbw   algbw times 2(n-1)/n for all_reduce; (n-1)/n for reduce_scatter, all_gather and all_to_all; 1 for broadcast
            and sendrecv

``sendrecv`` is theirs as well: every rank sends to the next one and receives from the one before. ``pingpong`` is not
in nccl-tests: ranks 2i and 2i+1 send one message there and back; its time is half of that.

All_reduce and broadcast work in place, the others from one buffer to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Names as nccl-tests prints them.
DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
REDOPS = ("sum", "prod", "min", "max", "avg")

# Integers up to this one are exact, and so are their sums below it.
_EXACT = {
    torch.int8: 127,
    torch.uint8: 255,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}
_MANY = 113  # values of a message; a prime, so that patterns of different ranks differ almost everywhere
_UNTOUCHED = 120  # in outputs before a check: no pattern has it
_ALIGNMENT = 16  # bytes; parts start at multiples, as in nccl-tests


@dataclass(frozen=True)
class Operation:
    """One line of the table's first columns."""

    name: str
    bus_factor: Callable[[int], float]
    # What each of n ranks must read and write at least, in units of size, when every rank can reach all buffers and the
    # work is spread evenly. None: not every rank works all the time.
    reads: Callable[[int], float] | None
    writes: Callable[[int], float] | None
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False
    parts: bool = False  # size counts n parts
    transfers: int = 1  # one after the other, in one iteration


@dataclass(frozen=True)
class Buffers:
    """What one rank passes; ``output`` is ``input`` for operations in place."""

    input: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One operation at one size, as rank ``rank`` of ``ranks`` sees it."""

    operation: Operation
    count: int  # elements: of a part if the operation has parts
    dtype: torch.dtype
    redop: str
    root: int
    rank: int
    ranks: int

    @property
    def size(self) -> int:
        """Bytes, as nccl-tests counts them."""
        return self.count * (self.ranks if self.operation.parts else 1) * self.dtype.itemsize

    @property
    def input_length(self) -> int:
        return self.count * (self.ranks if self.operation.name in ("reduce_scatter", "all_to_all") else 1)

    @property
    def output_length(self) -> int:
        return self.count * (self.ranks if self.operation.name in ("all_gather", "all_to_all") else 1)

    @property
    def partner(self) -> int | None:
        """The other end of a pingpong; None for the last of an odd number of ranks."""
        partner = self.rank ^ 1
        return partner if partner < self.ranks else None

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.ranks

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.ranks

    def buffers(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> Buffers:
        """Zeroed buffers: a sum in place that is repeated stays finite."""
        output = empty(self.output_length, self.dtype).zero_()
        if self.operation.in_place:
            return Buffers(output, output)
        return Buffers(empty(self.input_length, self.dtype).zero_(), output)

    def fill(self, buffers: Buffers, salt: int) -> None:
        """Puts values that encode this rank into the input."""
        buffers.output.fill_(_UNTOUCHED)
        buffers.input.copy_(self._values(self.rank, 0, self.input_length, salt))

    def expected(self, salt: int) -> torch.Tensor:
        """What must be in the output of this rank."""
        match self.operation.name:
            case "all_reduce":
                return self._reduced(0, salt)
            case "reduce_scatter":
                return self._reduced(self.rank * self.count, salt)
            case "all_gather":
                return torch.cat([self._values(r, 0, self.count, salt) for r in range(self.ranks)])
            case "all_to_all":
                start = self.rank * self.count
                return torch.cat([self._values(r, start, self.count, salt) for r in range(self.ranks)])
            case "broadcast":
                return self._values(self.root, 0, self.count, salt)
            case "sendrecv":
                return self._values(self.previous, 0, self.count, salt)
        if self.partner is None:
            return torch.full((self.count,), _UNTOUCHED, dtype=self.dtype)
        return self._values(self.partner, 0, self.count, salt)

    def limit_bytes(self) -> float | None:
        """Bytes that a perfect algorithm reads and writes on each rank."""
        operation = self.operation
        if operation.reads is None or operation.writes is None:
            return None
        return (operation.reads(self.ranks) + operation.writes(self.ranks)) * self.size

    def _values(self, rank: int, start: int, length: int, salt: int) -> torch.Tensor:
        """Elements ``start`` to ``start + length`` of what ``rank`` contributes: small integers."""
        limit, first, factor = _MANY, 0, 1
        if self.operation.reduces:
            most = _EXACT.get(self.dtype, 2**24)
            if self.redop == "prod":
                limit, first = 2, 1
            elif self.redop == "avg":
                limit, factor = min(_MANY, most // self.ranks**2), self.ranks
            else:
                limit = min(_MANY, most // self.ranks)
        index = torch.arange(start, start + length, dtype=torch.int64)
        return (
            index.mul_(rank + 1)
            .add_(17 * rank + salt)
            .remainder_(max(limit, 2))
            .mul_(factor)
            .add_(first)
            .to(self.dtype)
        )

    def _reduced(self, start: int, salt: int) -> torch.Tensor:
        total = self._values(0, start, self.count, salt).long()
        for rank in range(1, self.ranks):
            values = self._values(rank, start, self.count, salt).long()
            if self.redop == "prod":
                total *= values
            elif self.redop == "min":
                total = torch.minimum(total, values)
            elif self.redop == "max":
                total = torch.maximum(total, values)
            else:
                total += values
        if self.redop == "avg":
            total //= self.ranks
        return total.to(self.dtype)


def count_wrong(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Elements whose bits differ."""
    return int((_bits(found) != _bits(wanted)).sum())


def count_of(operation: Operation, size: int, dtype: torch.dtype, ranks: int) -> int:
    """Elements (of a part) for ``size`` bytes; parts are rounded down to 16 bytes, but to no less than one element."""
    if not operation.parts:
        return max(1, size // dtype.itemsize)
    part = size // ranks
    if part >= _ALIGNMENT:
        part -= part % _ALIGNMENT
    return max(1, part // dtype.itemsize)


def sizes(first: int, last: int, factor: int) -> list[int]:
    """``first``, ``first * factor``, ... up to ``last``."""
    result = [first]
    while result[-1] * factor <= last:
        result.append(result[-1] * factor)
    return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _one(_: int) -> float:
    return 1.0


def _part(n: int) -> float:
    return 1 / n


def _others(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    operation.name: operation
    for operation in (
        # Reads its slice of n buffers, writes the sum into n buffers.
        Operation("all_reduce", lambda n: 2 * (n - 1) / n, _one, _one, reduces=True, in_place=True),
        # Reads its own part and writes it into n outputs.
        Operation("all_gather", _others, _part, _one, parts=True),
        Operation("reduce_scatter", _others, _one, _part, reduces=True, parts=True),
        # The root's buffer is read once and n - 1 are written, by all ranks together.
        Operation("broadcast", _one, _part, _others, rooted=True, in_place=True),
        Operation("sendrecv", _one, _one, _one),
        Operation("all_to_all", _others, _one, _one, parts=True),
        Operation("pingpong", _one, None, None, transfers=2),
    )
}
