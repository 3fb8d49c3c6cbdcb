"""What models and programs bring along: evaluation, tables, loads from the first rank, accumulation."""

from __future__ import annotations

import copy
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pipeline_models as models
import pytest
import ranks
import torch
import torch.utils.checkpoint
from test_pipeline_schedules import CROSS, make
from torch import nn
from torch.distributed import checkpoint

import hpcomm
from hpcomm.pipeline.deferred import Deferral
from hpcomm.plan import parse, to_csv, zbv

if TYPE_CHECKING:
    from pathlib import Path


def gradients_of(pipe: hpcomm.Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p, _ in pipe.owned_parameters() if p.grad is not None}


# --- Evaluation -------------------------------------------------------------------------------------------------------


def evaluated(schedule: str) -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 3, schedule=schedule)
        last = pipe.plan.num_stages - 1 in pipe.stages
        x, y, keywords = models.shard("rich", mesh.dp.rank, 7)
        model = models.rich()
        for _ in range(2):
            loss, outputs = pipe.eval_step(x, target=y, return_outputs=True, **keywords)
            shards = [models.shard("rich", replica, 7) for replica in range(2)]
            with torch.no_grad():
                parts = [CROSS(model(a, **k), b, reduction="sum") for a, b, k in shards]
            assert math.isclose(loss.item(), sum(parts).item() / 14, rel_tol=1e-12)
            if last:
                torch.testing.assert_close(outputs, model(x, **keywords).detach())
                assert not outputs.requires_grad
            else:
                assert outputs is None
            # Between evaluations, a training step.
            models.require_equal(pipe, "rich", 3)
            pipe.zero_grad()
        with torch.no_grad():  # what users write
            again = pipe.step(x, target=y, **keywords)
        assert torch.equal(again, loss) or math.isclose(again.item(), pipe.eval_step(x, target=y, **keywords).item())
        assert all(p.grad is None for p in pipe.parameters())
        nothing, outputs = pipe.eval_step(x, return_outputs=True, **keywords)
        assert math.isnan(nothing)
        assert (outputs is not None) == last


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b"])
def test_evaluation(schedule: str) -> None:
    ranks.run(4, evaluated, schedule)


def forward_only() -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = make(mesh, "plain", 2, schedule="forward_only")
        x, y, _ = models.shard("plain", 0, 4)
        loss = pipe.eval_step(x, target=y)
        assert math.isclose(loss.item(), CROSS(models.plain()(x), y).item(), rel_tol=1e-12)
        with pytest.raises(hpcomm.InvalidArgument, match="no backwards"):
            pipe.step(x, target=y)


def test_a_schedule_without_backwards() -> None:
    ranks.run(2, forward_only)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class Tied(nn.Sequential):
    """The last layer has the weight of the first."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 8, bias=False))
        self[3].weight = self[0][0].weight


def with_checkpoint(folder: str, dp: int, pp: int, begin: int) -> dict[str, torch.Tensor]:
    """Steps ``begin`` to 5 of 5; begins with what is in the folder, and leaves there what it has after step 3."""
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        pipe = hpcomm.Pipeline(Tied(begin), mesh=mesh, num_microbatches=4 // dp, loss_fn=nn.functional.mse_loss)
        biases = [p for n, p in pipe.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in pipe.named_parameters() if n.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.2}, {"params": biases}], lr=0.05)
        plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def whole() -> dict[str, Any]:
            return {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}

        if begin > 0:
            pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))  # what is there may have gradients already
            before = [p.grad for p in pipe.parameters()]
            state = {**whole(), "step": 0}
            assert all(p.grad is g for p, g in zip(pipe.parameters(), before, strict=True))
            checkpoint.load(state, checkpoint_id=folder)
            pipe.load_state_dict(state["model"])
            pipe.load_optimizer_state_dict(optimizer, state["optimizer"])
            pipe.step_number = state["step"]
            assert pipe.step_number == begin
        data = torch.Generator().manual_seed(5)
        for step in range(5):
            x, y = torch.randn(8, 8, generator=data), torch.randn(8, 8, generator=data)
            if step < begin:
                continue
            rows = slice(mesh.dp.rank * 8 // dp, (mesh.dp.rank + 1) * 8 // dp)
            optimizer.zero_grad()
            pipe.step(x[rows], target=y[rows])
            optimizer.step()
            plan.step()
            if step == 2 and begin == 0:
                checkpoint.save({**whole(), "step": pipe.step_number}, checkpoint_id=folder)
        foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
        with pytest.raises(hpcomm.InvalidArgument, match=r"of shape \(3,\) that is none of this rank's stages"):
            pipe.optimizer_state_dict(foreign)
        kept = pipe.optimizer_state_dict(optimizer)
        name = next(iter(kept))
        with pytest.raises(hpcomm.InvalidArgument, match=f"no state of parameter {name}"):
            pipe.load_optimizer_state_dict(optimizer, {n: e for n, e in kept.items() if n != name})
        return pipe.full_state_dict()


def test_a_checkpoint_goes_on_on_any_mesh(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = ranks.run(2, with_checkpoint, folder, 1, 2, 0)[0]
    for dp, pp in ((1, 2), (1, 1), (2, 2), (1, 4)):
        found = ranks.run(dp * pp, with_checkpoint, folder, dp, pp, 3)[0]
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{name}, dp={dp} pp={pp}")


class Late(nn.Module):
    """A part of it has its first gradient only when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        h: torch.Tensor = self.early(x)
        return self.late(h) if late else h


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.2),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.05),
}


def reached_late(folder: str, kind: str) -> None:
    with hpcomm.init(pp=2) as mesh:

        def new() -> tuple[hpcomm.Pipeline, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = nn.Sequential(Late(), Late())
            pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
            return pipe, OPTIMIZERS[kind](pipe.parameters())

        def train(pipe: hpcomm.Pipeline, optimizer: torch.optim.Optimizer, *steps: int) -> None:
            for step in steps:
                generator = torch.Generator().manual_seed(step)
                x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
                optimizer.zero_grad()
                pipe.step(x, target=y, late=step > 1)
                optimizer.step()

        pipe, optimizer = new()
        train(pipe, optimizer, 0, 1)
        without = {id(p) for p in pipe.parameters() if not optimizer.state.get(p)}
        assert without
        options, calls = copy.deepcopy([g | {"params": None} for g in optimizer.param_groups]), []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
        assert options == [g | {"params": None} for g in optimizer.param_groups]
        assert calls == []
        assert without == {id(p) for p in pipe.parameters() if not optimizer.state.get(p)}
        checkpoint.save(state, checkpoint_id=folder)
        train(pipe, optimizer, 2, 3)
        want = pipe.full_state_dict()
        pipe, optimizer = new()
        state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
        assert not optimizer.state
        checkpoint.load(state, checkpoint_id=folder)
        pipe.load_state_dict(state["model"])
        pipe.load_optimizer_state_dict(optimizer, state["optimizer"])
        train(pipe, optimizer, 2, 3)
        for name, value in pipe.full_state_dict().items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_has_the_state_of_what_had_no_gradient_yet(tmp_path: Path, kind: str) -> None:
    ranks.run(2, reached_late, str(tmp_path / "checkpoint"), kind)


# --- Schedules of the user --------------------------------------------------------------------------------------------

# Stage 2 on rank 0, stages 0 and 1 on rank 1: no built-in schedule does that. W far behind its I, one B among them.
DRAWN = """
rank 0 | 2F0 2F1 2I0 2B1 2F2 2I2 2W2 2W0
rank 1 | 0F0 1F0 0F1 1F1 0F2 1F2 1B0 0I0 1I1 0B1 1W1 1B2 0I2 0W0 0W2
"""


def user_tables(csv: str) -> None:
    with hpcomm.init(pp=2) as mesh:
        for name in models.MODELS:
            models.require_equal(make(mesh, name, 3, schedule=parse(DRAWN)), name, 3)
            models.require_equal(make(mesh, name, 5, schedule=csv), name, 5)
        with pytest.raises(hpcomm.InvalidArgument, match="3 microbatches, num_microbatches is 4"):
            make(mesh, "plain", 4, schedule=parse(DRAWN))
        with pytest.raises(hpcomm.InvalidArgument, match="comes after"):
            make(mesh, "plain", 1, schedule=parse("B0 F0\nF0 B0"))
        with pytest.raises(hpcomm.InvalidArgument, match="'2f2b' is unknown"):
            make(mesh, "plain", 1, schedule="2f2b")
        models.require_equal(make(mesh, "plain", 2), "plain", 2)  # nothing of that hurt the mesh


def test_tables_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(zbv(2, 5)))
    ranks.run(2, user_tables, str(path))


# --- Arguments --------------------------------------------------------------------------------------------------------


def loaded_by_the_first(schedule: str) -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        for name, keywords in (("plain", ()), ("rich", ("mask", "factor"))):
            pipe = make(mesh, name, 3, schedule=schedule, inputs="first", keywords=keywords)
            x, y, given = models.shard(name, mesh.dp.rank, models.samples_of(mesh.dp.rank, 3))
            loss = pipe.step(x, target=y, **given) if 0 in pipe.stages else pipe.step()
            expected_loss, expected, _ = models.one_process(name, 2, 3)
            assert math.isclose(loss.item(), expected_loss, rel_tol=1e-12)
            for key, gradient in gradients_of(pipe).items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_only_the_first_stages_rank_loads(schedule: str) -> None:
    ranks.run(4, loaded_by_the_first, schedule)


class Sometimes(nn.Module):
    """Has no gradient where a replica leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if bool(use > 0) else x


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.inner(x)), use


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Sometimes()

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.layer(*both)


class Halves(nn.Sequential):
    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x, use))


def left_out_at_first() -> None:
    """The second stage has no gradient in the first step of replica 0, whose weight counts there as well."""
    torch.manual_seed(3)
    model = Halves(First(), Unpacked())
    alone = copy.deepcopy(model)
    data = [[(torch.randn(4, models.WIDTH), torch.randn(4, models.WIDTH)) for _ in range(2)] for _ in range(2)]
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(
            model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, whole=["use"], inputs="first",
            keywords=["use"],
        )  # fmt: skip
        for step in range(2):
            x, y = data[mesh.dp.rank][step]
            used = torch.tensor(float(mesh.dp.rank == 1 or step == 1))
            pipe.step(x, target=y, use=used, reduce=step == 1)
        found = {name: p.grad for name, p, _ in pipe.owned_parameters()}
    for replica in range(2):
        for step in range(2):
            x, y = data[replica][step]
            used = torch.tensor(float(replica == 1 or step == 1))
            (nn.functional.mse_loss(alone(x, used), y) / 4).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_a_replica_without_gradients_of_an_accumulating_step() -> None:
    ranks.run(4, left_out_at_first)


def accumulated() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        for schedule in ("zbv", "looped_bfs"):
            pipe = make(mesh, "rich", 2, schedule=schedule)
            batches = [models.shard("rich", 10 * i + mesh.dp.rank, 4 + i) for i in range(3)]
            for i, (x, y, keywords) in enumerate(batches):
                pipe.step(x, target=y, reduce=i == 2, **keywords)
                pipe.eval_step(x, target=y, **keywords)  # leaves what has been accumulated alone
            model = models.rich()
            total = 0
            for i in range(3):
                for replica in range(2):
                    x, y, keywords = models.shard("rich", 10 * i + replica, 4 + i)
                    CROSS(model(x, **keywords), y, reduction="sum").backward()
                    total += len(y)
            for name, parameter, _ in pipe.owned_parameters():
                torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad / total, msg=name)


def test_accumulation_over_steps() -> None:
    ranks.run(4, accumulated)


def test_a_layer_inside_vmap_does_not_defer() -> None:
    layer = nn.Linear(3, 2).double()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias])
    deferral, pending = Deferral(layer), hpcomm._C.Deferred()
    deferral.open(pending)
    pending.taking = True
    torch.vmap(layer)(x).square().sum().backward()
    assert len(pending) == 0
    for parameter, gradient in zip([layer.weight, layer.bias], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        parameter.grad = None
    layer(x).square().sum().backward()
    deferral.open(None)
    assert len(pending) == 1
    assert layer.weight.grad is None
    told: list[torch.Tensor] = []
    pending.compute(told.append)
    assert len(pending) == 0
    assert told[0] is layer.weight
    assert told[1] is layer.bias
    for parameter, gradient in zip([layer.weight, layer.bias], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class ByKeyword(nn.Module):
    """Layers called as their arguments are named, and a keyword argument with a name that a step has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.convolution = nn.Linear(4, 4), nn.Conv1d(3, 3, 1)

    def forward(self, h: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return self.convolution(input=self.linear(input=h)) * inputs[:, None, None]


def called_by_keyword() -> None:
    x, inputs = torch.randn(4, 3, 4, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    with hpcomm.init() as mesh:
        for schedule in ("1f1b", "zb1p"):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(4, 4), ByKeyword()).double()
            model = copy.deepcopy(plain)
            pipe = hpcomm.Pipeline(
                model, mesh=mesh, num_microbatches=2, loss_fn=lambda output: output.square().mean(), schedule=schedule
            )
            loss = pipe.step(x, inputs=inputs)
            assert torch.equal(pipe.eval_step(x, inputs=inputs), loss)
            expected = plain[1](plain[0](x), inputs).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for (name, got), want in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, msg=name)


def test_arguments_by_any_name() -> None:
    ranks.run(1, called_by_keyword)


class Longest(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, : int(lengths.max())]


def ragged() -> list[tuple[int, ...]]:
    with hpcomm.init(pp=2) as mesh:
        model = nn.Sequential(Longest(), nn.Linear(4, 2))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=lambda output: output.mean(), split_at=[1])
        x, lengths = torch.ones(4, 5, 4), torch.tensor([1, 2, 5, 3])
        for _ in range(2):
            _, outputs = pipe.step(x, lengths=lengths, return_outputs=True)
        _, joined = pipe.step(x, lengths=torch.full((4,), 3), return_outputs=True)
        if mesh.pp.rank == 0:
            assert outputs is None
            return []
        assert isinstance(outputs, list)
        return [tuple(output.shape) for output in (*outputs, joined)]


def test_outputs_of_several_lengths_stay_by_microbatch() -> None:
    assert ranks.run(2, ragged)[1] == [(2, 2, 2), (2, 5, 2), (4, 3, 2)]


class Callback(nn.Linear):
    """Prints where its function lies, as a partial or a lambda in a layer's text does."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, then=<function then at 0x{os.getpid():x}>"


def with_addresses() -> None:
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        hpcomm.Pipeline(
            nn.Sequential(Callback(2, 2), nn.Linear(2, 2)), mesh=mesh, num_microbatches=1, loss_fn=torch.Tensor.mean
        )


def test_layers_may_print_addresses() -> None:
    ranks.run(2, with_addresses)


def of_other_rows() -> str:
    with hpcomm.init() as mesh:
        model = nn.Sequential(nn.Bilinear(4, 4, 4), nn.Linear(4, 4))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=4, loss_fn=torch.Tensor.mean)
        with pytest.raises(hpcomm.InvalidArgument) as caught:
            pipe.step(torch.ones(8, 4), torch.ones(4, 4))
        return str(caught.value)


def test_positional_inputs_have_equal_rows() -> None:
    assert "a positional input has 4 rows, the batch 8 samples" in ranks.run(1, of_other_rows)[0]
