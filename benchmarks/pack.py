"""How fast are many tensors packed into one buffer, and taken out again? Against a copy of as many bytes. On the CPU.

    python -m benchmarks.pack                                # 1 MB to 64 MB, 4 to 4,096 tensors, with and without cast
    python -m benchmarks.pack --totals 16 --allocations 9 --rounds 5 --json result.json
    python -m benchmarks.pack --totals 1 --counts 4096 --adjacent  # without the gaps that malloc leaves

One process, one thread. Variants take turns in every round, in another order each time, as equal code is up to a
seventh slower right behind the copy: hpcomm's kernels, with the addresses in a list as the Reducer and the Channel have
them; the same from Python, where every tensor of every call is looked up first; a _foreach_copy_ of the same tensors;
and one copy_ of as many bytes, which is the memory-copy rate of this machine at this moment. A rate counts the bytes
that are read and those that are written; the share is ours over that of the copy, the median of the rounds' own.
Float32 tensors, as they are or as bfloat16 in the buffer (--wires: or as another type). Sets of buffers are used in
turn, so that 64 MB do not come from a cache. Before each block its sets are gone through once, untimed: else the first
of a variant would come from memory after another variant's buffers and from a cache after its own. Where the kernel
places memory decides how caches serve it, for as long as it is there: a share differs more from one allocation to the
next than from round to round within one. So all memory of a case, the copy's as well, is taken anew several times,
while what was taken before is still there; a share is the median over the rounds of all allocations, and its quartiles
are printed. Contents are compared with torch's before and after the timing, in each allocation. GPUs: benchmarks.gpu.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hpcomm
from benchmarks.collectives import positive
from benchmarks.harness import environment
from benchmarks.launch import result_file
from hpcomm import _C

MB = 1 << 20
COUNTS = (4, 32, 256, 1024, 4096)
BLOCK = 0.02  # seconds


class Tensors:
    """One set of tensors, and a buffer in hpcomm's layout."""

    def __init__(self, total: int, number: int, wire: torch.dtype, adjacent: bool) -> None:
        length = total // number // 4
        self.wire = wire
        together = torch.empty(length * number).split(length) if adjacent else ()
        self.tensors = list(together) or [torch.empty(length) for _ in range(number)]
        self.layout = _C.Layout(self.tensors, wire)
        self.buffer = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        self.places = [
            self.buffer[offset : offset + length * self.wire.itemsize].view(self.wire) for offset in self.layout.offsets
        ]
        self.list = _C.CopyList(self.layout, self.tensors, self.buffer)
        self.source, self.target = torch.ones(total // 4), torch.zeros(total // 4)
        self.moved = number * length * (4 + self.wire.itemsize)
        self.copied = total * 2

    def pack(self) -> None:
        self.list.pack()

    def unpack(self) -> None:
        self.list.unpack()

    def python_pack(self) -> None:
        _C.pack(self.layout, self.tensors, self.buffer)

    def python_unpack(self) -> None:
        _C.unpack(self.layout, self.buffer, self.tensors)

    def foreach_pack(self) -> None:
        torch._foreach_copy_(self.places, self.tensors)

    def foreach_unpack(self) -> None:
        torch._foreach_copy_(self.tensors, self.places)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def wrong(self, seed: int) -> int:
        """Tensors that pack or unpack leave otherwise than torch would, on new values."""
        count = 0
        for index, tensor in enumerate(self.tensors):
            tensor.copy_(torch.arange(tensor.numel()) % 251 + index % 13 + seed)
        expected = [tensor.to(self.wire) for tensor in self.tensors]
        self.buffer.fill_(0xA5)
        self.pack()
        count += sum(not torch.equal(place, e) for place, e in zip(self.places, expected, strict=True))
        for tensor in self.tensors:
            tensor.fill_(-1)
        self.unpack()
        return count + sum(not torch.equal(t, e.float()) for t, e in zip(self.tensors, expected, strict=True))


VARIANTS: dict[str, Callable[[Tensors], None]] = {
    "pack": Tensors.pack,
    "unpack": Tensors.unpack,
    "python pack": Tensors.python_pack,
    "python unpack": Tensors.python_unpack,
    "foreach pack": Tensors.foreach_pack,
    "foreach unpack": Tensors.foreach_unpack,
    "copy": Tensors.copy,
}


class Blocks:
    """The rates of one case, over several allocations of its memory."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {name: [] for name in VARIANTS}  # bytes per second, by round
        self._turns: dict[str, int] = {}

    def measure(self, sets: list[Tensors], rounds: int) -> None:
        """Adds ``rounds`` rounds on these buffers."""
        if not self._turns:
            for name in VARIANTS:  # how many fill a block
                self._turns[name] = max(2, int(BLOCK / self._seconds(name, sets, len(sets))))
        for _ in range(rounds):
            number = len(self.rates["copy"])
            for name in random.Random(number).sample([*VARIANTS], len(VARIANTS)):
                moved = sets[0].copied if name == "copy" else sets[0].moved
                self.rates[name].append(moved / self._seconds(name, sets, self._turns[name]))

    @staticmethod
    def _seconds(name: str, sets: list[Tensors], number: int) -> float:
        step = VARIANTS[name]
        for one in sets[:number]:
            step(one)
        start = time.perf_counter()
        for one in itertools.islice(itertools.cycle(sets), number):
            step(one)
        return (time.perf_counter() - start) / number


def shares(rates: dict[str, list[float]], name: str) -> list[float]:
    """Of the copy rate of the same round."""
    return [a / b for a, b in zip(rates[name], rates["copy"], strict=True)]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, middle, high


def several(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values with commas between them."""
    return lambda text: [one(part.strip()) for part in text.split(",")]


def megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: expected megabytes, more than 0")
    return value


def wire_type(text: str) -> str:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a floating-point type of torch, such as bfloat16")
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--totals", type=several(megabytes), default="1,16,64", help="MB in all, with commas (1,16,64)")
    parser.add_argument(
        "--counts", type=several(positive), default=",".join(map(str, COUNTS)), help="numbers of tensors, with commas"
    )
    parser.add_argument(
        "--wires", type=several(wire_type), default="float32,bfloat16", help="types in the buffer (float32,bfloat16)"
    )
    parser.add_argument("--adjacent", action="store_true", help="tensors side by side, not each in memory of its own")
    parser.add_argument("--allocations", type=positive, default=5, help="how often all memory is taken anew (5)")
    parser.add_argument("--rounds", type=positive, default=3, help="blocks of each variant in an allocation (3)")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args(argv)
    if min(arguments.totals) * MB < 4 * max(arguments.counts):
        parser.error(f"{max(arguments.counts)} tensors of float32 do not fit {min(arguments.totals):g} MB")
    return arguments


def _text(value: object) -> str:
    """As one writes it in a command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def run(arguments: argparse.Namespace) -> int:
    """All cases; returns the exit code: 1 when contents were wrong."""
    torch.set_num_threads(1)
    wrong = 0
    rows: list[dict[str, Any]] = []
    with hpcomm.init() as mesh:
        described = environment(mesh)
    print("".join(f"# {key:<18} {value}\n" for key, value in described.items()))
    print(f"{'':<30}{'':>10}{'kernels':>32}{'from Python':>16}{'foreach':>16}   shares of the copy rate")
    print(f"{'':<30}{'copy GB/s':>10}{'pack':>16}{'unpack':>16}" + f"{'pack':>8}{'unpack':>8}" * 2)
    for total in (int(one * MB) for one in arguments.totals):
        for number in arguments.counts:
            for wire_name in arguments.wires:
                wire = getattr(torch, wire_name)
                cast = "" if wire == torch.float32 else f", as {wire_name}"
                blocks = Blocks()
                sets: list[Tensors] = []
                for _ in range(arguments.allocations):
                    # The last ones go when these are there: else they would get the same memory.
                    sets = [
                        Tensors(total, number, wire, arguments.adjacent)
                        for _ in range(max(1, min(4, 256 * MB // total)))
                    ]
                    wrong += sum(one.wrong(1) for one in sets)
                    blocks.measure(sets, arguments.rounds)
                    wrong += sum(one.wrong(2) for one in sets)
                rates = blocks.rates
                spans = {name: quartiles(shares(rates, name)) for name in rates}
                name = f"{number} x {total / number / 1024:g} KB" + cast
                cells = "".join(
                    f"{100 * middle:>5.0f} % {100 * low:>3.0f}-{100 * high:<3.0f} "
                    for low, middle, high in (spans["pack"], spans["unpack"])
                ) + "".join(
                    f"{100 * spans[way + end][1]:>6.0f} %"
                    for way, end in itertools.product(("python ", "foreach "), ("pack", "unpack"))
                )
                print(f"{name:<30}{statistics.median(rates['copy']) / 1e9:>10.2f}{cells}", flush=True)
                medians = {name: span[1] for name, span in spans.items()}
                rows.append({"case": name, "total": total, "tensors": number, "rates": rates, "shares": medians,
                             "quartiles": {name: (span[0], span[2]) for name, span in spans.items()}})  # fmt: skip
    print(f"\n# tensors that were wrong: {wrong}")
    if arguments.json:
        said = {name: ",".join(map(_text, value)) if isinstance(value, list) else value
                for name, value in vars(arguments).items()}  # fmt: skip
        document = {"question": "pack", "environment": described, "arguments": said, "rows": rows}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run(parse()))
