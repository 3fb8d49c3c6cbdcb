"""Small models for tests of the Pipeline, in float64, and their gradients in one process."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import nn

import hpcomm

WIDTH, WORDS = 4, 11

# Every built-in schedule that trains.
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb1p", "zbv", "dualpipev")


class Block(nn.Module):
    """A residual layer that can take a skipped value, a mask and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, h: torch.Tensor, *skips: torch.Tensor, mask: torch.Tensor | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        out = torch.tanh(self.inner(self.norm(h)))
        for i, skip in enumerate(skips, 2):
            out = out + skip / i
        if mask is not None:
            out = out * mask.unsqueeze(-1)
        return h + factor * out


class Head(nn.Module):
    """Scores of the words by a table that the embedding shares."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(h, self.table, self.bias)


def plain() -> nn.Sequential:
    """Linear layers: more of them than any test has stages."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WORDS)).double()


def rich() -> hpcomm.Chain:
    """Tied embedding, skip connections past one and past many layers, one layer used twice."""
    torch.manual_seed(0)
    embed = nn.Embedding(WORDS, WIDTH)
    shared = Block()
    layers: dict[str, nn.Module] = {"embed": embed}
    layers |= {f"b{i}": shared if i in (2, 5) else Block() for i in range(8)}
    layers["head"] = Head(embed.weight)
    return hpcomm.Chain(OrderedDict(layers), skips={"b3": ["b1"], "b6": ["embed", "b1"], "b7": ["b5"]}).double()


MODELS = {"plain": plain, "rich": rich}


def samples_of(replica: int, microbatches: int) -> int:
    """Uneven shards and microbatches."""
    return 2 * microbatches + 3 * replica + 1


def shard(name: str, replica: int, samples: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Input, target and keyword arguments of a replica."""
    generator = torch.Generator().manual_seed(10 + replica)
    y = torch.randint(0, WORDS, (samples,), generator=generator)
    if name == "plain":
        return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64), y, {}
    x = torch.randint(0, WORDS, (samples,), generator=generator)
    mask = torch.rand(samples, generator=generator, dtype=torch.float64)
    return x, y, {"mask": mask, "factor": 0.5}


def batch(name: str, dp: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """All shards together."""
    shards = [shard(name, replica, samples_of(replica, microbatches)) for replica in range(dp)]
    x, y = (torch.cat([s[i] for s in shards]) for i in (0, 1))
    keywords = dict(shards[0][2])
    if "mask" in keywords:
        keywords["mask"] = torch.cat([s[2]["mask"] for s in shards])
    return x, y, keywords


@cache
def one_process(name: str, dp: int, microbatches: int) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss, gradients and their norm; computed once, nobody writes to them."""
    model = MODELS[name]()
    x, y, keywords = batch(name, dp, microbatches)
    loss = nn.functional.cross_entropy(model(x, **keywords), y)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss.item(), gradients, norm.item()


def require_equal(pipe: hpcomm.Pipeline, name: str, microbatches: int) -> None:
    """One step gives the loss, gradients and norm of one process, whichever stages this rank has."""
    mesh = pipe.mesh
    x, y, keywords = shard(name, mesh.dp.rank, samples_of(mesh.dp.rank, microbatches))
    pipe.zero_grad()
    loss = pipe.step(x, target=y, **keywords)
    expected_loss, expected, expected_norm = one_process(name, mesh.dp.size, microbatches)
    torch.testing.assert_close(loss.item(), expected_loss, rtol=1e-12, atol=0)
    seen = 0
    for key, parameter, _ in pipe.owned_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[key], rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )
        seen += 1
    assert seen == len(list(pipe.parameters()))
    norm = hpcomm.clip_grad_norm_(pipe, 0.1)
    torch.testing.assert_close(norm.item(), expected_norm, rtol=1e-5, atol=0)
