"""Random numbers of losses, hooks, parametrizations; what verify() and measure() leave behind; what replicas share."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import hpcomm
from hpcomm.pipeline.randomness import Draws, kept


def batch(seed: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def linears(number: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(number)])


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output + torch.randn_like(output), target)


def draws_in_the_loss(pp: int, schedule: str, dropout: bool) -> list[float]:
    with hpcomm.init(pp=pp) as mesh:
        torch.manual_seed(mesh.rank)
        model = linears()
        model.insert(1, nn.Dropout(0.5) if dropout else nn.Tanh())
        pipe = hpcomm.Pipeline(
            copy.deepcopy(model), mesh=mesh, num_microbatches=2, loss_fn=noisy, seed=3, schedule=schedule,
            deterministic=True,
        )  # fmt: skip
        before = torch.get_rng_state()
        losses = [float(pipe.step(batch(1), target=batch(2))) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        pipe.step_number = 0
        assert float(pipe.step(batch(1), target=batch(2))) == losses[0] != losses[1]
        hpcomm.verify(pipe, model, batch(1), target=batch(2))
        assert pipe.step_number == 1
        # In evaluation the program's own numbers, as in a layer.
        pipe.eval().eval_step(batch(1), target=batch(2))
        assert torch.equal(torch.get_rng_state(), before) == (mesh.rank != pp - 1)
        return losses


@pytest.mark.parametrize("dropout", [False, True])
def test_a_loss_draws_the_same_on_every_mesh(dropout: bool) -> None:
    (alone,) = ranks.run(1, draws_in_the_loss, 1, "1f1b", dropout)
    for schedule in ("1f1b", "zb1p"):
        assert ranks.run(2, draws_in_the_loss, 2, schedule, dropout) == [alone] * 2


def test_all_generators_are_seeded_and_left_as_they_were() -> None:
    """A mesh of GPUs has two: a layer may draw on its host as well."""
    host, device = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    before = [host.get_state(), device.get_state()]

    def drawn(step: int) -> list[float]:
        Draws((host, device), 3, step, 0).enter(1, 2)
        return [float(torch.rand(1, generator=generator)) for generator in (host, device)]

    def fails() -> None:
        with kept((host, device)):
            first = drawn(0)
            assert drawn(0) == first
            assert not set(drawn(1)) & set(first)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert all(map(torch.equal, [host.get_state(), device.get_state()], before))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight


class DropConnect(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return functional.dropout(weight, 0.5, self.training)


def parametrized(kind: str, name: str) -> nn.Sequential:
    model = linears(2)
    for layer in model:
        if kind == "spectral":
            parametrizations.spectral_norm(layer, name)
        else:
            parametrize.register_parametrization(layer, name, Counted() if kind == "counted" else DropConnect())
    return model


def parametrizations_run_once(kind: str, name: str, schedule: str) -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(
            parametrized(kind, name), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss, schedule=schedule
        )
        counters = [part for part in pipe.module.modules() if isinstance(part, Counted)]
        before = [part.calls for part in counters]
        pipe.step(batch(1), target=batch(2))
        assert [part.calls - count for part, count in zip(counters, before, strict=True)] == [2] * len(counters)
        buffers = [buffer.clone() for buffer in pipe.module.buffers()]
        hpcomm.verify(pipe, parametrized(kind, name), batch(1), target=batch(2))
        assert all(map(torch.equal, pipe.module.buffers(), buffers))


PARAMETRIZED = [
    ("counted", "weight"),
    ("counted", "bias"),
    ("drop", "weight"),
    ("drop", "bias"),
    ("spectral", "weight"),
]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize(("kind", "name"), PARAMETRIZED)
def test_a_parametrization_runs_once_in_a_forward(kind: str, name: str, schedule: str) -> None:
    ranks.run(2, parametrizations_run_once, kind, name, schedule)


def hooks_added_later(schedule: str) -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss, schedule=schedule)
        pipe.step(batch(1), target=batch(2))
        assert not any(stage.draws for stage in pipe._local_stages.values())
        torch.zeros(1, requires_grad=True).register_hook(print)  # no layer's
        pipe.step(batch(1), target=batch(2))
        assert not any(stage.draws for stage in pipe._local_stages.values())
        for layer in pipe.module:
            layer.register_forward_hook(lambda module, _, out: functional.dropout(out, 0.5, module.training))
        losses = []
        for _ in range(2):
            pipe.step_number = 5
            losses.append(float(pipe.step(batch(1), target=batch(2))))
        assert losses[0] == losses[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_what_a_hook_draws_that_was_added_later_is_seeded(schedule: str) -> None:
    ranks.run(2, hooks_added_later, schedule)


class Features(nn.Module):
    """Random features that are in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(8, 8), persistent=False)
        self.register_buffer("kept", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x @ self.projection + self.kept.sum())  # type: ignore[no-any-return]


class Average(nn.Module):
    """Computes with a buffer that it moves."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)
        self.register_buffer("filled", None, persistent=False)
        self.register_buffer("wide", torch.ones(1, 8).expand(6, 8), persistent=False)
        self.register_buffer("sparse", torch.eye(8).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.filled = x.detach()
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x * (1 + self.mean) * self.wide[: len(x)] @ self.sparse  # type: ignore[no-any-return]


def averages(pp: int, persistent: bool, same: bool) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Average(persistent), nn.Linear(8, 8), Average(persistent), nn.Linear(8, 8))

    with hpcomm.init(dp=-1, pp=pp) as mesh:
        made = model()
        made[2].filled = torch.ones(2 + mesh.rank)  # a cache that some ranks have filled
        pipe = hpcomm.Pipeline(made, mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        pipe.step(batch(1), target=batch(2))
        before = {name: buffer.to_dense().clone() for name, buffer in pipe.module.named_buffers()}
        difference = hpcomm.verify(pipe, made if same else model(), batch(1), target=batch(2)).max_relative_difference
        assert difference < 1e-5
        assert pipe.step_number == 1
        after = dict(pipe.module.named_buffers())
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name].to_dense()) for name in before)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_verify_starts_from_the_buffers_and_leaves_them(persistent: bool, same: bool) -> None:
    ranks.run(2, averages, 2, persistent, same)


def test_replicas_may_have_filled_different_caches() -> None:
    # The averages of replicas differ, which one process has not: only the start is of interest.
    ranks.run(2, caches_of_replicas)


def caches_of_replicas() -> None:
    with hpcomm.init(dp=2) as mesh:
        model = nn.Sequential(Average(persistent=False), nn.Linear(8, 8))
        model[0].filled = torch.ones(3) if mesh.rank == 0 else None
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        pipe.step(batch(mesh.rank), target=batch(2))


def replicas_of_features() -> list[list[float]]:
    with hpcomm.init(dp=2) as mesh:
        torch.manual_seed(mesh.rank)
        model = nn.Sequential(Features(), nn.Linear(8, 4))
        own = [buffer.sum().item() for buffer in model.buffers()]
        hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=functional.cross_entropy)
        return [own, [buffer.sum().item() for buffer in model.buffers()]]


def test_replicas_start_with_equal_buffers_also_of_those_that_are_not_saved() -> None:
    (first, made), (_, other) = ranks.run(2, replicas_of_features)
    assert first == made == other


def refused(what: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        loss = functional.mse_loss(output, target)
        return loss * 1j if what == "complex" else (loss, float(what))

    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=loss_fn)
        words = "a loss is real" if what == "complex" else f"returned the weight {float(what)}"
        with pytest.raises(hpcomm.InvalidArgument, match=words):
            pipe.step(batch(1), target=batch(2))


@pytest.mark.parametrize("what", ["inf", "nan", "-1", "complex"])
def test_losses_that_mean_nothing_are_refused(what: str) -> None:
    ranks.run(1, refused, what)


def measured_wrong(how: str) -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        with torch.set_grad_enabled(how != "no_grad"), pytest.raises(hpcomm.InvalidArgument, match="measure"):
            pipe.measure(batch(1), target=batch(2), steps=3 if how == "no_grad" else 0)
        pipe.step(batch(1), target=batch(2))


@pytest.mark.parametrize("how", ["no_grad", "no steps"])
def test_a_measurement_of_nothing_is_refused(how: str) -> None:
    ranks.run(1, measured_wrong, how)


def arguments_of_other_kinds() -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(
            linears(), mesh=mesh, num_microbatches=torch.tensor(2), loss_fn=functional.mse_loss, split_at=iter([2]),
            whole=(name for name in ()),
        )  # fmt: skip
        assert pipe.num_microbatches == 2
        assert len(list(pipe.module.children())) == (2 if mesh.rank == 0 else 1)
        pipe.step(batch(1), target=batch(2))


def test_iterators_and_whole_numbers_of_other_types_are_taken() -> None:
    ranks.run(2, arguments_of_other_kinds)


def on_another_default_device() -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        x, y = batch(1), batch(2)
        with torch.device("meta"):
            loss = pipe.step(x, target=y)
            pipe.measure(x, target=y)
            hpcomm.clip_grad_norm_(pipe, 1.0)
        assert loss.device.type == "cpu"


def test_the_default_device_of_a_program_is_its_own() -> None:
    ranks.run(2, on_another_default_device)


def scaled_by_torch() -> None:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        with pytest.raises(hpcomm.InvalidArgument, match=r"takes an hpcomm\.GradScaler\(mesh\), got torch\.amp"):
            pipe.step(batch(1), target=batch(2), scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


def test_torchs_scaler_is_refused() -> None:
    ranks.run(2, scaled_by_torch)


def dropped_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with hpcomm.init() as mesh:
                pipe = hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
                pipe.step(batch(1), target=batch(2))
            del pipe, mesh
            gc.collect()
    assert [str(warning.message) for warning in seen if warning.category is ResourceWarning] == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_dropped_pipeline_leaves_no_file_open() -> None:
    ranks.run(1, dropped_without_a_warning)


def microbatches_of_a_bool() -> None:
    with hpcomm.init() as mesh, pytest.raises(hpcomm.InvalidArgument, match="num_microbatches=True"):
        hpcomm.Pipeline(linears(), mesh=mesh, num_microbatches=True, loss_fn=functional.mse_loss)


def test_a_bool_is_no_number_of_microbatches() -> None:
    ranks.run(1, microbatches_of_a_bool)
