"""wire_dtype of a Pipeline: what crosses a cut is rounded there, both ways, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from pairs import WITH_ONE_SLOT
from torch import nn

import hpcomm

WIDTH, ROWS, PARTS = 6, 8, 4


class Rounded(torch.autograd.Function):
    """What a message does to a value, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
        ctx.wire = wire
        return value.to(wire).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.wire).to(gradient.dtype), None


class Cut(nn.Module):
    """Where a stage ends."""

    def __init__(self, wire: torch.dtype) -> None:
        super().__init__()
        self.wire = wire

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(x, self.wire)  # type: ignore[no-untyped-call, no-any-return]


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


def batch(replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + replica)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def expected(wire: torch.dtype) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one process that rounds where four stages are cut."""
    parts = layers()
    model = nn.Sequential(*[m for layer in parts for m in (layer, Cut(wire))][:-1])
    x, y = batch()
    total = 0.0
    for part, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
        loss = nn.functional.mse_loss(model(part), target) / PARTS
        loss.backward()
        total += loss.item()
    return total, [p.grad for p in model.parameters() if p.grad is not None]


def trained(wire: torch.dtype, schedule: str, schema: str) -> tuple[float, list[torch.Tensor]]:
    with hpcomm.init(dp=1, pp=-1) as mesh:
        pipe = hpcomm.Pipeline(
            nn.Sequential(*layers()),
            mesh=mesh,
            num_microbatches=PARTS,
            loss_fn=nn.functional.mse_loss,
            schedule=schedule,
            split_at=[1, 2, 3],
            schema=schema,
            wire_dtype=wire,
        )
        x, y = batch()
        for _ in range(2):  # the second step of a frozen edge has no headers
            pipe.zero_grad()
            loss = pipe.step(x, target=y)
        gradients = [p.grad for p in pipe.parameters()]
        assert all(g is not None and g.dtype == torch.float32 for g in gradients)
        return float(loss), gradients  # type: ignore[return-value]


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
@pytest.mark.parametrize("schema", ["per_message", "frozen"])
def test_each_cut_rounds_both_ways(transport: str, schema: str) -> None:
    for wire in (torch.bfloat16, torch.float16):
        loss, gradients = expected(wire)
        exact, _ = expected(torch.float32)
        assert loss != exact  # it makes a difference
        found = ranks.run(4, trained, wire, "eager_1f1b", schema, env=WITH_ONE_SLOT[transport])
        assert [seen for seen, _ in found] == pytest.approx([loss] * 4, rel=1e-6)
        for ours, theirs in zip([g for _, part in found for g in part], gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def in_process_links_are_exact() -> None:
    """In the shape of a V stages 1 and 2 are on one rank."""
    x, y = batch()
    parts = layers()
    model = nn.Sequential(parts[0], Cut(torch.bfloat16), parts[1], parts[2], Cut(torch.bfloat16), parts[3])
    want = nn.functional.mse_loss(model(x), y)
    with hpcomm.init(dp=1, pp=2) as mesh:
        pipe = hpcomm.Pipeline(
            nn.Sequential(*layers()), mesh=mesh, num_microbatches=1, loss_fn=nn.functional.mse_loss, schedule="zbv",
            split_at=[1, 2, 3], wire_dtype=torch.bfloat16,
        )  # fmt: skip
        assert float(pipe.step(x, target=y)) == pytest.approx(want.item(), rel=1e-6)


def test_what_stays_on_a_rank_is_not_cast() -> None:
    ranks.run(2, in_process_links_are_exact)


class Masked(nn.Module):
    """Takes what the first stage has loaded."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert factor.dtype == torch.float32
        assert index.dtype == torch.int64
        # Not exact in 16 bits.
        assert bool((factor == 1 + 2.0**-20).all())
        assert bool((index == 2**40 + 1).all())
        return self.layer(x) * factor  # type: ignore[no-any-return]


def loads_from_the_first() -> list[dict[tuple[int, int], int]]:
    parts = layers()
    sizes = []
    with hpcomm.init(dp=1, pp=2) as mesh:
        for wire in (None, torch.bfloat16):
            pipe = hpcomm.Pipeline(
                nn.Sequential(parts[0], parts[1], Masked(parts[2])), mesh=mesh, num_microbatches=2,
                loss_fn=nn.functional.mse_loss, split_at=[2], inputs="first", keywords=["factor", "index"],
                wire_dtype=wire,
            )  # fmt: skip
            x, y = batch()
            first = mesh.pp.rank == 0
            keywords = {
                "factor": torch.full((ROWS, 1), 1 + 2.0**-20),
                "index": torch.full((ROWS, 1), 2**40 + 1),
            }
            arguments = {"target": y, **keywords} if first else {}
            pipe.step(*([x] if first else []), **arguments)
            costs = pipe.measure(*([x] if first else []), **arguments, steps=1)
            sizes.append(dict(costs.message_bytes))
    return sizes


def test_what_was_loaded_is_not_cast_and_bytes_are_counted_as_they_travel() -> None:
    for exact, cast in ranks.run(2, loads_from_the_first):
        rows = ROWS // 2
        loaded = rows * (WIDTH * 4 + 4 + 8)  # the target, and the two keywords
        assert exact == {(0, 1): rows * WIDTH * 4 + loaded, (1, 0): rows * WIDTH * 4}
        assert cast == {(0, 1): rows * WIDTH * 2 + loaded, (1, 0): rows * WIDTH * 2}


def refused() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:

        def make(**options: Any) -> hpcomm.Pipeline:
            return hpcomm.Pipeline(
                nn.Sequential(*layers()), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, **options
            )

        for wire, words in (
            (torch.int8, "no real floating point type"),
            ("bfloat16", "a dtype such as torch.bfloat16"),
        ):
            with pytest.raises(hpcomm.InvalidArgument, match=words):
                make(wire_dtype=wire)
        with pytest.raises(hpcomm.InvalidArgument, match="each cut rounds"):
            make(wire_dtype=torch.bfloat16, deterministic=True)
        with pytest.raises(hpcomm.SchemaMismatch, match="wire_dtype"):
            make(wire_dtype=(None, torch.bfloat16)[mesh.rank])
        pipe = make(wire_dtype=torch.bfloat16)  # the job goes on
        x, y = batch()
        assert float(pipe.step(x, target=y)) > 0


def test_what_makes_no_sense_is_refused_on_every_rank() -> None:
    ranks.run(2, refused)
