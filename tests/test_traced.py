"""Models whose forward torch.fx follows: a chain computes what the forward does, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hpcomm
from hpcomm.pipeline.adapt import as_chain

WIDTH = 4


class Scaled(nn.Linear):
    """A layer with keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, factor: float = 1.0) -> torch.Tensor:
        y = super().forward(x) * factor
        return y if mask is None else y * mask[:, None]


class Written(nn.Module):
    """a -> b; what either takes, beside the output before it, is the forward's business."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(), Scaled()


class OnlyTheSecond(Written):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.b(self.a(x), mask=mask)


class DefaultOfItsOwn(Written):
    def forward(self, x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return self.b(self.a(x), factor=factor)


class Demanding(Written):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x), mask=mask)


class Asking(Written):
    """Its default decides, which only a trace with that default can follow."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, factor: float = 2.0) -> torch.Tensor:
        if mask is None and factor == 2.0:
            return self.b(self.a(x))
        return self.a(x)


MASK = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (OnlyTheSecond, {}),
        (OnlyTheSecond, {"mask": MASK}),
        (DefaultOfItsOwn, {}),
        (DefaultOfItsOwn, {"factor": 5.0}),
        (Demanding, {"mask": MASK}),
        (Asking, {}),
    ],
)
def test_a_layer_gets_what_the_forward_passes_to_it(kind: type[nn.Module], given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(4, WIDTH, dtype=torch.float64)
    assert torch.equal(as_chain(model)(x, **given), model(x, **given))


def test_what_a_forward_demands_or_does_not_pass_on_is_said() -> None:
    x = torch.ones(4, WIDTH)
    with pytest.raises(hpcomm.InvalidArgument, match="has no default for the keyword argument 'mask'"):
        as_chain(Demanding())(x)
    # The layers take it; the trace holds for the default alone.
    with pytest.raises(hpcomm.InvalidArgument, match="no layer of the model takes the keyword argument 'mask'"):
        as_chain(Asking())(x, mask=MASK.float())


def stepped(kind: type[nn.Module], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of this rank's stage."""
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        model = kind().double()
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=lambda output: output.square().mean())
        pipe.step(x, **given)
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "given"), [(OnlyTheSecond, {"mask": MASK}), (DefaultOfItsOwn, {}), (DefaultOfItsOwn, {"factor": 5.0})]
)
def test_stages_get_what_the_forward_passes_to_them(kind: type[nn.Module], given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    model(torch.randn(4, WIDTH, dtype=torch.float64), **given).square().mean().backward()
    found: dict[str, torch.Tensor] = {}
    for stage in ranks.run(2, stepped, kind, given):
        assert len(stage) == 2
        found |= stage
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)


class Frozen(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.a(x)
        return self.b(h)


class Precise(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(h)


class Recomputed(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=False))


class NoisyInTraining(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.training:
            h = self.a(h)
        return self.b(h)


class OtherKeywordInTraining(Written):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.b(self.a(x), mask=mask) if self.training else self.b(self.a(x))


class InPlace(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        functional.relu(h, inplace=True)
        return self.b(h)


class Underscored(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        torch.relu_(h)
        return self.b(h)


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Bilinear(WIDTH, WIDTH, WIDTH), Scaled()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(z, x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Frozen(), "calls layer a under another grad mode"),
        (Precise(), "calls layer b under another autocast"),
        (Recomputed(), "calls layer a under another saved_tensors_hooks"),
        (NoisyInTraining(), "what its forward calls depends on self.training"),
        (OtherKeywordInTraining(), "what its forward calls depends on self.training"),
        (InPlace(), "between its layers its forward computes .*relu"),
        (Underscored(), "between its layers its forward computes .*relu_"),
        (Swapped(), "its first layer a does not take the first arguments of its forward in their order"),
    ],
)
def test_what_a_chain_would_lose_is_refused(model: nn.Module, words: str) -> None:
    model.b.eval()  # a norm may be frozen in a model that trains
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        as_chain(model)
    assert model.training
    assert model.a.training
    assert not model.b.training
