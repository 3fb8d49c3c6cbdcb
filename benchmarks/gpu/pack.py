"""How fast are pack and unpack, against torch.cat, torch._foreach_copy_, a copy_ per tensor, and the memory itself?

"device copy" is one copy_ of as many bytes. Every peer goes through several sets of tensors in turn, so that no set is
in the cache from the last call, where the sets are larger than the cache together. "graph" is the same kernels without
the host: replayed from a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.harness import DEVICE, Job, Step, Variant, measure, ratio
from hpcomm import _C

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
MIXED = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16)
POISON = 0xA5
NO_BAD = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """What is packed, and by which figure it is judged."""

    name: str
    number: int
    bytes: int  # of each tensor
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    wire: torch.dtype | None = None
    scaled: bool = False
    checked: bool = False
    share: bool = False  # judged by the share of the copy rate
    ratio: bool = False  # judged by the ratio to a copy_ per tensor

    @property
    def total(self) -> int:
        return self.number * self.bytes


CASES = (
    Case("1 x 64 MB", 1, 64 * MB, share=True),
    Case("1 x 1 GB", 1, GB, share=True),
    Case("64 x 1 MB", 64, MB, share=True),
    Case("1,000 x 4 KB", 1000, 4 * KB, ratio=True),
    Case("10,000 x 256 B, five dtypes", 10_000, 256, MIXED, ratio=True),
    Case("64 x 1 MB, scaled", 64, MB, scaled=True, share=True),
    Case("64 x 1 MB, float32 to bfloat16", 64, MB, wire=torch.bfloat16, share=True),
    Case("64 x 1 MB, checked for NaN", 64, MB, checked=True, share=True),
)
QUICK = (
    Case("1 x 64 KB", 1, 64 * KB, share=True),
    Case("40 x 4 KB", 40, 4 * KB, ratio=True),
    Case("50 x 256 B, five dtypes", 50, 256, MIXED, ratio=True),
    Case("8 x 1 KB, scaled", 8, KB, scaled=True, share=True),
    Case("8 x 1 KB, float32 to bfloat16", 8, KB, wire=torch.bfloat16, share=True),
    Case("8 x 1 KB, checked for NaN", 8, KB, checked=True, share=True),
)


class Tensors:
    """One set: tensors, a buffer in hpcomm's layout, and the same places as torch's peers see them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        dtypes = list(itertools.islice(itertools.cycle(case.dtypes), case.number))
        self.tensors = [random_values(case.bytes // dtype.itemsize, dtype, device) for dtype in dtypes]
        self.layout = _C.Layout(self.tensors, case.wire)
        self.buffer = torch.full((self.layout.bytes,), POISON, dtype=torch.uint8, device=device)
        self.places = [
            self.buffer[offset : offset + tensor.numel() * wire.itemsize].view(wire)
            for offset, tensor in zip(self.layout.offsets, self.tensors, strict=True)
            for wire in (case.wire if case.wire is not None and tensor.is_floating_point() else tensor.dtype,)
        ]
        self.scale = torch.full((1,), 0.5, dtype=torch.float64, device=device) if case.scaled else None
        self.first_bad = torch.full((1,), NO_BAD, dtype=torch.int32, device=device) if case.checked else None
        # What torch.cat wants: one dtype, no gaps.
        same = len(case.dtypes) == 1
        self.flat_parts = [tensor if same else tensor.view(torch.uint8) for tensor in self.tensors]
        self.flat = torch.empty(sum(part.numel() for part in self.flat_parts), dtype=self.flat_parts[0].dtype,
                                device=device)  # fmt: skip
        self.narrow = torch.empty_like(self.flat, dtype=case.wire) if case.wire is not None else None
        self.other = torch.empty(case.total, dtype=torch.uint8, device=device)
        self.source = self.flat.view(torch.uint8)[: case.total]

    # --- ours -----------------------------------------------------------------------------------------------------

    def pack(self) -> None:
        _C.pack(self.layout, self.tensors, self.buffer, scale=self.scale, first_bad=self.first_bad)

    def unpack(self) -> None:
        _C.unpack(self.layout, self.buffer, self.tensors, scale=self.scale)

    # --- theirs ---------------------------------------------------------------------------------------------------

    def cat(self) -> None:
        torch.cat(self.flat_parts, out=self.flat)
        self._finish_pack(self.flat)
        if self.narrow is not None:
            self.narrow.copy_(self.flat)

    def foreach_pack(self) -> None:
        torch._foreach_copy_(self.places, self.tensors)
        self._finish_foreach(self.places)

    def copies_pack(self) -> None:
        for place, tensor in zip(self.places, self.tensors, strict=True):
            place.copy_(tensor)
            if self.scale is not None:
                place.mul_(0.5)
        if self.first_bad is not None:
            self._finish_foreach(self.places)

    def foreach_unpack(self) -> None:
        torch._foreach_copy_(self.tensors, self.places)
        if self.scale is not None:
            torch._foreach_mul_(self.tensors, 0.5)

    def copies_unpack(self) -> None:
        for place, tensor in zip(self.places, self.tensors, strict=True):
            tensor.copy_(place)
            if self.scale is not None:
                tensor.mul_(0.5)

    def device_copy(self) -> None:
        self.other.copy_(self.source)

    def _finish_pack(self, flat: torch.Tensor) -> None:
        if self.scale is not None:
            flat.mul_(0.5)
        if self.first_bad is not None:
            torch.isfinite(flat).all()

    def _finish_foreach(self, parts: list[torch.Tensor]) -> None:
        if self.scale is not None:
            torch._foreach_mul_(parts, 0.5)
        if self.first_bad is not None:
            torch.isfinite(torch.stack(torch._foreach_norm(parts))).all()

    # --- right? ---------------------------------------------------------------------------------------------------

    def expected(self) -> list[torch.Tensor]:
        """What pack writes, by a route of torch's."""
        wide = [t.float() * 0.5 if self.case.scaled and t.is_floating_point() else t for t in self.tensors]
        return [number.to(place.dtype) for number, place in zip(wide, self.places, strict=True)]

    def wrong(self, pack: Step) -> int:
        """Bytes of places that differ after ``pack`` ran on new values over a poisoned buffer."""
        for tensor in self.tensors:
            tensor.copy_(random_values(tensor.numel(), tensor.dtype, tensor.device))
        self.buffer.fill_(POISON)
        pack()
        packed = [place.clone() for place in self.places]
        return count_wrong(packed, self.expected())

    def wrong_back(self) -> int:
        """The same for unpack: there and back gives what rounding to the wire type leaves."""
        self.pack()
        scale = 0.5 if self.case.scaled else 1.0
        expected = [(place.to(t.dtype) * scale if scale != 1.0 else place.to(t.dtype))
                    for place, t in zip(self.places, self.tensors, strict=True)]  # fmt: skip
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(POISON)
        self.unpack()
        return count_wrong(self.tensors, expected)


def random_values(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, device=device, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, (count,), device=device, dtype=torch.int64).to(dtype)


def count_wrong(got: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """Bytes that differ, with one wait for the device in all."""
    counts = [(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in zip(got, expected, strict=True)]
    return int(torch.stack(counts).sum())


def in_turn(sets: list[Tensors], method: Callable[[Tensors], None]) -> Step:
    """A step that goes on with the next set at every call."""
    turns: Iterator[Tensors] = itertools.cycle(sets)
    return lambda: method(next(turns))


def in_a_graph(job: Job, sets: list[Tensors], method: Callable[[Tensors], None]) -> Variant | None:
    """All sets in one graph, or None where that is not possible."""
    if not job.on_gpu:
        return None
    try:
        for one in sets:
            method(one)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for one in sets:
                method(one)
    except RuntimeError as error:
        job.report.note(f"no graph: {error}")
        return None
    return Variant(graph.replay, per=len(sets))


def run(job: Job) -> None:
    for case in QUICK if job.quick else CASES:
        if not job.in_time(f"pack: {case.name}"):
            return
        # Of ten thousand tensors two sets: torch takes tens of milliseconds for one.
        number = max(2, min(8, 512 * MB // case.total, 20_000 // case.number)) if not job.quick else 2
        sets = [Tensors(case, job.device) for _ in range(number)]
        wrong = sum(one.wrong(one.pack) + one.wrong_back() for one in sets)
        pack_case(job, case, sets)
        unpack_case(job, case, sets)
        wrong += sum(one.wrong(one.pack) + one.wrong_back() for one in sets)
        if wrong:
            raise AssertionError(f"{case.name}: {wrong} wrong bytes")
        if case.checked:
            require_that_it_finds(sets[0])
        del sets
        if job.on_gpu:
            torch.cuda.empty_cache()


def require_that_it_finds(one: Tensors) -> None:
    """The check is not only fast."""
    assert one.first_bad is not None
    place = len(one.tensors) // 2
    one.tensors[place][-1] = float("nan")
    one.pack()
    if int(one.first_bad) != place:
        raise AssertionError(f"a NaN in tensor {place} was found in {int(one.first_bad)}")
    one.first_bad.fill_(NO_BAD)


def pack_case(job: Job, case: Case, sets: list[Tensors]) -> None:
    variants: dict[str, Step | Variant] = {
        "hpcomm pack": in_turn(sets, Tensors.pack),
        "torch.cat": in_turn(sets, Tensors.cat),
        "torch._foreach_copy_": in_turn(sets, Tensors.foreach_pack),
        "copy_ per tensor": in_turn(sets, Tensors.copies_pack),
        "device copy": in_turn(sets, Tensors.device_copy),
    }
    graph = in_a_graph(job, sets, Tensors.pack)
    if graph is not None:
        variants["hpcomm pack, graph"] = graph
    judge(job, case, "pack", measure(job, variants, how=DEVICE, most=200))


def unpack_case(job: Job, case: Case, sets: list[Tensors]) -> None:
    variants: dict[str, Step | Variant] = {
        "hpcomm unpack": in_turn(sets, Tensors.unpack),
        "torch._foreach_copy_": in_turn(sets, Tensors.foreach_unpack),
        "copy_ per tensor": in_turn(sets, Tensors.copies_unpack),
        "device copy": in_turn(sets, Tensors.device_copy),
    }
    graph = in_a_graph(job, sets, Tensors.unpack)
    if graph is not None:
        variants["hpcomm unpack, graph"] = graph
    judge(job, case, "unpack", measure(job, variants, how=DEVICE, most=200))


def judge(job: Job, case: Case, what: str, samples: dict[str, list[float]]) -> None:
    """The row, with rates; bytes are those read and those written."""
    wire = case.wire.itemsize / 4 if case.wire is not None else 1.0
    moved = {name: case.total * (2.0 if name == "device copy" else 1.0 + wire) for name in samples}
    columns = {}
    shares = {}
    for name in samples:
        shares[name] = ratio(samples, "device copy", name) * moved[name] / moved["device copy"]
        columns[name] = f"{100 * shares[name]:.0f} % of the copy rate"
    rate = moved["device copy"] / sorted(samples["device copy"])[len(samples["device copy"]) // 2] / 1e9
    ours = f"hpcomm {what}"
    job.report.row(f"{what} {case.name}", samples, columns=columns, shares=shares, copy_gbs=rate, bytes=case.total)
    if case.share:
        got = f"{100 * shares[ours]:.0f} %"
        job.report.target(f"{what} {case.name}", ">= 80 % of the copy rate", got, job.judged(shares[ours] >= 0.8))
    if case.ratio:
        times = ratio(samples, "copy_ per tensor", ours)
        wanted = ">= 5x faster than a copy_ per tensor"
        job.report.target(f"{what} {case.name}", wanted, f"{times:.1f}x", job.judged(times >= 5.0))
