"""pack and unpack against torch's own conversions, on every device there is."""

from __future__ import annotations

import pytest
import torch

from hpcomm import _C
from hpcomm.errors import InvalidArgument

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_tensor(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Values that a wrong element, dtype or offset would change."""
    values = torch.randn(count, dtype=torch.float64) * 3
    if dtype == torch.bool:
        return (values > 0).to(device)
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype).to(device)
    return (values if dtype.is_floating_point else values * 100).to(dtype).to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def packed(tensors: list[torch.Tensor], device: str, **options: object) -> tuple[_C.Layout, torch.Tensor]:
    layout = _C.Layout(tensors, options.pop("wire", None))  # type: ignore[arg-type]
    buffer = torch.full((layout.bytes,), 0xA5, dtype=torch.uint8, device=device)
    _C.pack(layout, tensors, buffer, **options)  # type: ignore[arg-type]
    return layout, buffer


def part(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.numel() * like.element_size()].clone().view(like.dtype)


def test_tensors_of_all_dtypes_travel_as_they_are(device: str) -> None:
    counts = [0, 1, 3, 17, 64, 1000, 4097, 100_003]
    tensors = [random_tensor(n, dtype, device) for dtype in (*FLOATS, *FLOAT8, *OTHERS) for n in counts]
    layout, buffer = packed(tensors, device)
    for offset, tensor in zip(layout.offsets, tensors, strict=True):
        assert same(part(buffer, offset, tensor), tensor)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    _C.unpack(layout, buffer, back)
    assert all(same(a, b) for a, b in zip(back, tensors, strict=True))


def test_tensors_may_start_anywhere(device: str) -> None:
    whole = random_tensor(5000, torch.float16, device)
    tensors = [whole[start : start + 700 + start] for start in range(9)]
    for wire in (None, torch.bfloat16, torch.float32):
        layout, buffer = packed(tensors, device, wire=wire)
        for offset, tensor in zip(layout.offsets, tensors, strict=True):
            expected = tensor if wire is None else tensor.float().to(wire)
            assert same(part(buffer, offset, expected), expected)


@pytest.mark.parametrize("wire", [*FLOATS, *FLOAT8], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_scale_then_cast_is_torchs(dtype: torch.dtype, wire: torch.dtype, device: str) -> None:
    wide = torch.float64 if torch.float64 in (dtype, wire) else torch.float32
    scale = torch.tensor([0.37], dtype=torch.float64, device=device)
    tensors = [random_tensor(n, dtype, device) for n in (1, 50, 3001)]
    layout, buffer = packed(tensors, device, wire=wire, scale=scale)
    for offset, tensor in zip(layout.offsets, tensors, strict=True):
        expected = (tensor.to(wide) * scale.to(wide)).to(wire)
        assert same(part(buffer, offset, expected), expected)


def test_what_is_no_float_is_not_scaled_and_none_is_zeros(device: str) -> None:
    tensors = [random_tensor(100, dtype, device) for dtype in OTHERS]
    scale = torch.tensor([2.0], dtype=torch.float64, device=device)
    layout = _C.Layout(tensors, torch.bfloat16)
    buffer = torch.full((layout.bytes,), 0xA5, dtype=torch.uint8, device=device)
    _C.pack(layout, [None if i == 3 else tensor for i, tensor in enumerate(tensors)], buffer, scale=scale)
    for i, (offset, tensor) in enumerate(zip(layout.offsets, tensors, strict=True)):
        expected = torch.zeros_like(tensor) if i == 3 else tensor
        assert same(part(buffer, offset, tensor), expected)
    kept = torch.ones(100, dtype=OTHERS[3], device=device)
    _C.unpack(layout, buffer, [None] * 3 + [kept] + [None] * (len(tensors) - 4))
    assert not kept.any()


def test_thousands_of_tensors(device: str) -> None:
    tensors = [random_tensor(1 + i % 77, FLOATS[i % 4], device) for i in range(5000)]
    layout, buffer = packed(tensors, device, wire=torch.float32)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    _C.unpack(layout, buffer, back)
    for tensor, returned in zip(tensors, back, strict=True):
        assert same(returned, tensor.float().to(tensor.dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_told(value: float, device: str) -> None:
    tensors = [random_tensor(4000 + i, FLOATS[i % 4], device) for i in range(20)]
    first_bad = torch.tensor([2**31 - 1], dtype=torch.int32, device=device)
    packed(tensors, device, first_bad=first_bad)
    assert first_bad.item() == 2**31 - 1
    tensors[13][3999] = value
    tensors[7][17] = value
    tensors[16][0] = value
    packed(tensors, device, first_bad=first_bad, wire=torch.bfloat16)
    assert first_bad.item() == 7


def test_wrong_arguments_are_refused(device: str) -> None:
    tensors = [torch.ones(4, device=device), torch.ones(2, dtype=torch.int32, device=device)]
    layout, buffer = packed(tensors, device)
    with pytest.raises(InvalidArgument, match="has 2 entries, got 1"):
        _C.pack(layout, tensors[:1], buffer)
    with pytest.raises(InvalidArgument, match="entry 1 is 2 int32, the tensor 4 float32"):
        _C.pack(layout, [tensors[0], tensors[0]], buffer)
    with pytest.raises(InvalidArgument, match="needs 128 bytes"):
        _C.pack(layout, tensors, buffer[:64].clone())
    with pytest.raises(InvalidArgument, match="expected one float64"):
        _C.pack(layout, tensors, buffer, scale=torch.ones(1, device=device))
