"""Data parallelism on a GPU equals one process; no step makes the host wait; a step can be captured into a graph."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from gpu_tools import blocking_calls, host_never_waits, mesh_on, one_and_two, run, synchronize, traced
from torch import nn

import hpcomm


def model(device: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 65), nn.Tanh(), nn.Linear(65, 7), nn.Tanh(), nn.Linear(7, 3)).to(device, dtype)


def shard(rank: int, device: str, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank + 1000 * salt)
    x = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randn(4, 3, generator=generator, dtype=torch.float64).to(device)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def one_process(world: int, salt: int = 0) -> list[torch.Tensor]:
    whole = model("cpu")
    shards = [shard(r, "cpu", salt) for r in range(world)]
    loss_of(whole(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards])).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]


def require_one_process(results: list[list[torch.Tensor]], salt: int = 0) -> None:
    for mine in results:
        for reduced, expected in zip(mine, one_process(len(results), salt), strict=True):
            torch.testing.assert_close(reduced, expected, rtol=1e-10, atol=1e-12)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def train(device: str, bucket_cap_mb: float, views: bool) -> list[torch.Tensor]:
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(
            model(device), mesh=mesh, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=views
        )
        x, y = shard(mesh.rank, device)
        for _ in range(3):  # torch rebuilds its buckets after the first step
            wrapped.zero_grad()
            loss_of(wrapped(x), y).backward()
        return gradients(wrapped)


@one_and_two
@pytest.mark.parametrize(("bucket_cap_mb", "views"), [(25, False), (0.001, True)])
def test_gradients_equal_one_process(device: str, world: int, bucket_cap_mb: float, views: bool) -> None:
    require_one_process(run(device, world, train, bucket_cap_mb, views))


def half_precision(device: str) -> list[torch.Tensor]:
    """Averages of values near the largest float16: a sum before the division would be infinite."""
    with mesh_on(device, dp=-1) as mesh:
        layer = nn.Linear(64, 64, bias=False).to(device, torch.float16)
        wrapped = hpcomm.DistributedDataParallel(layer, mesh=mesh)
        (wrapped(torch.eye(64, device=device, dtype=torch.float16)) * (40_000.0 + 1024 * mesh.rank)).sum().backward()
        return gradients(wrapped)


@one_and_two
def test_the_average_of_large_half_precision_gradients(device: str, world: int) -> None:
    expected = sum(40_000.0 + 1024 * rank for rank in range(world)) / world
    for (gradient,) in run(device, world, half_precision):
        assert bool((gradient == expected).all()), gradient.unique()


def narrow(device: str) -> list[torch.Tensor]:
    """Gradients that travel as bfloat16, scaled before they are cast, and are looked at for infinities."""
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(
            model(device, torch.float32), mesh=mesh, grad_dtype=torch.bfloat16, check_finite=True
        )
        x, y = (part.float() for part in shard(mesh.rank, device))
        for _ in range(2):
            wrapped.zero_grad()
            loss_of(wrapped(x), y).backward()
        result = gradients(wrapped)
        wrapped.zero_grad()
        with pytest.raises((hpcomm.InvalidArgument, RuntimeError), match=r"has an infinity or a NaN"):
            (loss_of(wrapped(x), y) * (float("inf") if mesh.rank == mesh.size - 1 else 1.0)).backward()
        return result


@one_and_two
def test_gradients_that_are_cast_and_checked(device: str, world: int) -> None:
    for mine in run(device, world, narrow):
        for reduced, expected in zip(mine, one_process(world), strict=True):
            torch.testing.assert_close(reduced, expected.float(), rtol=0.02, atol=1e-3)


def attached(device: str) -> list[torch.Tensor]:
    with mesh_on(device, dp=-1) as mesh:
        stock = nn.parallel.DistributedDataParallel(model(device), process_group=mesh.group("dp"))
        hpcomm.attach(stock)
        x, y = shard(mesh.rank, device)
        for _ in range(2):
            stock.zero_grad()
            loss_of(stock(x), y).backward()
        return gradients(stock)


@one_and_two
def test_attach_to_stock_ddp(device: str, world: int) -> None:
    require_one_process(run(device, world, attached))


def attached_without_a_mesh(device: str) -> list[torch.Tensor]:
    """A program that knows nothing of hpcomm but one line."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    stock = nn.parallel.DistributedDataParallel(model(device))
    hpcomm.attach(stock)
    x, y = shard(dist.get_rank(), device)
    loss_of(stock(x), y).backward()
    result = gradients(stock)
    dist.destroy_process_group()
    return result


@pytest.mark.multirank
def test_attach_without_a_mesh(device: str) -> None:
    require_one_process(run(device, 2, attached_without_a_mesh))


def accumulated(device: str) -> list[torch.Tensor]:
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(device), mesh=mesh)
        x, y = shard(mesh.rank, device)
        with wrapped.no_sync():
            loss_of(wrapped(x), y).backward()
        loss_of(wrapped(x), y).backward()
        return [gradient / 2 for gradient in gradients(wrapped)]


@one_and_two
def test_no_sync_accumulates(device: str, world: int) -> None:
    require_one_process(run(device, world, accumulated))


def trained(device: str) -> list[torch.Tensor]:
    with mesh_on(device, dp=-1) as mesh:
        module = model(device)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, bucket_cap_mb=0.001)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        for step in range(20):
            x, y = shard(mesh.rank, device, salt=step)
            optimizer.zero_grad()
            loss_of(wrapped(x), y).backward()
            optimizer.step()
        return [p.detach().cpu() for p in module.parameters()]


def test_training_equals_one_process(device: str) -> None:
    require_training(device, 1)


@pytest.mark.multirank
def test_training_on_two_ranks_equals_one_process(device: str) -> None:
    require_training(device, 2)


def require_training(device: str, world: int) -> None:
    whole = model("cpu")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(20):
        shards = [shard(r, "cpu", salt=step) for r in range(world)]
        optimizer.zero_grad()
        loss_of(whole(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards])).backward()
        optimizer.step()
    for parameters in run(device, world, trained):
        for mine, expected in zip(parameters, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-8, atol=1e-10)


def quiet_steps(device: str) -> list[str]:
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(device), mesh=mesh, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        x, y = shard(mesh.rank, device)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(wrapped(x), y).backward()
            optimizer.step()

        for _ in range(13):  # in its first ten, torch's DDP waits for events to time itself
            step()
        synchronize(device)
        with host_never_waits(device):
            step()
        return blocking_calls(traced(device, step))


@one_and_two
def test_no_hidden_synchronization(device: str, world: int) -> None:
    assert run(device, world, quiet_steps) == [[]] * world


class Resting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rest = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, *, all_of_it: bool = False) -> torch.Tensor:
        return self.used(x) + (self.rest(x) if all_of_it else 0.0)


def kept_gradients(device: str) -> None:
    """What no rank uses keeps its gradient, which no host waits for; what one rank uses is averaged."""
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Resting().to(device), mesh=mesh, find_unused_parameters=True)
        x, rest = torch.full((2, 4), mesh.rank + 1.0, device=device), wrapped.module.rest.weight
        rest.grad = torch.arange(16.0, device=device).view(4, 4) + mesh.rank
        before = rest.grad.clone()

        def step() -> None:
            wrapped.module.used.weight.grad = None
            wrapped(x).sum().backward()

        for _ in range(13):
            step()
        synchronize(device)
        with host_never_waits(device):
            step()
        assert torch.equal(rest.grad, before)
        average = sum(2.0 * (rank + 1) for rank in range(mesh.size)) / mesh.size
        torch.testing.assert_close(wrapped.module.used.weight.grad.cpu(), torch.full((4, 4), average))
        wrapped(x, all_of_it=mesh.rank == 0).sum().backward()
        expected = sum(before - mesh.rank + rank for rank in range(mesh.size)) + 2.0
        torch.testing.assert_close(rest.grad, expected / mesh.size)


@one_and_two
def test_gradients_that_no_rank_uses_stay(device: str, world: int) -> None:
    run(device, world, kept_gradients)


def missing_gradients(device: str) -> None:
    """A parameter that none of the ranks reaches, or one of them, and that has no gradient here."""
    with mesh_on(device, dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Resting().to(device), mesh=mesh, find_unused_parameters=True)
        x, rest = torch.full((2, 4), mesh.rank + 1.0, device=device), wrapped.module.rest.weight
        for step in range(4):
            wrapped.zero_grad()
            wrapped(x, all_of_it=step % 2 == 1 and mesh.rank == 0).sum().backward()
            if step % 2 == 0:
                assert rest.grad is None
            else:
                torch.testing.assert_close(rest.grad.cpu(), torch.full((4, 4), 2.0 / mesh.size))


@one_and_two
def test_a_gradient_that_is_nowhere_stays_none(device: str, world: int) -> None:
    run(device, world, missing_gradients)


class Deep(Resting):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, *, all_of_it: bool = False) -> torch.Tensor:
        return self.last(self.used(x)) + (self.rest(x) if all_of_it else 0.0)


def replaced_gradients(device: str) -> None:
    """Another parameter's hook puts a tensor in place of a gradient that rests here while its average is on its way."""
    with mesh_on(device, dp=-1) as mesh:
        module = Deep().to(device)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, find_unused_parameters=True, bucket_cap_mb=1e-5)
        x, rest = torch.ones(2, 4, device=device), module.rest.weight

        def replace(_: torch.Tensor) -> None:
            rest.grad = torch.full((4, 4), 99.0, device=device)

        module.used.weight.register_post_accumulate_grad_hook(replace)
        for reaching in (0, None):  # the rank whose backward reaches it
            wrapped.zero_grad()
            had = [torch.full((4, 4), 10.0 + rank) for rank in range(mesh.size)]
            rest.grad = had[mesh.rank].to(device, copy=True)
            wrapped(x, all_of_it=mesh.rank == reaching).sum().backward()
            expected = had[mesh.rank] if reaching is None else (sum(had) + 2.0) / mesh.size
            if mesh.size == 1:  # nothing is reduced, and the hook's word is the last
                expected = torch.full((4, 4), 99.0)
            torch.testing.assert_close(rest.grad.cpu(), expected)


@one_and_two
def test_a_resting_gradient_that_is_replaced_meanwhile(device: str, world: int) -> None:
    run(device, world, replaced_gradients)


def converted(device: str) -> list[torch.Tensor]:
    """Through another dtype and device and back: autograd gives the parameters other accumulators."""
    with mesh_on(device, dp=-1) as mesh:
        x, y = shard(mesh.rank, device)
        module = model(device)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, bucket_cap_mb=0.001)
        loss_of(wrapped(x), y).backward()
        wrapped.zero_grad()
        if device == "cpu":
            module.to(torch.complex128).to(torch.float64)
        else:
            module.cpu().to(device)
        loss_of(wrapped(x), y).backward()
        return gradients(wrapped)


@one_and_two
def test_gradients_of_a_model_that_was_elsewhere(device: str, world: int) -> None:
    require_one_process(run(device, world, converted))


def divided_by_hand(device: str) -> None:
    """Parts of averages, and on how many ranks a parameter was used, of buckets that are reduced one by one."""
    with mesh_on(device, dp=-1) as mesh:
        module = Resting().to(device)
        wrapped = hpcomm.DistributedDataParallel(
            module, mesh=mesh, find_unused_parameters=True, shard_optimizer=True, bucket_cap_mb=1e-5
        )
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=0.5)
        x = torch.full((2, 4), mesh.rank + 1.0, device=device)
        before = [p.detach().clone() for p in module.parameters()]
        with wrapped.no_sync():
            wrapped(x, all_of_it=False).sum().backward()
        for call in (wrapped.start_reduction, wrapped.finish_reduction):
            for bucket in range(wrapped.buckets):
                call(bucket)
        optimizer.step()
        average = sum(2.0 * (rank + 1) for rank in range(mesh.size)) / mesh.size
        for name, was, now in zip(["used", "rest"], before, module.parameters(), strict=True):
            torch.testing.assert_close(now, was - (0.5 * average if name == "used" else 0.0))


@one_and_two
def test_divided_gradients_by_hand(device: str, world: int) -> None:
    run(device, world, divided_by_hand)


def captured(_: str) -> list[list[torch.Tensor]]:
    """Gradients after each of three replays with new data."""
    with mesh_on("cuda", dp=-1) as mesh:
        x, y = shard(mesh.rank, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch's notes on graphs ask for: DDP made and warmed up off the default one
            wrapped = hpcomm.DistributedDataParallel(model("cuda"), mesh=mesh, bucket_cap_mb=0.001)
            for _ in range(12):
                wrapped.zero_grad(set_to_none=True)
                loss_of(wrapped(x), y).backward()
        torch.cuda.current_stream().wait_stream(side)
        wrapped.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        mesh.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss_of(wrapped(x), y).backward()
        results = []
        for salt in (1, 2, 3):
            for static, new in zip((x, y), shard(mesh.rank, "cuda", salt), strict=True):
                static.copy_(new)
            graph.replay()
            results.append(gradients(wrapped))
        torch.cuda.synchronize()
        mesh.barrier()
        del graph
        return results


@pytest.mark.cuda
@one_and_two
def test_a_step_in_a_graph_is_replayed_with_new_data(world: int) -> None:
    results = run("cuda", world, captured)
    for i, salt in enumerate((1, 2, 3)):
        require_one_process([mine[i] for mine in results], salt)
