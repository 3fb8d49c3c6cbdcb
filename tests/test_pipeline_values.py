"""What travels between stages: trees of any kind, recurrent state, values that layers change in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.utils.checkpoint
from test_pipeline_schedules import CROSS
from torch import nn

import hpcomm


class Trim(nn.Module):
    """Cuts each microbatch to its longest row: messages of another shape every time. Hands on a tree with None."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return {"h": x[:, : int(lengths.max())], "none": None, "number": 3, "lengths": lengths}


class Recurrent(nn.Module):
    """An LSTM whose state goes on to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, tree: Any) -> Any:
        assert tree["none"] is None
        assert tree["number"] == 3
        h, state = self.cell(tree["h"], tree.get("state"))
        return {**tree, "h": h, "state": state}


class Ends(nn.Module):
    """Several outputs."""

    def forward(self, tree: Any, scale: float, table: torch.Tensor) -> Any:
        return tree["h"].mean((1, 2)) * scale, tree["state"][1].sum((0, 2)) + table.sum()


def trimmed_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Trim(), Recurrent(), Recurrent(), Recurrent(), Ends()).double()


def two_losses(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output[0] - target).square().mean() + (output[1] + target).square().mean()


def trees() -> None:
    with hpcomm.init(pp=2) as mesh:
        x = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        lengths = torch.tensor([2, 1, 5, 3, 4, 4])
        y = torch.arange(6.0, dtype=torch.float64)
        keywords = {"scale": 2.0, "table": torch.ones(3, 3, dtype=torch.float64)}
        reference = trimmed_model()
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
            chain = hpcomm.Chain(dict(reference.named_children()))
            two_losses(chain(x[rows], lengths=lengths[rows], **keywords), y[rows]).mul(1 / 3).backward()
        for schedule in ("1f1b", "zb1p", "interleaved_1f1b"):
            pipe = hpcomm.Pipeline(
                trimmed_model(), mesh=mesh, num_microbatches=3, loss_fn=two_losses, schedule=schedule, whole=["table"]
            )
            _, outputs = pipe.step(x, target=y, return_outputs=True, lengths=lengths, **keywords)
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, msg=name)
            if pipe.plan.num_stages - 1 in pipe.stages:
                assert tuple(part.shape for part in outputs) == ((6,), (6,))
        mesh.barrier()  # or a rank may hear of the error before it has taken the last message
        with pytest.raises(hpcomm.InvalidArgument, match="no layer of the model takes the keyword argument 'length'"):
            pipe.step(x, target=y, length=lengths)


def test_trees_that_change_their_shape_and_recurrent_stages() -> None:
    ranks.run(2, trees)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class Halves:
    first: torch.Tensor
    second: torch.Tensor


class Doubles(nn.Module):
    """Hands on a tensor, and two more in a class of the program."""

    def __init__(self, kind: type[Pair] | type[Halves]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, tree: Any) -> Any:
        h = tree[0] + tree[1].first * tree[1].second if isinstance(tree, tuple) else tree
        h = torch.tanh(self.linear(h))
        return h, self.kind(h.sin(), h.cos())


class Unpacks(nn.Module):
    def forward(self, pair: Pair | Halves) -> torch.Tensor:
        return pair.first * pair.second


def against_both(output: Any, target: Pair | Halves) -> torch.Tensor:
    return (output[0] - target.first).square().mean() + (output[1].first - target.second).abs().mean()


def doubled(kind: type[Pair] | type[Halves]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unpacks(), *(Doubles(kind) for _ in range(6))).double()


def own_classes() -> None:
    with hpcomm.init(pp=2) as mesh:
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for kind in (Pair, Halves):
            batch, target = kind(x, x.cos()), kind(x.sin(), x)
            reference = doubled(kind)
            against_both(reference(batch), target).backward()
            for schedule, balance in (("1f1b", hpcomm.Balance((kind(x[:2], x[:2]),))), ("zbv", None), ("1f1b", None)):
                pipe = hpcomm.Pipeline(
                    doubled(kind),
                    mesh=mesh,
                    num_microbatches=3,
                    loss_fn=against_both,
                    schedule=schedule,
                    balance=balance,
                )
                _, outputs = pipe.step(batch, target=target, return_outputs=True)
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, msg=name)
                if pipe.plan.num_stages - 1 in pipe.stages:
                    hidden, pair = outputs
                    assert type(pair) is kind
                    assert [t.shape for t in (hidden, pair.first, pair.second)] == [(6, 4)] * 3
                    assert not any(t.requires_grad for t in (hidden, pair.first, pair.second))


def test_named_tuples_and_dataclasses_are_trees_everywhere() -> None:
    ranks.run(2, own_classes)


class Stretches(nn.Module):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sub_(0.1)


def chain_in_place() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        Stretches(),
        nn.Linear(8, 8),
        nn.ELU(inplace=True),
    ]
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()


def in_place() -> None:
    with hpcomm.init(pp=2) as mesh:
        numbers = torch.Generator().manual_seed(1)
        x, y = torch.randn(6, 8, dtype=torch.float64, generator=numbers), torch.arange(6) % 4
        reference = chain_in_place()
        loss = CROSS(reference(x), y)
        loss.backward()
        for schedule, places in (("1f1b", [3]), ("zb1p", [1]), ("interleaved_1f1b", [1, 3, 5]), ("zbv", [1, 3, 5])):
            pipe = hpcomm.Pipeline(
                chain_in_place(), mesh=mesh, num_microbatches=2, loss_fn=CROSS, schedule=schedule, split_at=places
            )
            for _ in range(2):
                pipe.zero_grad()
                torch.testing.assert_close(pipe.step(x, target=y), loss.detach())
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, msg=name)
                torch.testing.assert_close(pipe.eval_step(x, target=y), loss.detach())


def test_a_stage_may_begin_with_a_layer_that_works_in_place() -> None:
    ranks.run(2, in_place)


class Adds(nn.Module):
    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return x + skipped


def in_place_beside_a_skip() -> None:
    with hpcomm.init(pp=3) as mesh:
        layers = {
            "a": nn.Linear(8, 8),
            "b": nn.ReLU(inplace=True),
            "c": nn.Linear(8, 8),
            "d": Adds(),
            "e": nn.Linear(8, 4),
        }
        chain = hpcomm.Chain(layers, skips={"d": ["a"]})
        pipe = hpcomm.Pipeline(chain, mesh=mesh, num_microbatches=2, loss_fn=CROSS, split_at=[1, 3])
        with pytest.raises(RuntimeError, match="in-place"):
            pipe.step(torch.randn(6, 8), target=torch.arange(6) % 4)


def test_a_value_that_another_stage_takes_as_well_is_not_changed_unseen() -> None:
    ranks.run(3, in_place_beside_a_skip)
