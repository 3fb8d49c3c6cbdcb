"""The numbers of one process, to the bit where that is promised: dropout, checkpoints, autocast, loss scales."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pipeline_models as models
import pytest
import ranks
import torch
import torch.utils.checkpoint
from test_pipeline_schedules import CROSS
from torch import nn

import hpcomm
from hpcomm import _C
from hpcomm.pipeline import stage

# --- Randomness and recomputation -------------------------------------------------------------------------------------


def gradients_of(pipe: hpcomm.Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p, _ in pipe.owned_parameters() if p.grad is not None}


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


class Shifted(nn.Linear):
    """With a parameter of one element, which the loss reaches by views alone."""

    def __init__(self) -> None:
        super().__init__(models.WIDTH, models.WORDS)
        self.shift = nn.Parameter(torch.zeros(1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        return loss + self.shift.view(()), float(len(target))


def recomputed() -> list[float]:
    """Of each schedule that divides backwards; the shift's gradient counts microbatches."""
    shifts = []
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        head = Shifted()
        model = nn.Sequential(*(Recomputed() for _ in range(4)), head).double()
        x, y = torch.randn(8, models.WIDTH, dtype=torch.float64), torch.randint(0, models.WORDS, (8,))
        for schedule in ("zb1p", "zbv"):
            pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=4, loss_fn=head.loss, schedule=schedule)
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, target=y)
            shifts += [p.grad.item() for name, p in pipe.named_parameters() if name == "4.shift" and p.grad is not None]
            report = hpcomm.verify(pipe, model, x, target=y, tolerance=1e-10)
            assert report.compared == 19
    return shifts


def test_a_divided_backward_recomputes_checkpoints_that_end_in_a_deferred_layer() -> None:
    shifts = [shift for found in ranks.run(2, recomputed) for shift in found]
    # 1 for each of 4 microbatches, whatever those before it have done to their gradients; of 8 samples.
    assert shifts == [0.5, 0.5]


def of_itself() -> str:
    """Compared with the very model whose layers the stages are; then with backwards that double what they are given."""
    with hpcomm.init(pp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[1].eval()  # a norm that is frozen in a model that trains
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        pipe = hpcomm.Pipeline(
            model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, split_at=[1], schedule="zb1p"
        )
        assert hpcomm.verify(pipe, model, x, target=y, tolerance=1e-10).compared == 6
        assert [layer.training for layer in model] == [True, False, True, True]
        right = stage.run_backward

        def wrong(roots: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
            right(roots, [2 * seed for seed in seeds])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "run_backward", wrong)
            with pytest.raises(hpcomm.NumericsMismatch) as caught:
                hpcomm.verify(pipe, model, x, target=y)
        return str(caught.value)


def test_a_model_is_verified_by_itself() -> None:
    for message in ranks.run(2, of_itself):
        assert "gradient of 0.weight differs from one process by 3 relative" in message


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


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.mse_loss(output, target, reduction="sum"), target.numel()


def scaled(dp: int, pp: int, schedule: str, samples: list[int], loss_fn: Any) -> tuple[list[float], dict[str, Any]]:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), Overflowing(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
        pipe = hpcomm.Pipeline(
            nn.Sequential(*layers), mesh=mesh, num_microbatches=2, loss_fn=loss_fn, schedule=schedule
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = hpcomm.GradScaler(mesh, init_scale=2.0**16, growth_interval=3)
        scales = []
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            count = samples[step % len(samples)]
            x, y = (torch.randn(count, 8, generator=generator).chunk(dp)[mesh.dp.rank] for _ in range(2))
            optimizer.zero_grad()
            pipe.step(x, target=y, scaler=scaler)
            if step % 2:
                scaler.unscale_(optimizer)
                hpcomm.clip_grad_norm_(pipe, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, pipe.full_state_dict()


def scaled_alone(samples: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Overflowing(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scales = []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(samples[step % len(samples)], 8, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@pytest.mark.parametrize(
    ("dp", "pp", "schedule", "samples", "loss_fn"),
    [
        (1, 1, "1f1b", [8], nn.functional.mse_loss),
        (2, 2, "1f1b", [8], nn.functional.mse_loss),
        (1, 2, "zbv", [8], nn.functional.mse_loss),
        (2, 1, "1f1b", [11], nn.functional.mse_loss),  # shards of 6 and 5, neither is any power of two
        (1, 2, "1f1b", [6, 40], nn.functional.mse_loss),  # another size in each step
        (2, 1, "1f1b", [12], token_loss),  # weights count something else than samples
    ],
)
def test_a_loss_scale_takes_the_course_of_one_process(
    dp: int, pp: int, schedule: str, samples: list[int], loss_fn: Any
) -> None:
    scales, state = scaled_alone(samples)
    assert len(set(scales)) > 3  # it went down and up
    for found, whole in ranks.run(dp * pp, scaled, dp, pp, schedule, samples, loss_fn):
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


# --- Strides over a cut -----------------------------------------------------------------------------------------------


class Turn(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.mean(1)


def turned(pp: int) -> dict[str, torch.Tensor]:
    """Cut behind a layer whose output is transposed: masks are drawn, and sums made, in the order of memory."""
    with hpcomm.init(pp=pp) as mesh:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32), Turn(), nn.Dropout(0.5), Mean(), nn.Linear(16, 4)]
        x, y = torch.randn(8, 16, 32), torch.randint(0, 4, (8,))
        found = {}
        for schema in ("per_message", "frozen"):
            pipe = hpcomm.Pipeline(
                nn.Sequential(*layers),
                mesh=mesh,
                num_microbatches=2,
                loss_fn=CROSS,
                deterministic=True,
                schema=schema,
                split_at=[2] if pp > 1 else None,
            )
            found[f"{schema} loss"] = pipe.step(x, target=y)
            found.update({f"{schema} {name}": gradient for name, gradient in gradients_of(pipe).items()})
            pipe.zero_grad()
        return found


def test_a_cut_behind_a_transposed_value_changes_no_bit() -> None:
    (alone,) = ranks.run(1, turned, 1)
    together: dict[str, torch.Tensor] = {}
    for found in ranks.run(2, turned, 2):
        together.update(found)
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.equal(together[name], value), name
