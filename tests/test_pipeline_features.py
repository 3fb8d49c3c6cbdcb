"""What models and programs bring along: evaluation, tables, loads from the first rank, checkpoints, dropout, AMP."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import pipeline_models as models
import pytest
import ranks
import torch
import torch.utils.checkpoint
from patience import with_patience
from test_pipeline_schedules import CROSS, make
from torch import nn

import hpcomm
from hpcomm import _C
from hpcomm.cli import main as cli
from hpcomm.pipeline import recorder
from hpcomm.pipeline.board import report
from hpcomm.pipeline.deferred import Deferral
from hpcomm.pipeline.partition import cut
from hpcomm.pipeline.recorder import cost_model, seconds_of, with_rest
from hpcomm.plan import parse, to_csv, zbv
from hpcomm.report import Trace
from hpcomm.report import read as report_of

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
                assert [tuple(part.shape for part in parts) for parts in outputs] == [((2,), (2,))] * 3
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
                    assert [type(pair) for _, pair in outputs] == [kind] * 3
                    assert not any(t.requires_grad for _, pair in outputs for t in (pair.first, pair.second))


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


# --- Randomness and recomputation -------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout inside an activation checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)
        self.reentrant = reentrant

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(self.inner(x)), 0.3, training=self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.utils.checkpoint.checkpoint(self.once, x, use_reentrant=self.reentrant)


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for i in range(4) for layer in (Noisy(i % 2 == 0), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH), *layers, nn.Linear(models.WIDTH, models.WORDS)).double()


def dropped(dp: int, pp: int, microbatches: int) -> dict[str, list[torch.Tensor]]:
    """Of two steps with each schedule, the gradients; and verify() agrees."""
    found: dict[str, list[torch.Tensor]] = {}
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        x, y, _ = models.shard("plain", 0, 8)
        x, y = (part.chunk(dp)[mesh.dp.rank] for part in (x, y))
        for schedule in ("1f1b", "zbv", "interleaved_1f1b"):
            pipe = hpcomm.Pipeline(
                noisy(), mesh=mesh, num_microbatches=microbatches, loss_fn=CROSS, schedule=schedule, seed=3
            )
            before = torch.get_rng_state()
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, target=y)
                for name, gradient in gradients_of(pipe).items():
                    found.setdefault(f"{schedule} {name}", []).append(gradient)
            assert torch.equal(torch.get_rng_state(), before)
            report = hpcomm.verify(pipe, noisy(), x, target=y, tolerance=1e-10)
            assert report.compared == 12
    return found


def test_errors_of_a_deferred_layer_keep_their_types() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as raised:
        _C.Deferred().linear(torch.randn(2, 3), layer.weight, layer.bias)
    assert "frame #" not in str(raised.value)  # as torch says it, without a stack of C++

    class Stop(Exception):
        pass

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise Stop

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t), pytest.raises(Stop):
        _C.Deferred().linear(torch.randn(2, 4, requires_grad=True), layer.weight, layer.bias)


def test_dropout_is_the_same_on_every_mesh() -> None:
    alone = ranks.run(1, dropped, 1, 1, 4)[0]
    assert not torch.equal(*alone["1f1b 1.inner.weight"])  # steps differ
    for dp, pp, microbatches in [(2, 1, 2), (1, 2, 4), (2, 2, 2)]:
        for found in ranks.run(dp * pp, dropped, dp, pp, microbatches):
            for name, gradients in found.items():
                for got, want in zip(gradients, alone[name], strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=name)


class Recomputed(nn.Module):
    """A checkpoint whose second forward ends in a layer that is put off: torch ends it there, by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(models.WIDTH, models.WIDTH), nn.GELU(), nn.Linear(models.WIDTH, models.WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Shifted:
    """A loss with a parameter of one element in it, reached by views alone."""

    def __init__(self) -> None:
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        return loss + self.shift.view(()), float(len(target))


def recomputed() -> list[float]:
    """Of each schedule that divides backwards; the last loss is Shifted, whose gradient counts microbatches."""
    shifts = []
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(*(Recomputed() for _ in range(4)), nn.Linear(models.WIDTH, models.WORDS)).double()
        x, y = torch.randn(8, models.WIDTH, dtype=torch.float64), torch.randint(0, models.WORDS, (8,))
        for schedule in ("zb1p", "zbv"):
            loss = Shifted()
            pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=4, loss_fn=loss, schedule=schedule)
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, target=y)
            report = hpcomm.verify(pipe, model, x, target=y, tolerance=1e-10)
            assert report.compared == 18
            if loss.shift.grad is not None:
                shifts.append(loss.shift.grad.item())
    return shifts


def test_a_divided_backward_recomputes_checkpoints_that_end_in_a_deferred_layer() -> None:
    shifts = [shift for found in ranks.run(2, recomputed) for shift in found]
    # 1 for each microbatch, whatever those before it have done to their gradients: 4 in the reference on each rank, and
    # 4 in each of 3 steps where the last stage is.
    assert sorted(shifts) == [4.0, 4.0, 16.0, 16.0]


# --- Bits -------------------------------------------------------------------------------------------------------------


def bits(pp: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    with hpcomm.init(pp=pp) as mesh:
        # DualPipe-V runs a later microbatch's B before an earlier one's W: another order of summation.
        for schedule in [s for s in models.SCHEDULES if s != "dualpipev"]:
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(6)]
            pipe = hpcomm.Pipeline(
                nn.Sequential(*layers), mesh=mesh, num_microbatches=5, loss_fn=nn.functional.mse_loss, schedule=schedule
            )
            generator = torch.Generator().manual_seed(1)
            pipe.step(torch.randn(15, 8, generator=generator), target=torch.randn(15, 8, generator=generator))
            found[schedule] = gradients_of(pipe)
    return found


def test_the_same_bits_for_every_split_and_schedule() -> None:
    want = ranks.run(1, bits, 1)[0]["1f1b"]
    for pp in (1, 2, 3):
        results = ranks.run(pp, bits, pp)
        for schedule in results[0]:
            merged = {name: grad for found in results for name, grad in found[schedule].items()}
            assert merged.keys() == want.keys()
            for name, gradient in want.items():
                assert torch.equal(merged[name], gradient), (pp, schedule, name)


# --- Mixed precision --------------------------------------------------------------------------------------------------


def mixed(pp: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    with hpcomm.init(pp=pp) as mesh:
        for schedule in ("1f1b", "zb1p"):
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)]
            model = nn.Sequential(nn.Conv1d(3, 1, 1), nn.Flatten(), *layers)
            pipe = hpcomm.Pipeline(
                model, mesh=mesh, num_microbatches=3, loss_fn=nn.functional.mse_loss, schedule=schedule
            )
            generator = torch.Generator().manual_seed(1)
            x, y = torch.randn(6, 3, 8, generator=generator), torch.randn(6, 8, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(x, target=y)
            found[schedule] = gradients_of(pipe)
            assert all(gradient.dtype == torch.float32 for gradient in found[schedule].values())
    return found


def test_autocast_gives_the_bits_of_one_process() -> None:
    want = ranks.run(1, mixed, 1)[0]["1f1b"]
    for pp in (1, 2):
        results = ranks.run(pp, mixed, pp)
        for schedule in ("1f1b", "zb1p"):
            merged = {name: grad for found in results for name, grad in found[schedule].items()}
            assert merged.keys() == want.keys()
            for name, gradient in want.items():
                assert torch.equal(merged[name], gradient), (pp, schedule, name)


class Overflowing(nn.Module):
    """A gradient that is too large for float16 where the scale is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: torch.where(gradient.abs() > 1e2, math.inf, gradient))
        return x * 1.0


def scaled(dp: int, pp: int, schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), Overflowing(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
        pipe = hpcomm.Pipeline(
            nn.Sequential(*layers), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, schedule=schedule
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = hpcomm.GradScaler(mesh, init_scale=2.0**16, growth_interval=3)
        scales = []
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(8, 8, generator=generator).chunk(dp)[mesh.dp.rank] for _ in range(2))
            optimizer.zero_grad()
            pipe.step(x, target=y, scaler=scaler)
            if step % 2:
                scaler.unscale_(optimizer)
                hpcomm.clip_grad_norm_(pipe, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, pipe.full_state_dict()


def scaled_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Overflowing(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scales = []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@pytest.mark.parametrize(("dp", "pp", "schedule"), [(1, 1, "1f1b"), (2, 2, "1f1b"), (1, 2, "zbv")])
def test_a_loss_scale_takes_the_course_of_one_process(dp: int, pp: int, schedule: str) -> None:
    scales, state = scaled_alone()
    assert len(set(scales)) > 3  # it went down and up
    for found, whole in ranks.run(dp * pp, scaled, dp, pp, schedule):
        assert found == scales
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-5, msg=name)


def sparse_embedding() -> None:
    with hpcomm.init(pp=2) as mesh:
        embedding = nn.Embedding(5, 4, sparse=True)
        model = nn.Sequential(OrderedDict(embed=embedding, head=nn.Linear(4, 4)))
        with pytest.raises(hpcomm.InvalidArgument, match=r"embed \(Embedding\) has sparse=True"):
            hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=CROSS)
        embedding.requires_grad_(False)
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=CROSS)
        pipe.step(torch.arange(4), target=torch.arange(4))


def test_a_sparse_embedding_is_refused_when_the_pipeline_is_made() -> None:
    ranks.run(2, sparse_embedding)


def embedding_inside_a_call() -> None:
    class Sparse(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.weight, sparse=True)

    mesh = hpcomm.init()
    model = nn.Sequential(Sparse(4, 5), nn.Linear(4, 4))
    pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=CROSS)
    pipe.step(torch.arange(4), target=torch.arange(4))


def test_a_sparse_gradient_is_called_that() -> None:
    (outcome,) = ranks.run(1, embedding_inside_a_call, expect_failure=True)
    assert "parameter 0: its gradient is sparse" in outcome.message


# --- Errors -----------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("a layer broke")
        return x


def broken() -> None:
    mesh = hpcomm.init(pp=2)
    layers = OrderedDict((f"l{i}", nn.Linear(2, 2)) for i in range(4))
    pipe = hpcomm.Pipeline(
        nn.Sequential(layers), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.mse_loss, schedule="zbv"
    )
    if 1 in pipe.stages:
        pipe.stages[1].add_module("breaks", Breaks())
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_an_error_tells_every_rank_the_action() -> None:
    first, second = ranks.run(2, broken, expect_failure=True)
    assert (first.exception, second.exception) == ("PeerError", "ValueError")
    assert "in forward of microbatch 2, stage 1" in first.message
    assert "ValueError: a layer broke" in first.message


def short_target() -> None:
    mesh = hpcomm.init(pp=2)
    layers = [nn.Linear(2, 2) for _ in range(2)]
    pipe = hpcomm.Pipeline(nn.Sequential(*layers), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.ones(8, 2), target=torch.ones(4, 2))  # microbatches of 2 and 1 rows, which would broadcast


def test_a_target_that_would_broadcast_is_refused() -> None:
    outcomes = ranks.run(2, short_target, expect_failure=True)
    # One may still leave the Pipeline's construction when the other one refuses.
    assert {outcome.exception for outcome in outcomes} <= {"InvalidArgument", "PeerError"}
    for outcome in outcomes:
        assert "target: 4 rows for a batch of 8 samples in 4 microbatches" in outcome.message


class Hangs(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def hanging(limit: float) -> None:
    mesh = hpcomm.init(pp=3, timeout=limit)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    pipe = hpcomm.Pipeline(nn.Sequential(*layers), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    if mesh.rank == 1:
        pipe.stages[1].add_module("hangs", Hangs(2 * limit))
    mesh.barrier()
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_a_time_out_tells_where_every_rank_stands() -> None:
    def attempt(limit: float) -> None:
        first, _, third = ranks.run(3, hanging, limit, expect_failure=True, timeout=60)
        for outcome in (first, third):
            assert outcome.exception in {"TimedOut", "PeerError"}
            assert "rank 0: in backward of microbatch 0, stage 0" in outcome.message
            assert "rank 1: in forward of microbatch 0, stage 1" in outcome.message
            assert "computes: all that it needs has been issued" in outcome.message
            assert "rank 2: in forward of microbatch 0, stage 2" in outcome.message
            assert "waits for rank 1 to issue SEND act mb 0" in outcome.message

    with_patience(attempt, 2.0)  # within which all have to stand where they hang


def test_the_circle_of_a_time_out() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2)
    # Rank 0 stands at its first backward, rank 1 at its second forward: no run of this plan gets there.
    kinds = [[(a.kind.name, a.microbatch) for a in plan.actions(rank)] for rank in range(2)]
    places = {0: kinds[0].index(("BACKWARD", 0)), 1: kinds[1].index(("FORWARD", 0))}
    text = report(plan, {0: 0, 1: places[1]})
    assert "rank 1: in forward of microbatch 0, stage 1" in text
    assert "waits for rank 0 to issue" in text
    assert "in a circle" not in text
    swapped = plan.copy()
    swapped.lists = [swapped.lists[0][::-1], swapped.lists[1]]  # its last action first
    kinds = [(a.kind.name, a.microbatch) for a in swapped.actions(0)]
    text = report(swapped, {0: kinds.index(("BACKWARD", 0)), 1: places[1]})
    assert text.endswith("in a circle: rank 0 -> rank 1 -> rank 0")


def traced(folder: Path) -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 4, schedule="zbv")
        for _ in range(3):
            models.require_equal(pipe, "rich", 4)
        with pipe.traced(folder):
            models.require_equal(pipe, "rich", 4)
            x, y, keywords = models.shard("rich", mesh.dp.rank, 8)
            pipe.step(x, target=y, reduce=False, **keywords)


def require_whole(trace: Trace) -> None:
    """Every action, message and bucket is there, with times that follow each other."""
    operations = trace.plan.operations
    for step in trace.steps.values():
        for rank, found in step.items():
            actions = trace.plan.actions(rank)
            assert [timed.op for timed in found.actions] == [action.op for action in actions]
            assert all(t.begin <= t.begin + t.waited <= t.end + 1e-9 for t in found.actions)
            assert sorted(m.op for m in found.messages) == sorted(a.op for a in actions if a.kind.name == "RECV")
            assert math.isclose(
                sum(m.end - m.begin for m in found.messages), sum(t.waited for t in found.actions), abs_tol=1e-6
            )
            for bucket in found.buckets:
                assert rank in operations[bucket.op].participants
                times = bucket[1:] if len(operations[bucket.op].participants) > 1 else bucket[1:3]
                assert list(times) == sorted(times)
                assert found.begin <= times[0] <= times[-1] <= found.end


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_trace_is_reported_beside_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    env = {"HPCOMM_TRACE": str(tmp_path), "HPCOMM_CPU_TRANSPORT": transport}
    ranks.run(4, traced, tmp_path / "two", env=env)
    picture, chrome = tmp_path / "step.svg", tmp_path / "steps.json"
    assert cli(["trace", "report", str(tmp_path), "--svg", str(picture), "--chrome", str(chrome)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 2: ")
    assert "\n   3 " in text  # a row per rank
    for title in ("     edge   for  messages      wait    bubble      wire", "   bucket       KiB     queue      pack"):
        assert title in text
    for row in ("0->2   act", "3->1  grad", "(ranks 0,1)", "tie 0"):
        assert text.count(row) >= 1, row
    trace = report_of(tmp_path)
    assert sorted(trace.steps) == [0, 1, 2]
    require_whole(trace)
    reduced = [op for op, o in enumerate(trace.plan.operations) if o.kind.name in ("REDUCE", "TIED")]
    for step in trace.steps.values():
        assert {b.op for found in step.values() for b in found.buckets} == set(reduced)
    # Steps by hand; one of them reduces nothing.
    two = report_of(tmp_path / "two")
    require_whole(two)
    assert [any(found.buckets for found in step.values()) for _, step in sorted(two.steps.items())] == [True, False]
    drawn = ElementTree.parse(picture).getroot()
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    (planned,) = [title for title in titles if title and title.startswith("planned, with the measured computations")]
    assert titles.index("measured") > titles.index(planned)
    computations = 4 * 4 * 3  # stages, microbatches, kinds
    events = json.loads(chrome.read_text())["traceEvents"]
    assert len(events) == 3 * 2 * computations  # steps, replicas
    assert cli(["trace", "report", str(tmp_path), "--step", "7"]) == 2
    assert cli(["trace", "report", str(tmp_path / "none")]) == 2
    rows = tmp_path / "rank-0.jsonl"
    seat, *steps = rows.read_text().splitlines()
    earlier = [{name: value for name, value in json.loads(step).items() if name != "rest"} for step in steps]
    rows.write_text("\n".join([seat, *map(json.dumps, earlier)]))
    assert cli(["trace", "report", str(tmp_path)]) == 2
    assert "recorded by an earlier hpcomm" in capsys.readouterr().err


def test_ranks_that_have_fewer_cores_share_them_in_the_simulation() -> None:
    seconds = {(0, "FORWARD"): 1.0, (0, "BACKWARD"): 2.0}
    two = [("a", [0, 1], 1), ("a", [0, 1], 1), ("b", [4, 7], 1), ("b", [4, 7], 1)]
    crowd = {
        "none for those that communicate": two,
        "a core for all threads": [("a", [0, 1, 2, 3], 1)] * 2,
        "several threads each": [("a", [0, 1, 2, 3], 2)] * 2,
        "four ranks on two cores": [("a", [0, 1], 1)] * 4,
        "pinned to a core each": [("a", [rank], 1) for rank in range(4)],
        "two threads each": [("a", [0, 1, 2, 3], 2)] * 4,
        "more threads than cores": [("a", [0, 1], 8)] * 4,
        "hosts that differ": [("a", [0], 1), ("a", [0], 1), ("b", [0, 1], 1), ("b", [0, 1], 1)],
        "hosts in turn": [("a", [0], 1), ("b", [0], 1), ("a", [0], 1), ("b", [0], 1)],
    }
    found = {name: cost_model(1, seconds, seats) for name, seats in crowd.items()}
    copies = [name for name, costs in found.items() if costs.host_copies]
    assert copies == ["none for those that communicate", "pinned to a core each"]
    assert {name: (costs.ranks_per_host, costs.cores_per_host) for name, costs in found.items()} == {
        "none for those that communicate": (2, 2),
        "a core for all threads": (1, 0),
        "several threads each": (1, 0),
        "four ranks on two cores": (4, 2),
        "pinned to a core each": (4, 4),
        "two threads each": (4, 2),
        "more threads than cores": (4, 1),
        "hosts that differ": (1, 0),
        "hosts in turn": (1, 0),
    }
    plan = hpcomm.plan.compile("1f1b", pp=1, dp=4, num_microbatches=2)
    assert plan.simulate(found["a core for all threads"]).makespan_seconds == 6
    assert plan.simulate(found["four ranks on two cores"]).makespan_seconds == 12
    assert plan.simulate(found["more threads than cores"]).makespan_seconds == 24


def test_where_cores_are_shared_it_is_cpu_time_that_counts() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, dp=1, num_microbatches=2)
    forward = next(i for i, op in enumerate(plan.operations) if (op.kind.name, op.stage) == ("FORWARD", 1))
    send = next(i for i, op in enumerate(plan.operations) if op.kind.name == "TRANSFER")
    # Operation, seconds without waits, CPU seconds: another rank had the core once.
    actions = [(forward, 3.0, 1.0), (forward, 5.0, 1.5), (forward, 19.0, 2.0), (send, 4.0, 0.25), (send, 8.0, 0.75)]
    f, issue = (1, "FORWARD"), (-1, "ISSUE")
    assert seconds_of(plan, actions, [("a", [0, 1, 2, 3], 1)] * 2) == {f: 9.0, issue: 6.0}  # a core for each thread
    assert seconds_of(plan, actions, [("a", [0, 1], 1)] * 2) == {f: 1.5, issue: 0.5}  # for each that computes
    assert seconds_of(plan, actions, None) == {f: 9.0}  # not on CPUs: the host runs ahead
    assert seconds_of(plan, actions, [("a", [0], 1)] * 2) == {f: 1.5, issue: 0.5}
    assert seconds_of(plan, actions, [("a", [0, 1], 2)] * 2) == {f: 5.0, issue: 6.0}  # CPU time of one thread of two
    costs = cost_model(2, {f: 1.5, issue: 0.5, (-1, "STEP"): 0.25}, [("a", [0], 1)] * 2)
    assert (costs.stages[1].forward_seconds, costs.cores_per_host) == (1.5, 1)
    assert (costs.issue_seconds, costs.step_seconds) == (0.5, 0.25)
    # What else the process did was for its communications.
    step = [(forward, 3.0, 1.0), (send, 4.0, 0.25), (send, 8.0, 0.75)]
    rest = with_rest(plan, step, 3.0, [("a", [0], 1)] * 2)
    assert list(rest) == [(forward, 3.0, 1.0), (send, 4.0, 1.75), (send, 8.0, 2.25)]
    # But where the simulated messages share the cores themselves.
    assert list(with_rest(plan, step, 3.0, [("a", [0, 1], 1)] * 2)) == step


def test_what_a_wait_for_a_message_computes_is_not_the_actions_but_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nanoseconds of the clock, and of the CPU: this thread's, the process's.
    clocks = {"monotonic_ns": 0, "thread_time_ns": 0, "process_time_ns": 0}

    def passes(clock: int, thread: int, process: int) -> None:
        for name, more in zip(clocks, (clock, thread, process), strict=True):
            clocks[name] += more

    monkeypatch.setattr(recorder, "time", SimpleNamespace(**{name: partial(clocks.get, name) for name in clocks}))
    times = recorder.Times()
    begin = times.begin()
    for op in range(2):
        start = times.clocks()
        waiting = times.clocks()
        passes(1000, 40, 45)  # it slept, received the message, and a lane's thread did something else
        times.waited(7 + op, waiting)
        passes(300, 200, 200)
        times.action(op, start)
    issued = times.now()
    passes(100, 3, 8)
    times.step(begin, issued, times.now(), [])
    assert times.actions == [(0, 0, 1000, 1300, 200), (1, 1300, 1000, 2600, 200)]
    assert times.messages == [(7, 0, 1000), (8, 1300, 2300)]
    assert (times.inside, times.rest) == (483, 98)


def replanned() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 4, schedule="zbv", reduce="end", bucket_cap_mb=0.0002)
        x, y, keywords = models.shard("rich", mesh.dp.rank, 8)
        first = pipe.plan
        costs = pipe.measure(x, target=y, **keywords)
        assert all(p.grad is None for p in pipe.parameters())
        assert len(costs.stages) == 4
        for stage in costs.stages:
            assert min(stage.forward_seconds, stage.input_grad_seconds, stage.weight_grad_seconds) > 0
        assert min(costs.issue_seconds, costs.step_seconds) > 0
        # What goes from rank to rank, there and back; stages 1 and 2 are on one rank.
        sizes = costs.message_bytes
        assert {(0, 1), (1, 0), (2, 3), (3, 2)} <= sizes.keys()
        assert not {(1, 2), (2, 1)} & sizes.keys()
        assert min(sizes.values()) > 0
        quick = pipe.plan.simulate(costs).makespan_seconds
        costs.link_bytes_per_second = sizes[0, 1]  # a second for each message
        assert pipe.plan.simulate(costs).makespan_seconds > quick + 4
        assert pipe.replan(costs=costs, reduce="eager") is pipe.plan
        assert pipe.plan.hash != first.hash
        models.require_equal(pipe, "rich", 4)
        with pytest.raises(hpcomm.InvalidArgument, match="use one of eager, slack, end"):
            pipe.replan(reduce="never")
        models.require_equal(pipe, "rich", 4)


def test_a_plan_is_made_anew_from_what_was_measured() -> None:
    ranks.run(4, replanned)


def wrong_stage() -> str:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 3, schedule="zbv")
        x, y, keywords = models.shard("rich", mesh.dp.rank, 6)
        good = hpcomm.verify(pipe, models.rich(), x, target=y, tolerance=1e-10, **keywords)
        assert good.compared == len(pipe.parameter_names)
        if 2 in pipe.stages:  # the third of four stages is wrong on purpose
            next(iter(pipe.stages[2].children())).inner.weight.register_hook(lambda gradient: gradient * 1.01)
        with pytest.raises(hpcomm.NumericsMismatch) as caught:
            hpcomm.verify(pipe, models.rich(), x, target=y, **keywords)
        return str(caught.value)


def test_verify_names_the_first_parameter_of_a_wrong_stage() -> None:
    stages = cut(models.rich(), 4)
    wrong = f"{next(name for name, _ in stages[2].named_children())}.inner.weight"
    for message in ranks.run(4, wrong_stage):
        assert f"gradient of {wrong} differs from one process by 0.01" in message
