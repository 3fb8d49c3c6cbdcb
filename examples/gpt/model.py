"""A GPT over bytes as a plain nn.Sequential: embedding, blocks, head. It knows nothing of processes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

BYTES = 256


class Embedding(nn.Module):
    """What a byte is, plus where it stands."""

    def __init__(self, d_model: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, d_model)
        self.place = nn.Embedding(context, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes (batch, time) to vectors (batch, time, d_model)."""
        return self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """Attention to the bytes before, then a small network per position; both add to their input."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors to vectors of the same shape."""
        batch, time, d_model = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, d_model // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, d_model))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Scores of the next byte. Its weights are its own, not the embedding's."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.scores = nn.Linear(d_model, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors to scores (batch, time, 256)."""
        return self.scores(self.norm(x))


def build(*, d_model: int, heads: int, blocks: int, context: int, seed: int) -> nn.Sequential:
    """The model with the same values on every rank: they come from ``seed`` alone."""
    torch.manual_seed(seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding(d_model, context))
    for i in range(blocks):
        layers[f"block{i}"] = Block(d_model, heads)
    layers["head"] = Head(d_model)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    return model


def loss_fn(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, seed: int, temperature: float = 0.7
) -> bytes:
    """``prompt`` and ``count`` bytes that the model puts after it, one at a time."""
    random = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(count):
        scores = model(text[:, -context:])[0, -1] / temperature
        text = torch.cat([text, torch.multinomial(scores.softmax(0), 1, generator=random)[None]], dim=1)
    return bytes(text[0].tolist())


@torch.no_grad()
def mean_loss(model: nn.Module, text: torch.Tensor, *, context: int, windows: int = 64) -> float:
    """Mean loss over ``windows`` evenly spaced windows of ``text``."""
    starts = torch.linspace(0, len(text) - context - 1, windows).long()
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    losses = [loss_fn(model(part[:, :-1]), part[:, 1:]) for part in rows.split(8)]
    return float(torch.stack(losses).mean())
