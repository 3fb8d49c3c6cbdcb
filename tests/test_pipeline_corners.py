"""Corners of a Pipeline: wrapped layers, layers that draw on the side, float16 losses, plans without backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hpcomm


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * mask  # type: ignore[no-any-return]


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    plain, masked = nn.Linear(4, 4), Masked()
    if kind == "checkpoint":
        return nn.Sequential(checkpoint_wrapper(plain), checkpoint_wrapper(masked))
    if kind == "compile":
        return nn.Sequential(torch.compile(plain, backend="eager"), torch.compile(masked, backend="eager"))
    if kind == "chain":
        return nn.Sequential(plain, hpcomm.Chain([nn.Tanh(), masked]))
    return nn.Sequential(plain, masked)


def keyword_of_one_layer(kind: str) -> float:
    with hpcomm.init() as mesh:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(4, 4)
        pipe = hpcomm.Pipeline(wrapped(kind), mesh=mesh, num_microbatches=2, loss_fn=mean_square)
        return float(pipe.step(x, mask=mask))


@pytest.mark.parametrize("kind", ["checkpoint", "compile"])
def test_a_keyword_goes_to_the_layer_inside_a_wrapper(kind: str) -> None:
    assert ranks.run(1, keyword_of_one_layer, kind) == pytest.approx(ranks.run(1, keyword_of_one_layer, "plain"))


def test_a_keyword_goes_into_a_chain_inside_a_chain() -> None:
    assert ranks.run(1, keyword_of_one_layer, "chain")[0] > 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x))  # type: ignore[no-any-return]


def drawing(how: str) -> nn.Module:
    torch.manual_seed(0)
    if how == "hook":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].register_forward_hook(lambda _, __, output: nn.functional.dropout(output, 0.5))
        return model
    model = nn.Sequential(nn.Linear(4, 4), Block())
    model.eval()
    model[1].drop.train()
    return model


def draws_again(how: str) -> None:
    with hpcomm.init() as mesh:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        pipe = hpcomm.Pipeline(drawing(how), mesh=mesh, num_microbatches=2, loss_fn=mean_square)
        before = torch.get_rng_state()
        losses = []
        for _ in range(2):
            pipe.step_number = 3
            losses.append(float(pipe.step(x)))
        assert losses[0] == losses[1]
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", ["hook", "a part in training"])
def test_what_a_layer_draws_is_seeded(how: str) -> None:
    ranks.run(1, draws_again, how)


def large_batch() -> float:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).half()
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=lambda output: output.square().mean() + 3)
        return float(pipe.step(torch.zeros(32768, 1, dtype=torch.float16)))


def test_a_loss_in_float16_times_its_samples_does_not_overflow() -> None:
    (loss,) = ranks.run(1, large_batch)
    assert 3 <= loss < 8


def evaluation_after_replan() -> None:
    with hpcomm.init(pp=2) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = hpcomm.Pipeline(model, mesh=mesh, schedule="forward_only", num_microbatches=2, loss_fn=mean_square)
        x = torch.ones(4, 4)
        first = pipe.eval_step(x)
        pipe.replan()
        assert pipe._evaluation is not None
        assert pipe._evaluation.plan is pipe.plan
        assert torch.equal(pipe.eval_step(x), first)


def test_a_plan_without_backwards_can_be_made_anew() -> None:
    ranks.run(2, evaluation_after_replan)


def stages_that_stand_elsewhere() -> hpcomm.plan.Table:
    return hpcomm.plan.parse("rank 0 | 1F0 1B0\nrank 1 | 0F0 0B0")


def test_a_drawn_table_with_another_placement_is_read_back() -> None:
    table = stages_that_stand_elsewhere()
    assert hpcomm.plan.parse(hpcomm.plan.draw(table)) == table


def optimizer_of_names(folder: Path) -> None:
    """What two stages have saved goes on in one process."""
    with hpcomm.init(pp=-1) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=mean_square)
        optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=0.01)
        names = [n for group in optimizer.param_groups for n in group["param_names"]]
        saved: dict[str, Any] = {}
        for file in folder.glob("*.pt") if mesh.size == 1 else ():
            saved |= torch.load(file)
        if saved:
            pipe.load_optimizer_state_dict(optimizer, saved)
        pipe.step(torch.ones(4, 4))
        optimizer.step()
        assert [n for group in optimizer.param_groups for n in group["param_names"]] == names
        torch.save(pipe.optimizer_state_dict(optimizer), folder / f"{mesh.rank} of {mesh.size}.pt")


def test_an_optimizer_made_of_named_parameters_goes_to_another_mesh(tmp_path: Path) -> None:
    ranks.run(2, optimizer_of_names, tmp_path)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    ranks.run(1, optimizer_of_names, tmp_path)


def stage_without_parameters() -> None:
    with hpcomm.init(pp=2) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten())
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, split_at=[1])
        optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=0.1)
        scaler = hpcomm.GradScaler(mesh)
        x = torch.ones(4, 4)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(x, target=x, scaler=scaler).item())
            scaler.unscale_(optimizer)
            assert hpcomm.clip_grad_norm_(pipe, 1.0) > 0.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert losses[1] < losses[0]
        state = pipe.optimizer_state_dict(optimizer)
        assert sorted(state) == (["0.bias", "0.weight"] if mesh.rank == 0 else [])
        pipe.load_optimizer_state_dict(optimizer, state)


def test_a_stage_may_have_no_parameters() -> None:
    ranks.run(2, stage_without_parameters)
