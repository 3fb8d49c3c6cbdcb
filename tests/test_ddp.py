"""DistributedDataParallel: gradients equal one process, equal bits on all ranks, and the hook does the work."""

from __future__ import annotations

import os
import signal

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import hpcomm
from hpcomm.ddp import lane
from hpcomm.ddp.attached import install


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def shard(rank: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return (
        torch.randn(samples, 12, generator=generator, dtype=torch.float64),
        torch.randn(samples, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def one_process(world: int) -> list[torch.Tensor]:
    whole = model()
    shards = [shard(r) for r in range(world)]
    loss_of(whole(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards])).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def over_a_part() -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # gloo's connections may be half made still; a rank that left now would fail the other's start
    group = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        return ""
    wrapped = hpcomm.DistributedDataParallel(model(), process_group=group)
    x, y = shard(dist.get_rank() - 1)
    loss_of(wrapped(x), y).backward()
    for p, expected in zip(wrapped.parameters(), one_process(2), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(hpcomm.SchemaMismatch) as caught:
        hpcomm.DistributedDataParallel(nn.Linear(2, dist.get_rank()), process_group=group)
    return str(caught.value)


def test_a_part_of_the_job_is_told_by_global_ranks() -> None:
    for message in ranks.run(3, over_a_part)[1:]:
        assert "rank 1 has 'weight (1, 2)" in message
        assert "rank 2 has 'weight (2, 2)" in message


def train(world: int, bucket_cap_mb: float) -> list[torch.Tensor]:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=bucket_cap_mb)
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        x, y = shard(mesh.rank)
        for _ in range(3):  # torch rebuilds its buckets after the first step
            wrapped.zero_grad()
            loss_of(wrapped(x), y).backward()
        return [p.grad for p in wrapped.parameters() if p.grad is not None]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.001])
def test_gradients_equal_one_process(world: int, bucket_cap_mb: float) -> None:
    gradients = ranks.run(world, train, world, bucket_cap_mb)
    for reduced, expected in zip(gradients[0], one_process(world), strict=True):
        torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def count_operations() -> int:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        lane = mesh.lane(mesh.ranks("dp"), "gradient")

        def issued() -> int:
            probe = lane.all_reduce(torch.zeros(1), async_op=True)
            probe.wait()
            return probe.sequence

        before = issued()
        x, y = shard(mesh.rank)
        loss_of(wrapped(x), y).backward()
        return issued() - before - 1


def test_the_reduction_is_ours() -> None:
    """Without the hook, torch reduces on its own group and the gradient lane stays unused."""
    assert ranks.run(2, count_operations) == [1, 1]


def accumulate() -> list[torch.Tensor]:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        x, y = shard(mesh.rank)
        with wrapped.no_sync():
            loss_of(wrapped(x), y).backward()
        loss_of(wrapped(x), y).backward()
        return [p.grad / 2 for p in wrapped.parameters() if p.grad is not None]


def test_no_sync_accumulates() -> None:
    for reduced, expected in zip(ranks.run(2, accumulate)[1], one_process(2), strict=True):
        torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)


def over_a_process_group() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    dist.barrier()  # see over_a_part
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    wrapped = hpcomm.DistributedDataParallel(model(), process_group=group)
    x, y = shard(dist.get_rank() - 1)
    loss_of(wrapped(x), y).backward()
    return [p.grad for p in wrapped.parameters() if p.grad is not None]


def test_over_any_process_group_without_a_mesh() -> None:
    results = ranks.run(3, over_a_process_group)
    assert results[0] == []
    for reduced, expected in zip(results[2], one_process(2), strict=True):
        torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)


def attached() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    stock = nn.parallel.DistributedDataParallel(model())
    hpcomm.attach(stock)
    with pytest.raises(RuntimeError, match="can only be called once"):
        install(stock, lane.lane_over(dist.group.WORLD, torch.device("cpu")), "gloo")
    x, y = shard(dist.get_rank())
    loss_of(stock(x), y).backward()
    return [p.grad for p in stock.parameters() if p.grad is not None]


def test_attach_to_a_stock_object() -> None:
    for reduced, expected in zip(ranks.run(2, attached)[0], one_process(2), strict=True):
        torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)


def user_hook() -> bool:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)

        def zero(_: object, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - torch reads annotations
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(torch.zeros_like(bucket.buffer()))
            return future

        wrapped.register_comm_hook(None, zero)
        x, y = shard(mesh.rank)
        loss_of(wrapped(x), y).backward()
        return all(bool((p.grad == 0).all()) for p in wrapped.parameters() if p.grad is not None)


def test_a_hook_of_the_user_wins() -> None:
    assert ranks.run(2, user_hook) == [True, True]


def uneven_inputs() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        x, y = shard(mesh.rank)
        alone = model()
        loss_of(alone(x), y).backward()
        with wrapped.join():
            for _ in range(0 if mesh.rank == 0 else 3):
                wrapped.zero_grad()
                loss_of(wrapped(x), y).backward()
                for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
                    assert q.grad is not None
                    # The other one adds nothing, and is counted.
                    torch.testing.assert_close(p.grad, q.grad / 2, rtol=1e-12, atol=1e-12)
        assert all((p.grad is None) == (mesh.rank == 0) for p in wrapped.parameters())


def test_join_with_a_rank_that_has_no_input() -> None:
    ranks.run(2, uneven_inputs)


def half_precision() -> torch.Tensor:
    with hpcomm.init(dp=2) as mesh:
        layer = nn.Linear(4, 1, bias=False).half()
        wrapped = hpcomm.DistributedDataParallel(layer, mesh=mesh)
        # 40000 on each rank: the sum overflows fp16, the average does not.
        wrapped(torch.full((1, 4), 200.0).half()).mul(200).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad


def test_fp16_is_averaged_without_overflow() -> None:
    assert bool((ranks.run(2, half_precision)[0] == 40000).all())


def another_model() -> None:
    with hpcomm.init(dp=3) as mesh:
        layers = model()
        if mesh.rank == 1:
            layers[2] = nn.Linear(33, 8).double()
        hpcomm.DistributedDataParallel(layers, mesh=mesh)


def test_a_rank_with_another_model() -> None:
    for outcome in ranks.run(3, another_model, expect_failure=True):
        assert outcome.exception == "SchemaMismatch"
        assert "rank 0 has '2.weight (7, 33)" in outcome.message
        assert "rank 1 has '2.weight (8, 33)" in outcome.message


def killed_while_others_reduce() -> None:
    with hpcomm.init(dp=3) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        x, y = shard(mesh.rank)
        for _ in range(3):  # torch's own exchange of bucket sizes, in the second step, is gloo's and says no rank
            loss_of(wrapped(x), y).backward()
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hpcomm.RankFailed, match="rank 1 is gone: its "):  # and not: no heartbeat
            loss_of(wrapped(x), y).backward()


def test_a_killed_rank_ends_the_backward_of_the_others() -> None:
    outcomes = ranks.run(3, killed_while_others_reduce, expect_failure=True)
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]


def wrong_arguments() -> None:
    with hpcomm.init(dp=2) as mesh:
        with pytest.raises(hpcomm.InvalidArgument, match="not both"):
            hpcomm.DistributedDataParallel(model(), mesh=mesh, process_group=dist.group.WORLD)
        with pytest.raises(hpcomm.InvalidArgument, match="attach\\(\\) takes a DistributedDataParallel, got Linear"):
            hpcomm.attach(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    ranks.run(2, wrong_arguments)
