"""pack and unpack at every alignment and length, in graphs and under races; tests/test_pack.py has the conversions."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import run, sleep, synchronize, traced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcomm import _C

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)
GUARD = 0xA5  # fills what a kernel must not touch

# Lengths around the widths of accesses, warps, blocks and chunks.
LENGTHS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([2**k + d for k in range(6, 16) for d in (-1, 0, 1)]),
    st.integers(60_000, 70_000),
)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[tuple[torch.dtype, int, int, bool]], torch.dtype | None, bool]:
    """(dtype, elements before it, elements, absent) of each tensor; the wire type; whether they are scaled."""
    dtypes = st.sampled_from([*FLOATS, *OTHERS])
    tensors = draw(st.lists(st.tuples(dtypes, st.integers(0, 17), LENGTHS, st.sampled_from([False] * 7 + [True])),
                            min_size=1, max_size=12))  # fmt: skip
    return tensors, draw(st.sampled_from([None, None, *FLOATS])), draw(st.booleans())


def random_values(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 3
    if dtype.is_complex:
        return torch.complex(numbers, -numbers).to(dtype)
    return (numbers if dtype.is_floating_point else numbers * 20).to(dtype)


def converted(tensor: torch.Tensor, wire: torch.dtype, scale: float | None) -> torch.Tensor:
    """Scale, then cast, in the wider of float32 and the two types."""
    if not tensor.dtype.is_floating_point:
        return tensor
    wide = torch.float64 if torch.float64 in (tensor.dtype, wire) else torch.float32
    number = tensor.to(wide)
    return (number if scale is None else number * torch.tensor(scale, dtype=torch.float64).to(wide)).to(wire)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def sweep(device: str, examples: int) -> None:
    generator = torch.Generator().manual_seed(0)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pieces())
    def there_and_back(case: tuple[list[tuple[torch.dtype, int, int, bool]], torch.dtype | None, bool]) -> None:
        described, wire, scaled = case
        host, tensors = [], []
        for dtype, before, count, _ in described:
            values = random_values(before + count, dtype, generator)
            host.append(values[before:])
            tensors.append(values.to(device)[before:])  # starts anywhere
        absent = [missing for *_, missing in described]
        factor = 0.37 if scaled else None
        scale = torch.tensor([factor], dtype=torch.float64, device=device) if scaled else None
        layout = _C.Layout(tensors, wire)
        buffer = torch.full((layout.bytes + 128,), GUARD, dtype=torch.uint8, device=device)
        given_tensors = [None if gone else tensor for gone, tensor in zip(absent, tensors, strict=True)]
        _C.pack(layout, given_tensors, buffer, scale=scale)
        packed = buffer.cpu()
        used = torch.zeros(buffer.numel(), dtype=torch.bool)
        for offset, tensor, gone in zip(layout.offsets, host, absent, strict=True):
            to = wire if wire is not None and tensor.dtype.is_floating_point else tensor.dtype
            expected = bits(torch.zeros(len(tensor), dtype=to) if gone else converted(tensor, to, factor))
            assert torch.equal(packed[offset : offset + len(expected)], expected), (tensor.dtype, to, len(tensor))
            used[offset : offset + len(expected)] = True
        assert bool((packed[layout.bytes :] == GUARD).all()), "wrote beyond the buffer's end"

        room = [torch.full((len(t) + 9,), 7, dtype=t.dtype, device=device) for t in host]
        back = [whole[before % 5 : before % 5 + len(t)]
                for whole, t, (_, before, _, _) in zip(room, host, described, strict=True)]  # fmt: skip
        _C.unpack(layout, buffer, [None if gone else part for gone, part in zip(absent, back, strict=True)])
        for whole, tensor, gone, (_, before, _, _) in zip(room, host, absent, described, strict=True):
            start = before % 5
            expected = torch.full((len(tensor) + 9,), 7, dtype=tensor.dtype)
            if not gone:
                to = wire if wire is not None and tensor.dtype.is_floating_point else tensor.dtype
                expected[start : start + len(tensor)] = converted(converted(tensor, to, factor), tensor.dtype, None)
            assert torch.equal(bits(whole), bits(expected)), (tensor.dtype, wire, len(tensor))

    there_and_back()


def test_any_alignment_and_length(device: str) -> None:
    run(device, 1, sweep, 120 if device == "cuda" else 30)


def every_start_and_end(device: str) -> None:
    """All pairs of misaligned sources and ends within 64 bytes, at once: hundreds of tensors in one call."""
    whole = torch.arange(4096, device=device) % 251
    whole = whole.to(torch.uint8)
    tensors = [whole[start : start + length] for start in range(33) for length in (*range(33), 255, 256, 257, 1025)]
    layout = _C.Layout(tensors)
    buffer = torch.full((layout.bytes,), GUARD, dtype=torch.uint8, device=device)
    _C.pack(layout, tensors, buffer)
    packed, source = buffer.cpu(), whole.cpu()
    place = 0
    for start in range(33):
        for length in (*range(33), 255, 256, 257, 1025):
            offset = layout.offsets[place]
            assert torch.equal(packed[offset : offset + length], source[start : start + length]), (start, length)
            place += 1


def test_every_start_and_end(device: str) -> None:
    run(device, 1, every_start_and_end)


def more_than_four_gigabytes(_: str) -> None:
    """Element counts and offsets beyond 32 bits."""
    count = (1 << 32) + 4097
    source = torch.empty(count, dtype=torch.uint8, device="cuda")
    for start in range(0, count, 1 << 28):
        source[start : start + (1 << 28)] = (start >> 28) + 1
    source[-1] = 77
    tail = torch.arange(1000, dtype=torch.float32, device="cuda")
    layout = _C.Layout([source, tail])
    buffer = torch.zeros(layout.bytes, dtype=torch.uint8, device="cuda")
    _C.pack(layout, [source, tail], buffer)
    for start in range(0, count, 1 << 28):
        assert torch.equal(buffer[start : min(start + (1 << 28), count)], source[start : start + (1 << 28)])
    at = layout.offsets[1]
    assert at > 1 << 32
    assert torch.equal(buffer[at : at + 4000].view(torch.float32), tail)


@pytest.mark.cuda
def test_more_than_four_gigabytes() -> None:
    free = run("cuda", 1, free_memory)[0]
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of GPU memory, {free >> 30} are free")
    run("cuda", 1, more_than_four_gigabytes)


def free_memory(_: str) -> int:
    return int(torch.cuda.mem_get_info()[0])


def in_a_graph(_: str) -> None:
    tensors = [torch.zeros(1000 + 3 * i, device="cuda") for i in range(1500)]  # more than one launch
    back = [torch.zeros_like(tensor) for tensor in tensors]
    scale = torch.ones(1, dtype=torch.float64, device="cuda")
    layout = _C.Layout(tensors, torch.bfloat16)
    buffer = torch.zeros(layout.bytes, dtype=torch.uint8, device="cuda")
    _C.pack(layout, tensors, buffer, scale=scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.pack(layout, tensors, buffer, scale=scale)
        _C.unpack(layout, buffer, back)
    for factor in (1.0, 2.0, 0.5):
        for i, tensor in enumerate(tensors):
            tensor.fill_(float(i % 100))
        scale.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        for i, tensor in enumerate(back):
            assert bool((tensor == float(i % 100) * factor).all()), (factor, i)


@pytest.mark.cuda
def test_in_a_graph() -> None:
    run("cuda", 1, in_a_graph)


def in_stream_order(device: str) -> None:
    """Sources are written late and dropped early, the buffer is overwritten at once."""
    for repeat in range(5):
        tensors = [torch.zeros(5000 + i, device=device) for i in range(50)]
        layout = _C.Layout(tensors)
        buffer = torch.zeros(layout.bytes, dtype=torch.uint8, device=device)
        sleep(device, 10.0)
        for i, tensor in enumerate(tensors):
            tensor.fill_(float(repeat + i))
        _C.pack(layout, tensors, buffer)
        del tensors, tensor
        garbage = [torch.full((5000 + i,), float("nan"), device=device) for i in range(50)]
        back = [torch.empty_like(part) for part in garbage]
        _C.unpack(layout, buffer, back)
        buffer.fill_(0xFF)
        for i, part in enumerate(back):
            assert bool((part == float(repeat + i)).all())


def test_in_stream_order(device: str) -> None:
    run(device, 1, in_stream_order)


def launches(_: str) -> list[int]:
    counts = []
    for number in (1, 64, 1000, 3000):
        tensors = [torch.ones(100, device="cuda") for _ in range(number)]
        layout = _C.Layout(tensors)
        buffer = torch.zeros(layout.bytes, dtype=torch.uint8, device="cuda")
        _C.pack(layout, tensors, buffer)

        def step(layout: _C.Layout = layout, tensors: list[torch.Tensor] = tensors, b: torch.Tensor = buffer) -> None:
            _C.pack(layout, tensors, b)

        trace = traced("cuda", step)
        assert trace.get("gpu_memcpy", []) == [], "tables travel as parameters of the kernel"
        counts.append(len(trace.get("kernel", [])))
    synchronize("cuda")
    return counts


@pytest.mark.cuda
def test_one_launch_for_up_to_a_thousand_tensors() -> None:
    (counts,) = run("cuda", 1, launches)
    assert counts[:3] == [1, 1, 1], counts
    assert counts[3] <= 4, counts
