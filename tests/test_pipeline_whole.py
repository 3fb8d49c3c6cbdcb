"""What comes from a plain model and goes back: losses of a batch, outputs, weights, the optimizer's state."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional

import hpcomm


def tokens(padded: str) -> tuple[torch.Tensor, torch.Tensor]:
    """12 samples of 5 tokens; of which labels are left out."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(12, 5, 8, generator=draw), torch.randint(0, 7, (12, 5), generator=draw)
    for sample in range(12) if padded == "some" else range(3) if padded == "a microbatch" else ():
        y[sample, (0 if padded == "a microbatch" else 1 + sample % 4) :] = -100
    return x, y


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7))


WEIGHTS = torch.arange(1.0, 8.0)


def mean(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), y.flatten())


def weighted(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), y.flatten(), weight=WEIGHTS)


def summed(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")


def counted(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return summed(output, y), int((y != -100).sum())


def noisy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean(output + torch.randn_like(output), y)


def verified(loss_fn: Callable[..., Any], padded: str) -> str:
    with hpcomm.init(pp=2, dp=-1) as mesh:
        pipe = hpcomm.Pipeline(classifier(), mesh=mesh, num_microbatches=2, loss_fn=loss_fn)
        x, y = (value.tensor_split(mesh.dp.size)[mesh.dp.rank] for value in tokens(padded))
        before = torch.get_rng_state()
        try:
            hpcomm.verify(pipe, classifier(), x, target=y)
        except hpcomm.NumericsMismatch as error:
            return str(error)
        finally:
            assert torch.equal(torch.get_rng_state(), before)
            assert pipe.step_number == 0
            assert all(parameter.grad is None for parameter in pipe.parameters())
        return ""


@pytest.mark.parametrize(
    ("loss_fn", "padded", "told"),
    [
        (mean, "none", ""),
        (noisy, "none", ""),
        (noisy, "some", ""),  # it draws: nobody can tell
        (counted, "some", ""),
        (counted, "a microbatch", ""),
        (mean, "some", "loss_fn is no mean over samples"),
        (weighted, "none", "loss_fn is no mean over samples"),
        (summed, "none", "loss_fn is no mean over samples"),
        (mean, "a microbatch", "the loss of this batch is nan, in one process as well"),
    ],
)
def test_verify_tells_a_loss_that_is_no_mean_over_samples(loss_fn: Callable[..., Any], padded: str, told: str) -> None:
    for words in ranks.run(4, verified, loss_fn, padded):
        assert told in words
        assert bool(words) == bool(told)


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    more: dict[str, Any]


class Answering(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 7)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layer(x)
        return {
            "tuple": (logits, logits.sum(1)),
            "dict": {"logits": logits, "none": None, "kind": "plain"},
            "dataclass": Answer(logits, {"sum": [logits.sum(1)]}),
            "scalar": (logits, logits.mean()),
            "array": (logits, logits.detach().sum(1).numpy()),
            "other rows": (logits, logits.t().contiguous()),
        }[self.form]


def whole_outputs(form: str) -> None:
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Answering(form))
        pipe = hpcomm.Pipeline(
            copy.deepcopy(model), mesh=mesh, num_microbatches=3, loss_fn=None, schedule="forward_only"
        )
        x = torch.randn(7, 8)
        _, found = pipe.eval_step(x, return_outputs=True)
        if mesh.rank == 0:
            assert found is None
            return
        with torch.no_grad():
            if form in ("scalar", "other rows", "array"):
                expected: Any = [model(part) for part in x.tensor_split(3)]
            else:
                expected = model(x)
        assert type(found) is type(expected)
        if form == "dataclass":
            found, expected = dataclasses.asdict(found), dataclasses.asdict(expected)
        torch.testing.assert_close(found, expected) if form != "dict" else require_dict(found, expected)


def require_dict(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found.pop("logits"), expected.pop("logits"))
    assert found == expected


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "scalar", "other rows", "array"])
def test_outputs_are_those_of_the_batch(form: str) -> None:
    ranks.run(2, whole_outputs, form)


def loads_what_is_not_there() -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(classifier(), mesh=mesh, num_microbatches=2, loss_fn=mean)
        own = {name: value.clone() for name, value in pipe.state_dict().items()}
        other = {name: value + 1.0 for name, value in classifier().state_dict().items()}
        deeper = {**other, "4.weight": torch.ones(2), "5.weight": torch.ones(2)}
        with pytest.raises(hpcomm.InvalidArgument, match=r"no stage has '4.weight' and 1 more"):
            pipe.load_state_dict(deeper)
        assert all(torch.equal(value, own[name]) for name, value in pipe.state_dict().items())
        pipe.load_state_dict(deeper, strict=False)
        assert all(torch.equal(value, other[name]) for name, value in pipe.state_dict().items())
        pipe.load_state_dict({"2.bias": torch.zeros(7)}, strict=False)
        pipe.load_state_dict(other)
        with pytest.raises(RuntimeError, match="Missing key"):
            pipe.load_state_dict({})


def test_entries_of_no_stage_are_not_loaded_in_silence() -> None:
    ranks.run(2, loads_what_is_not_there)


def goes_on_from_a_plain_model() -> None:
    model = classifier()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
    plain = torch.optim.AdamW(groups, lr=0.05)
    x, y = tokens("none")

    def step() -> None:
        plain.zero_grad()
        mean(model(x), y).backward()
        plain.step()

    for _ in range(3):
        step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, numbered = copy.deepcopy(get_optimizer_state_dict(model, plain)), copy.deepcopy(plain.state_dict())
    step()
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(classifier(), mesh=mesh, num_microbatches=2, loss_fn=mean)
        pipe.load_state_dict(weights)
        groups = [{"params": [p for p in pipe.parameters() if p.dim() > 1], "weight_decay": 0.7}]
        groups.append({"params": [p for p in pipe.parameters() if p.dim() == 1], "weight_decay": 0.7})
        optimizer = torch.optim.AdamW(groups, lr=0.9)
        with pytest.raises(hpcomm.InvalidArgument, match=r"numbers for its parameters.*get_optimizer_state_dict"):
            pipe.load_optimizer_state_dict(optimizer, numbered)
        pipe.load_optimizer_state_dict(optimizer, state)
        pipe.step(x, target=y)
        optimizer.step()
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_the_state_of_a_plain_models_optimizer_is_taken_by_name() -> None:
    ranks.run(2, goes_on_from_a_plain_model)
