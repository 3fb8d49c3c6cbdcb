"""Packs and unpacks random lists of tensors on a GPU, for compute-sanitizer to watch; tests compare what comes out.

PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 9 python3 scripts/sanitize_pack.py
"""

import random

import torch

from hpcomm import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
          torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip


def one(number: int) -> None:
    """A list of random sizes and starts, with a cast, a factor and the check now and then."""
    device = torch.device("cuda")
    tensors = []
    for _ in range(random.choice([1, 3, 40, 200, 1100])):
        dtype = random.choice(DTYPES)
        count, start = random.choice([1, 3, 7, 16, 33, 257, 1000, 4099]), random.randrange(4)
        values = (torch.randn(count + start, device=device).clamp(-3, 3) * 2 + 3).to(dtype)
        tensors.append(values[start:])
    layout = _C.Layout(tensors, random.choice([None, None, torch.bfloat16, torch.float16, torch.float32]))
    buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=device)
    scale = torch.full((1,), 0.5, dtype=torch.float64, device=device) if number % 2 else None
    bad = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device) if number % 3 == 0 else None
    _C.pack(layout, tensors, buffer, scale=scale, first_bad=bad)
    _C.unpack(layout, buffer, tensors)
    torch.cuda.synchronize()
    print(f"{number}: {len(tensors)} tensors, {layout.bytes} bytes", flush=True)


if __name__ == "__main__":
    random.seed(7)
    torch.manual_seed(7)
    for round_number in range(12):
        one(round_number)
