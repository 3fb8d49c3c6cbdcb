"""Several Pipelines of one model, on other ranks; and what a step refuses, or verify() finds, about its gradients."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional

import hpcomm


def deep() -> nn.Sequential:
    """Of 8 layers with a buffer that training changes."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(8)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, dtype=torch.float64, generator=draw), torch.randn(
        8, 8, dtype=torch.float64, generator=draw
    )


def whole_batches(mesh: hpcomm.Mesh) -> dict[str, Any]:
    """For a Pipeline: a batch is one microbatch."""
    return {"mesh": mesh, "num_microbatches": 1, "loss_fn": functional.mse_loss}


def trained(pipe: hpcomm.Pipeline, steps: int) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(x, target=y)
        optimizer.step()


def moved(dp: int, first: str, second: str) -> None:
    x, y = batch()
    with hpcomm.init(dp=dp, pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule=first, **options)
        trained(one, 2)
        other = hpcomm.Pipeline(model, schedule=second, **options)
        wanted = one.full_state_dict()
        for name, value in other.full_state_dict().items():
            assert torch.equal(value, wanted[name]), name
        assert other.eval().eval_step(x, target=y) == one.eval().eval_step(x, target=y)
        # The first goes on: what the second has is old, and it says so.
        one.train()
        trained(one, 1)
        for what in (lambda: other.eval_step(x, target=y), other.state_dict, other.full_state_dict):
            with pytest.raises(
                hpcomm.InvalidArgument, match="has trained or loaded them since: the values here are old"
            ):
                what()
        third = hpcomm.Pipeline(model, schedule=second, **options)
        wanted = one.full_state_dict()
        for name, value in third.full_state_dict().items():
            assert torch.equal(value, wanted[name]), name
        other.load_state_dict(wanted)  # is as good
        other.state_dict()
        if second != "forward_only":
            trained(third, 1)
            with pytest.raises(hpcomm.InvalidArgument, match="make a new Pipeline"):
                one.step(x, target=y)


@pytest.mark.parametrize(("first", "second"), [("zbv", "forward_only"), ("1f1b", "zbv"), ("zbv", "1f1b")])
@pytest.mark.parametrize("dp", [1, 2])
def test_another_pipeline_of_the_model_gets_what_was_trained_elsewhere(dp: int, first: str, second: str) -> None:
    ranks.run(2 * dp, moved, dp, first, second)


def made_anew_for_each_evaluation() -> None:
    """Nothing keeps the Pipeline that evaluates."""
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        pipe = hpcomm.Pipeline(model, schedule="zbv", **options)
        for _ in range(3):
            trained(pipe.train(), 1)
            other = hpcomm.Pipeline(model, schedule="forward_only", **options)
            assert other.eval().eval_step(x, target=y) == pipe.eval().eval_step(x, target=y)
            del other
            gc.collect()


def test_a_pipeline_that_is_made_for_each_evaluation_has_the_newest_values() -> None:
    ranks.run(2, made_anew_for_each_evaluation)


def loaded() -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule="zbv", **options)
        other = hpcomm.Pipeline(model, **options)
        torch.manual_seed(1)
        state = {name: torch.rand_like(value.double()).to(value.dtype) for name, value in one.full_state_dict().items()}
        one.load_state_dict(state)
        with pytest.raises(hpcomm.InvalidArgument, match="trained or loaded them since"):
            other.eval_step(x, target=y)
        other.load_state_dict(state)
        assert other.eval().eval_step(x, target=y) == one.eval().eval_step(x, target=y)
        trained(other.train(), 1)
        one.load_state_dict(state)
        again = hpcomm.Pipeline(model, schedule="zbv", **options)  # where it was loaded: nothing is overwritten
        for name, value in again.full_state_dict().items():
            assert torch.equal(value, state[name]), name


def test_what_is_loaded_counts_as_trained() -> None:
    ranks.run(2, loaded)


def averaged_weights(whole: bool) -> None:
    """Loaded into a Pipeline that may only evaluate, while another one trains."""
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule="zbv", **options)
        other = hpcomm.Pipeline(model, **options)
        trained(one, 1)
        averaged = {name: value * 0.5 for name, value in one.full_state_dict().items()}
        averaged |= {name: value for name, value in one.full_state_dict().items() if "num_batches" in name}
        if whole:
            other.load_state_dict(averaged)
            other.eval().eval_step(x, target=y)
        else:
            some = ("0.0.weight", "5.0.weight")  # one of each rank
            other.load_state_dict({name: averaged[name] for name in some}, strict=False)
            with pytest.raises(hpcomm.InvalidArgument, match="the values here are old"):
                other.eval_step(x, target=y)
        # It has some layers on the same ranks: they are averages now, and the first Pipeline's others are not.
        with pytest.raises(hpcomm.InvalidArgument, match="the values here are old"):
            one.step(x, target=y)
        if whole:
            one.load_state_dict(averaged)
            assert one.eval().eval_step(x, target=y) == other.eval().eval_step(x, target=y)


@pytest.mark.parametrize("whole", [True, False])
def test_other_values_in_a_pipeline_whose_are_old_make_the_first_ones_old(whole: bool) -> None:
    ranks.run(2, averaged_weights, whole)


class Tied(nn.Module):
    """Of an embedding's kind: its weight is the other's."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


def a_shared_trunk() -> None:
    """Two heads, one of them tied to the trunk's first layer: its weight is on both ranks there, and on one here."""
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(3)
        trunk = [nn.Linear(8, 8).double() for _ in range(3)]
        tied, plain = Tied(trunk[0]), nn.Linear(8, 8).double()
        options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "loss_fn": functional.mse_loss, "split_at": [2]}
        one = hpcomm.Pipeline(nn.Sequential(*trunk, tied), **options)
        trained(one, 1)
        other = hpcomm.Pipeline(nn.Sequential(*trunk, plain), **options)
        trained(other, 1)
        with pytest.raises(hpcomm.InvalidArgument, match="or what they share on other ranks"):
            one.step(x, target=y)
        again = hpcomm.Pipeline(nn.Sequential(*trunk, tied), **options)
        state, wanted = again.full_state_dict(), other.full_state_dict()
        assert torch.equal(state["3.weight"], wanted["0.weight"])
        assert torch.equal(state["0.weight"], wanted["0.weight"])
        assert not torch.equal(state["3.bias"], torch.zeros(8))  # that of the one that had trained
        # In a Pipeline that has the head alone, on one rank of two.
        trained(again, 1)
        alone = hpcomm.Pipeline(nn.Sequential(nn.Linear(8, 8).double(), tied), **(options | {"split_at": [1]}))
        assert torch.equal(alone.full_state_dict()["1.weight"], again.full_state_dict()["0.weight"])


def test_a_weight_that_two_pipelines_have_in_different_modules() -> None:
    ranks.run(2, a_shared_trunk)


def tied_afterwards(first: bool) -> None:
    """A tensor that has taken another one's place counts, not the place."""
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(3)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
        options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "loss_fn": functional.mse_loss}
        one = hpcomm.Pipeline(model, **options)
        trained(one, 2)
        state = one.full_state_dict()
        kept, other = (0, 3) if first else (3, 0)
        model[other].weight = model[kept].weight
        del one
        gc.collect()
        again = hpcomm.Pipeline(model, **options).full_state_dict()
        for name in ("0.weight", "3.weight"):
            assert torch.equal(again[name], state[f"{kept}.weight"])
        for name in ("0.bias", "1.weight", "3.bias"):
            assert torch.equal(again[name], state[name])


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_tied_after_training(first: bool) -> None:
    ranks.run(2, tied_afterwards, first)


class Lazy(nn.Module):
    """With a mask that its first forward fills."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.registers = registers
        self.inner = nn.Linear(8, 8).double()
        if registers:
            self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "mask", None) is None:
            mask = torch.ones(8, dtype=torch.float64)
            if self.registers:
                self.mask = mask
            else:
                self.register_buffer("mask", mask, persistent=False)
        return self.inner(x * self.mask)  # type: ignore[no-any-return]


def filled_lazily(registers: bool) -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(4)
        model = nn.Sequential(*[Lazy(registers) for _ in range(4)])
        options = whole_batches(mesh)
        last = hpcomm.Pipeline(model, **options)
        for schedule in ("zbv", "1f1b", "zbv"):
            trained(last, 1)
            wanted = last.eval_step(x, target=y)
            last = hpcomm.Pipeline(model, schedule=schedule, **options)
            assert last.eval_step(x, target=y) == wanted


@pytest.mark.parametrize("registers", [True, False])
def test_buffers_that_only_some_ranks_have_filled(registers: bool) -> None:
    ranks.run(2, filled_lazily, registers)


def seen_by_one_rank() -> None:
    """Only rank 1 has a layer of both Pipelines in which the loaded values differ."""
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule="zbv", **options)
        other = hpcomm.Pipeline(model, **options)
        trained(one, 1)
        state = one.full_state_dict()
        other.load_state_dict(state | {"5.0.weight": state["5.0.weight"] * 2})
        with pytest.raises(hpcomm.InvalidArgument, match="the values here are old"):
            one.step(x, target=y)  # on both
        other.step(x, target=y)
        own = other.state_dict()
        one.load_state_dict(state)
        other.load_state_dict({name: state[name] for name in own} if mesh.rank == 0 else {}, strict=False)
        with pytest.raises(hpcomm.InvalidArgument, match="the values here are old"):
            other.step(x, target=y)  # which rank 1 has not loaded


def test_what_one_rank_sees_of_loaded_values_counts_on_all() -> None:
    ranks.run(2, seen_by_one_rank)


def loaded_and_dropped() -> None:
    """One rank still has the Pipeline, as its garbage collector may."""
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule="zbv", **options)
        other = hpcomm.Pipeline(model, **options)
        trained(one, 1)
        other.load_state_dict({name: value * 2 for name, value in one.full_state_dict().items()})
        kept = other if mesh.rank == 0 else None
        del other
        gc.collect()
        with pytest.raises(hpcomm.InvalidArgument, match="the values here are old"):
            one.step(x, target=y)
        del kept


def test_what_was_loaded_into_a_pipeline_that_some_ranks_have_dropped() -> None:
    ranks.run(2, loaded_and_dropped)


def measured_in_another() -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, **options)
        other = hpcomm.Pipeline(model, schedule="zbv", **options)
        other.measure(x, target=y, steps=1)
        trained(one, 1)


def test_measuring_another_schedule_is_no_training() -> None:
    ranks.run(2, measured_in_another)


def copies(on_meta: bool) -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        if on_meta:
            with torch.device("meta"):
                model = deep()
        else:
            model = deep()
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(model, schedule="zbv", **options)
        trained(one, 2)
        teacher = copy.deepcopy(model)
        wanted = one.eval().eval_step(x, target=y)
        trained(one.train(), 1)
        other = hpcomm.Pipeline(teacher, **options)
        assert other.eval().eval_step(x, target=y) == wanted
        trained(other.train(), 1)
        one.state_dict()  # the copy's training is none of the model's


def kept_whole() -> None:
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"hpcomm_places" in file.getvalue()
        assert b"hpcomm.pipeline" not in file.getvalue()  # read where there is no hpcomm
        file.seek(0)
        with torch.serialization.safe_globals([set, *{type(part) for part in model.modules()}]):
            hpcomm.Pipeline(
                torch.load(file, weights_only=True), mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss
            )


def test_a_model_that_was_in_a_pipeline_is_saved_as_any() -> None:
    ranks.run(2, kept_whole)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_copy_of_a_model_knows_where_its_values_are(on_meta: bool) -> None:
    ranks.run(2, copies, on_meta)


def left_open() -> None:
    x, y = batch()
    with hpcomm.init(dp=2) as mesh:
        model = nn.Sequential(nn.Linear(8, 8)).double()
        options: dict[str, Any] = {"mesh": mesh, "loss_fn": functional.mse_loss}
        pipe = hpcomm.Pipeline(model, num_microbatches=1, **options)
        pipe.step(x + mesh.rank, target=y, reduce=False)
        del pipe
        gc.collect()
        pipe = hpcomm.Pipeline(model, num_microbatches=2, **options)
        mesh.barrier()
        with pytest.raises(hpcomm.InvalidArgument, match="a sum that a Pipeline, which is gone, has begun"):
            pipe.step(x, target=y)


def ended_by_zero_grad() -> None:
    x, y = batch()
    with hpcomm.init(dp=2) as mesh:
        model = nn.Sequential(nn.Linear(8, 8)).double()
        options: dict[str, Any] = {"mesh": mesh, "loss_fn": functional.mse_loss}
        hpcomm.Pipeline(model, num_microbatches=1, **options).step(x + mesh.rank, target=y, reduce=False)
        gc.collect()
        pipe = hpcomm.Pipeline(model, num_microbatches=2, **options)
        pipe.zero_grad()
        pipe.step(x, target=y)
        functional.mse_loss(model(x), y).backward()  # on top
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sum_that_a_dropped_pipeline_has_begun_is_not_taken_for_whole() -> None:
    ranks.run(2, left_open, expect_failure=False)
    ranks.run(2, ended_by_zero_grad)


def measured_beside() -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(deep(), mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        gradients = [parameter.grad for parameter in pipe.parameters()]
        kept = [gradient.clone() for gradient in gradients]
        pipe.measure(x, target=y, steps=2)
        assert all(parameter.grad is gradient for parameter, gradient in zip(pipe.parameters(), gradients, strict=True))
        assert all(map(torch.equal, gradients, kept))
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
        pipe.step(x, target=y, reduce=False)
        with pytest.raises(hpcomm.InvalidArgument, match=r"measure\(\): a sum begun with reduce=False is open"):
            pipe.measure(x, target=y)
        pipe.step(x, target=y)
        pipe.measure(x, target=y)


def test_measuring_leaves_gradients_and_buffers_alone() -> None:
    ranks.run(2, measured_beside)


class Wrapped(nn.Module):
    """Made for one Pipeline, as those of a decoder's layers are; with a buffer that no state has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Counts(nn.Module):
    """And a cache that only who has computed has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(x.shape[0]), persistent=False)
        if self.training:
            self.seen += 1
        return x + self.seen


def in_wrappers_of_their_own() -> None:
    x, y = batch()
    with hpcomm.init(pp=2) as mesh:
        layers = [nn.Sequential(layer, Counts()) for layer in deep()]
        options = whole_batches(mesh)
        one = hpcomm.Pipeline(nn.Sequential(*map(Wrapped, layers)), schedule="zbv", **options)
        trained(one, 2)
        other = hpcomm.Pipeline(nn.Sequential(*map(Wrapped, layers)), **options)
        assert other.eval().eval_step(x, target=y) == one.eval().eval_step(x, target=y)


def test_what_counts_is_whose_parameters_the_layers_have() -> None:
    ranks.run(2, in_wrappers_of_their_own)


def alike() -> None:
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        pipes = [
            hpcomm.Pipeline(model, mesh=mesh, num_microbatches=count, loss_fn=functional.mse_loss) for count in (1, 2)
        ]
        for pipe in (*pipes, *pipes):
            trained(pipe, 1)


def test_pipelines_with_the_same_places_take_turns() -> None:
    ranks.run(2, alike)


def only_here() -> None:
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss, schedule="zbv")
        with pytest.raises(hpcomm.SchemaMismatch, match="layers that another Pipeline has elsewhere"):
            hpcomm.Pipeline(
                model if mesh.rank == 0 else deep(), mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss
            )


def test_a_model_that_was_in_a_pipeline_on_some_ranks_only_is_told() -> None:
    ranks.run(2, only_here)


def wide_in_one_stage() -> torch.Tensor:
    with hpcomm.init(pp=2) as mesh:
        model = deep()
        model[:4].requires_grad_(False)
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=functional.mse_loss)
        x, y = batch()
        pipe.step(x, target=y)
        return hpcomm.clip_grad_norm_(pipe, 1.0)


def test_the_clipped_norm_is_one_number_also_where_a_stage_is_frozen() -> None:
    first, second = ranks.run(2, wide_in_one_stage)
    assert first.dtype == second.dtype == torch.float64
    assert first == second > 0


def hooks_behind() -> None:
    def look(parameter: torch.Tensor) -> None: ...

    with hpcomm.init(pp=2) as mesh:
        options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "loss_fn": functional.mse_loss}
        model = deep()
        model[1][0].weight.register_post_accumulate_grad_hook(look)
        with pytest.raises(hpcomm.InvalidArgument, match=r"parameter 1\.0\.weight has a hook behind the accumulation"):
            hpcomm.Pipeline(model, **options)
        model[1].requires_grad_(False)
        pipe = hpcomm.Pipeline(model, **options)
        x, y = batch()
        pipe.step(x, target=y)
        mesh.barrier()  # a rank that raises would end the others' step
        next(p for p in pipe.parameters() if p.requires_grad).register_post_accumulate_grad_hook(look)
        with pytest.raises(hpcomm.InvalidArgument, match="given a hook behind the accumulation"):
            pipe.step(x, target=y)


def test_a_hook_that_would_see_parts_of_a_gradient_is_refused() -> None:
    ranks.run(2, hooks_behind)


def clamped_on_the_way() -> None:
    with hpcomm.init(pp=2) as mesh:

        def build() -> nn.Sequential:
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
            model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return model

        x, y = batch()
        pipe = hpcomm.Pipeline(build(), mesh=mesh, num_microbatches=1, loss_fn=functional.mse_loss)
        with pytest.raises(hpcomm.NumericsMismatch, match=r"2\.weight .* those of weight x loss"):
            hpcomm.verify(pipe, build(), x, target=y)


def test_verify_finds_what_is_not_linear_in_the_gradients() -> None:
    ranks.run(2, clamped_on_the_way)
