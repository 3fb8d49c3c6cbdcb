"""Pipeline: gradients, loss, norm and state equal one process, for every mesh, schedule and number of microbatches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ranks
import torch
import torch.utils.checkpoint
from torch import nn

import hpcomm


class Pair(nn.Module):
    """A layer whose output is a tree: a tensor that carries a gradient, one that does not, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, tree: Any) -> Any:
        h, kept, mask = tree
        return torch.tanh(self.inner(h)) * mask + kept, kept, mask


class Open(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x.detach() * 0.5, x > 0


class Close(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, tree: Any) -> torch.Tensor:
        return self.head(tree[0])


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def tree_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Open(), Pair(), Pair(), Pair(), Close()).double()


MODELS = {"plain": plain_model, "tree": tree_model}


def shard(replica: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + replica)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def samples_of(replica: int, microbatches: int) -> int:
    return 2 * microbatches + 3 * replica + 1  # uneven shards and microbatches


def reference(name: str, dp: int, microbatches: int) -> tuple[float, dict[str, torch.Tensor], float]:
    model = MODELS[name]()
    shards = [shard(replica, samples_of(replica, microbatches)) for replica in range(dp)]
    x, y = torch.cat([s[0] for s in shards]), torch.cat([s[1] for s in shards])
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, norm.item()


def step(
    name: str, dp: int, pp: int, schedule: str, microbatches: int, options: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor], float]:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        pipe = hpcomm.Pipeline(
            MODELS[name](),
            mesh=mesh,
            schedule=schedule,
            num_microbatches=microbatches,
            loss_fn=nn.functional.cross_entropy,
            **options,
        )
        x, y = shard(mesh.dp.rank, samples_of(mesh.dp.rank, microbatches))
        loss = pipe.step(x, target=y)
        assert loss.shape == ()
        norm = hpcomm.clip_grad_norm_(pipe, 0.1)
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        return loss.item(), gradients, norm.item()


def check(name: str, dp: int, pp: int, schedule: str, microbatches: int, **options: Any) -> None:
    results = ranks.run(dp * pp, step, name, dp, pp, schedule, microbatches, options)
    loss, expected, norm = reference(name, dp, microbatches)
    merged: dict[str, torch.Tensor] = {}
    for rank, (their_loss, gradients, their_norm) in enumerate(results):
        assert their_loss == results[0][0]  # equal bits
        assert their_norm == results[0][2]
        assert math.isclose(their_loss, loss, rel_tol=1e-12)
        assert math.isclose(their_norm, norm, rel_tol=1e-5)  # norms are float32
        for key, gradient in gradients.items():
            if key in merged:
                assert torch.equal(gradient, merged[key]), (rank, key)
            merged[key] = gradient
    assert merged.keys() == expected.keys()
    for key, gradient in expected.items():
        # After clipping, whose factor has float32 precision.
        torch.testing.assert_close(merged[key], gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["plain", "tree"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("dp", "pp", "microbatches"),
    [(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 1), (1, 2, 4), (2, 2, 3), (1, 3, 2), (1, 4, 6), (3, 1, 2)],
)
def test_equals_one_process(name: str, schedule: str, dp: int, pp: int, microbatches: int) -> None:
    check(name, dp, pp, schedule, microbatches)


def test_many_small_buckets() -> None:
    check("plain", 2, 2, "1f1b", 4, bucket_cap_mb=0.0001)


def test_a_frozen_schema() -> None:
    (losses, *first), (same, *last) = ranks.run(2, frozen_steps)
    assert losses == same  # equal bits
    model, expected = plain_model(), []
    for i in range(3):
        x, y = shard(i, 8)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-12)
    for reduced, parameter in zip(first + last, model.parameters(), strict=True):
        torch.testing.assert_close(reduced, parameter.grad, rtol=1e-10, atol=1e-12)


def frozen_steps() -> list[Any]:
    """The loss of each step, and what their gradients add up to."""
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(
            plain_model(), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.cross_entropy, schema="frozen"
        )
        losses = [float(pipe.step(x, target=y)) for x, y in (shard(i, 8) for i in range(3))]
        return [losses, *(p.grad for p in pipe.parameters())]


def test_split_at_decides_the_stages() -> None:
    check("plain", 1, 2, "1f1b", 2, split_at=[1])


def trained(dp: int, pp: int, steps: int) -> dict[str, torch.Tensor]:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        model = plain_model()
        if mesh.rank > 0:  # replicas start with the first one's values, whatever they were built with
            torch.manual_seed(mesh.rank)
            if mesh.dp.rank > 0:
                nn.init.normal_(model[0][0].weight)  # type: ignore[index,arg-type]
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=4, loss_fn=nn.functional.cross_entropy)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for i in range(steps):
            optimizer.zero_grad()
            # The same global batch, cut by replica.
            x, y = shard(i, 16)
            pipe.step(x.chunk(dp)[mesh.dp.rank], target=y.chunk(dp)[mesh.dp.rank])
            hpcomm.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
        return pipe.full_state_dict()


def test_training_equals_one_process_over_steps() -> None:
    alone = ranks.run(1, trained, 1, 1, 12)[0]
    for whole in ranks.run(4, trained, 2, 2, 12):
        assert whole.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-8)


def accumulated() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.cross_entropy)
        batches = [shard(10 * i + mesh.dp.rank, 4 + i) for i in range(3)]

        def gradients() -> list[torch.Tensor]:
            return [p.grad.clone() for p in pipe.parameters() if p.grad is not None]

        for i, (x, y) in enumerate(batches):
            pipe.step(x, target=y, reduce=i == 2)
        together = gradients()

        # Dropped by an optimizer's zero_grad: a later step counts alone.
        pipe.zero_grad()
        pipe.step(batches[0][0], target=batches[0][1], reduce=False)
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(batches[1][0], target=batches[1][1])
        alone = gradients()
        # Without zero_grad, reduced gradients add up as in plain PyTorch.
        pipe.step(batches[1][0], target=batches[1][1])
        return together, alone, gradients()


def test_accumulation() -> None:
    results = ranks.run(4, accumulated)

    def expected(batches: list[int]) -> list[torch.Tensor]:
        model = plain_model()
        shards = [shard(10 * i + replica, 4 + i) for i in batches for replica in range(2)]
        x, y = torch.cat([s[0] for s in shards]), torch.cat([s[1] for s in shards])
        nn.functional.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for got, want in [
        (results[0][0] + results[2][0], expected([0, 1, 2])),
        (results[0][1] + results[2][1], expected([1])),
        (results[0][2] + results[2][2], [2 * g for g in expected([1])]),
    ]:
        for reduced, reference_gradient in zip(got, want, strict=True):
            torch.testing.assert_close(reduced, reference_gradient, rtol=1e-10, atol=1e-12)


def sum_and_weight(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    kept = target != 0  # as a language model ignores padding
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), float(kept.sum())


def weighted() -> tuple[float, list[torch.Tensor]]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=3, loss_fn=sum_and_weight)
        x, y = shard(mesh.dp.rank, 9)
        loss = pipe.step(x, target=y)
        return float(loss), [p.grad for p in pipe.parameters() if p.grad is not None]


def test_a_loss_with_weights() -> None:
    results = ranks.run(4, weighted)
    model = plain_model()
    shards = [shard(replica, 9) for replica in range(2)]
    total, weight = sum_and_weight(model(torch.cat([s[0] for s in shards])), torch.cat([s[1] for s in shards]))
    (total / weight).backward()
    assert math.isclose(results[0][0], total.item() / weight, rel_tol=1e-12)
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for reduced, reference_gradient in zip(results[0][1] + results[2][1], expected, strict=True):
        torch.testing.assert_close(reduced, reference_gradient, rtol=1e-10, atol=1e-12)


def outputs() -> Any:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=3, loss_fn=nn.functional.cross_entropy)
        x, y = shard(0, 7)
        # Each rank passes only what its stage uses.
        first = mesh.pp.rank == 0
        return pipe.step(x if first else None, target=None if first else y, return_outputs=True)[1]


def test_outputs_are_on_the_last_stage() -> None:
    nothing, whole = ranks.run(2, outputs)
    assert nothing is None
    torch.testing.assert_close(whole, plain_model()(shard(0, 7)[0]).detach())


def states() -> tuple[list[str], list[str]]:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=1, loss_fn=nn.functional.cross_entropy)
        whole = pipe.full_state_dict()
        pipe.load_state_dict({name: torch.full_like(value, 2.0) for name, value in whole.items()})
        assert all(bool((value == 2).all()) for value in pipe.state_dict().values())
        return list(pipe.state_dict()), pipe.parameter_names


def test_state_has_the_plain_models_names() -> None:
    (first, names), (second, _) = ranks.run(2, states)
    assert first + second == list(plain_model().state_dict()) == names


def partly_frozen() -> list[str]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        model = plain_model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.cross_entropy)
        x, y = shard(mesh.dp.rank, 4)
        pipe.step(x, target=y)
        return [name for name, p in pipe.named_parameters() if p.grad is None]


def test_frozen_parameters_stay_out_of_it() -> None:
    results = ranks.run(4, partly_frozen)
    assert results[0] == results[1] == ["0.0.weight", "0.0.bias"]
    assert results[2] == results[3] == []


def the_plan() -> tuple[str, int]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=3, loss_fn=nn.functional.cross_entropy)
        return str(pipe.plan), pipe.plan.hash


def test_every_rank_holds_the_same_verified_plan() -> None:
    texts = ranks.run(4, the_plan)
    assert len(set(texts)) == 1
    assert texts[0][0].startswith("rank 0-1 | F0 S0 F1 S1 r0 B0 ")
    assert "B2{R0}" in texts[0][0]


def converted_afterwards() -> None:
    with hpcomm.init(dp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.cross_entropy)
        pipe.module.bfloat16()
        x, y = shard(0, 4)
        with pytest.raises(hpcomm.HpcommError, match="parameters changed since the Pipeline was made"):
            pipe.step(x.bfloat16(), target=y)


def test_a_model_that_is_converted_after_it_was_wrapped() -> None:
    """Smaller gradients in buckets of larger ones: once read and written past their ends."""
    ranks.run(2, converted_afterwards)


def unfrozen_afterwards() -> None:
    with hpcomm.init(dp=2) as mesh:
        model = plain_model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.cross_entropy)
        for parameter in pipe.parameters():
            parameter.requires_grad_(True)
        x, y = shard(0, 4)
        with pytest.raises(hpcomm.InvalidArgument, match="parameters changed since the Pipeline was made"):
            pipe.step(x, target=y)


def test_a_parameter_that_is_unfrozen_later_is_not_left_unreduced() -> None:
    ranks.run(2, unfrozen_afterwards)


class FourTimes(nn.Module):
    """One layer used four times, each under a reentrant checkpoint: its gradient is accumulated in four backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.utils.checkpoint.checkpoint(self.once, x, use_reentrant=True)
        return x

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def ready_more_than_once() -> None:
    with hpcomm.init(dp=2) as mesh:
        model = nn.Sequential(nn.Linear(6, 6), FourTimes(), nn.Linear(6, 3)).double()
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=nn.functional.cross_entropy)
        x, y = shard(0, 4)
        with pytest.raises(hpcomm.HpcommError, match="marked ready twice"):
            pipe.step(x, target=y)


def test_a_gradient_that_changes_after_it_was_ready_is_an_error() -> None:
    """Once reduced while it was still being accumulated."""
    ranks.run(2, ready_more_than_once)


def padding_only() -> list[bool]:
    with hpcomm.init(dp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=1, loss_fn=lambda o, _: (o.sum() * 0, 0.0))
        x, y = shard(0, 4)
        assert math.isnan(pipe.step(x, target=y))
        return [bool((p.grad == 0).all()) for p in pipe.parameters() if p.grad is not None]


def test_weights_that_sum_to_zero_leave_zero_gradients() -> None:
    assert ranks.run(2, padding_only) == [[True] * 12] * 2


def compared() -> tuple[float, str]:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(plain_model(), mesh=mesh, num_microbatches=3, loss_fn=nn.functional.cross_entropy)
        x, y = shard(mesh.dp.rank, 6)
        good = hpcomm.verify(pipe, plain_model(), x, target=y, tolerance=1e-10)
        assert math.isclose(good.loss, good.reference_loss, rel_tol=1e-12)
        assert good.compared == 12

        if mesh.pp.rank == 1:  # a stage whose gradients are wrong on purpose
            pipe.module[-1].weight.register_hook(lambda gradient: gradient * 1.01)
        with pytest.raises(hpcomm.NumericsMismatch) as caught:
            hpcomm.verify(pipe, plain_model(), x, target=y)
        return good.max_relative_difference, str(caught.value)


def test_verify_finds_the_first_parameter_that_differs() -> None:
    for difference, message in ranks.run(4, compared):
        assert 0 < difference < 1e-10
        assert "gradient of 5.weight differs from one process by 0.01" in message
