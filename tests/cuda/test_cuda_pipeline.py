"""Pipelines on a GPU equal one process: one rank, two stages, two replicas; frozen ones are quiet and captured."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu_tools import blocking_calls, host_never_waits, mesh_on, run, sleep, synchronize, traced
from torch import nn

import hpcomm

MESHES = pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"pp": 2}, marks=pytest.mark.multirank, id="pp=2"),
        pytest.param({"dp": 2}, marks=pytest.mark.multirank, id="dp=2"),
    ],
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(10, 4)).double()


def batch(replica: int, device: str, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + replica + 100 * salt)
    x = torch.randn(8, 10, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randn(8, 4, generator=generator, dtype=torch.float64).to(device)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def one_process(replicas: int, salt: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    whole = model()
    shards = [batch(r, "cpu", salt) for r in range(replicas)]
    loss = mse(whole(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards]))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def world_of(axes: dict[str, int]) -> int:
    return axes.get("pp", 1) * axes.get("dp", 1)


def require_one_process(results: list[tuple[float, dict[str, torch.Tensor]]], replicas: int, salt: int = 0) -> None:
    expected_loss, expected = one_process(replicas, salt)
    seen = set()
    for loss, gradients in results:
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
            seen.add(name)
    assert seen == set(expected)


def gradients(pipe: hpcomm.Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in pipe.named_parameters() if p.grad is not None}


def trained(device: str, axes: dict[str, int], options: dict[str, Any]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    results = []
    with mesh_on(device, **axes) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=4, loss_fn=mse, **options)
        for salt in range(3):
            pipe.zero_grad()
            x, y = batch(mesh.dp.rank, device, salt)
            loss = pipe.step(x, target=y)
            assert loss.device.type == device
            results.append((float(loss), gradients(pipe)))
    return results


@MESHES
@pytest.mark.parametrize("options", [{}, {"schema": "frozen", "schedule": "gpipe", "bucket_cap_mb": 0.0001}], ids=str)
def test_steps_equal_one_process(device: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    results = run(device, world_of(axes), trained, axes, options)
    for salt in range(3):
        require_one_process([mine[salt] for mine in results], axes.get("dp", 1), salt)


@pytest.mark.multirank
@pytest.mark.parametrize("schema", ["per_message", "frozen"])
def test_messages_travel_in_16_bits(device: str, schema: str) -> None:
    """tests/test_pipeline_wire.py has the values; here that a GPU casts them, and the sender hears back."""
    options = {"schedule": "eager_1f1b", "schema": schema, "wire_dtype": torch.bfloat16}
    for salt, mine in enumerate(zip(*run(device, 2, trained, {"pp": 2}, options), strict=True)):
        loss, expected = one_process(1, salt)
        assert {seen == pytest.approx(loss, rel=2e-2) for seen, _ in mine} == {True}
        for name, gradient in {name: g for _, found in mine for name, g in found.items()}.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0.1 * float(expected[name].abs().max()))
            assert not torch.equal(gradient, expected[name])


class SometimesSkipped(nn.Module):
    """Decides on the host, as libraries of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and float(torch.rand(1)) < 0.5 else self.inner(x)


def of_some_columns(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Draws on the host and on the device."""
    columns = torch.randperm(output.shape[1])[:2].to(output.device)
    return mse(output + torch.randn_like(output), target) + output[:, columns].square().mean()


def random_states(device: str) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def drawn(device: str, axes: dict[str, int]) -> list[float]:
    def layers() -> nn.Sequential:
        return nn.Sequential(SometimesSkipped(), nn.Dropout(0.5), SometimesSkipped(), *model()).double()

    with mesh_on(device, **axes) as mesh:
        torch.manual_seed(mesh.rank)
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=4, loss_fn=of_some_columns, seed=3)
        x, y = batch(mesh.dp.rank, device)
        before = random_states(device)
        losses = [float(pipe.step(x, target=y)) for _ in range(2)]
        assert all(map(torch.equal, random_states(device), before))
        pipe.step_number = 0
        assert float(pipe.step(x, target=y)) == losses[0] != losses[1]
        hpcomm.verify(pipe, layers(), x, target=y)
        return losses


@MESHES
def test_layers_and_losses_draw_on_the_host_and_on_the_device(device: str, axes: dict[str, int]) -> None:
    assert len(set(map(tuple, run(device, world_of(axes), drawn, axes)))) == 1


def accumulated(device: str, axes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    with mesh_on(device, **axes) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=2, loss_fn=mse)
        x, y = batch(mesh.dp.rank, device)
        pipe.step(x, target=y, reduce=False)
        loss = pipe.step(x, target=y)
        return float(loss), gradients(pipe)


@MESHES
def test_accumulation(device: str, axes: dict[str, int]) -> None:
    require_one_process(run(device, world_of(axes), accumulated, axes), axes.get("dp", 1))


def told_of_other_kinds(device: str) -> None:
    with mesh_on(device, dp=2) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=2, loss_fn=mse)
        x, y = batch(mesh.dp.rank, device)
        pipe.step(x, target=y)
        synchronize(device)
        told = pytest.raises((hpcomm.SchemaMismatch, hpcomm.PeerError), match="1 of 2 ranks reduce their gradients")
        with told:  # at once on a CPU; on a GPU, whose numbers nobody waits for, a little later
            for _ in range(50):
                pipe.step(x, target=y, reduce=mesh.rank == 0)
                time.sleep(0.1)


@pytest.mark.multirank
def test_ranks_that_do_not_all_reduce_are_told(device: str) -> None:
    run(device, 2, told_of_other_kinds)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.never = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.up(x) if x.sum() > 0 else self.down(x)
        return branch


def branching(device: str) -> tuple[set[str], dict[str, torch.Tensor]]:
    with mesh_on(device, dp=2) as mesh:
        torch.manual_seed(0)
        layers = nn.Sequential(Branch(), nn.Linear(10, 4)).double()
        pipe = hpcomm.Pipeline(layers, mesh=mesh, num_microbatches=2, loss_fn=mse)
        x, y = batch(mesh.dp.rank, device)
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(x.abs() if mesh.dp.rank == 0 else -x.abs(), target=y)
        without = {name for name, p in pipe.named_parameters() if p.grad is None}
        return without, gradients(pipe)


@pytest.mark.multirank
def test_what_only_another_replica_reaches_has_its_gradient_here(device: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(Branch(), nn.Linear(10, 4)).double()
    losses = []
    for sign, rank in ((1, 0), (-1, 1)):
        x, y = batch(rank, "cpu")
        losses.append(mse(whole(sign * x.abs()), y))
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    for without, found in run(device, 2, branching):
        assert without == {"0.never.weight", "0.never.bias"}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def clipped(device: str, axes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    with mesh_on(device, **axes) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=2, loss_fn=mse)
        x, y = batch(mesh.dp.rank, device)
        pipe.step(x, target=y)
        norm = hpcomm.clip_grad_norm_(pipe, 0.01)
        hpcomm.verify(pipe, model().to(device), x, target=y, tolerance=1e-8)
        return float(norm), {}


@MESHES
def test_clipping_and_verify(device: str, axes: dict[str, int]) -> None:
    _, expected = one_process(axes.get("dp", 1))
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in expected.values()]))
    for mine, _ in run(device, world_of(axes), clipped, axes):
        assert mine == pytest.approx(norm.item(), rel=1e-5)


def quiet(device: str, axes: dict[str, int]) -> list[str]:
    with mesh_on(device, **axes) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=4, loss_fn=mse, schema="frozen")
        x, y = batch(mesh.dp.rank, device)

        def step() -> None:
            pipe.zero_grad()
            pipe.step(x, target=y)

        for _ in range(3):
            step()
        synchronize(device)
        with host_never_waits(device):
            step()
        return blocking_calls(traced(device, step))


@MESHES
def test_frozen_steps_have_no_hidden_synchronization(device: str, axes: dict[str, int]) -> None:
    world = world_of(axes)
    assert run(device, world, quiet, axes) == [[]] * world


def captured(_: str, axes: dict[str, int], schedule: str, parts: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    with mesh_on("cuda", **axes) as mesh:
        x, y = batch(mesh.dp.rank, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Here, as with torch's DDP: a parameter's gradient is accumulated on the stream on which it was first asked
            # for, and the default one cannot be captured.
            pipe = hpcomm.Pipeline(
                model(), mesh=mesh, num_microbatches=parts, loss_fn=mse, schedule=schedule, schema="frozen"
            )
            for _ in range(3):
                pipe.zero_grad()
                pipe.step(x, target=y)
                pipe.eval_step(x, target=y)
        torch.cuda.current_stream().wait_stream(side)
        pipe.zero_grad()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = pipe.step(x, target=y)
        results = []
        for salt in (1, 2, 3):
            for static, new in zip((x, y), batch(mesh.dp.rank, "cuda", salt), strict=True):
                static.copy_(new)
            graph.replay()
            results.append((float(loss), gradients(pipe)))
            pipe.eval_step(x, target=y)  # whose messages must not come into slots of the graph, nor free them
        torch.cuda.synchronize()
        del graph  # before the mesh closes: NCCL keeps a communicator as long as a graph has operations of it
        return results


@pytest.mark.cuda
@MESHES
@pytest.mark.parametrize(("schedule", "parts"), [("1f1b", 4), ("gpipe", 8)])  # 8: more than a receiver has free slots
def test_a_frozen_step_in_a_graph_is_replayed_with_new_data(axes: dict[str, int], schedule: str, parts: int) -> None:
    results = run("cuda", world_of(axes), captured, axes, schedule, parts)
    for i, salt in enumerate((1, 2, 3)):
        require_one_process([mine[i] for mine in results], axes.get("dp", 1), salt)


class Sleeps(nn.Module):
    """Takes the device 20 ms, and the host nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(x.device.type, 20.0)
        return x


def costs_of_a_slow_stage(device: str) -> list[float]:
    with mesh_on(device, pp=2) as mesh:
        layers = nn.Sequential(nn.Linear(10, 10), Sleeps(), nn.Linear(10, 10), nn.Linear(10, 4)).double()
        pipe = hpcomm.Pipeline(layers, mesh=mesh, num_microbatches=2, loss_fn=mse, split_at=[2])
        x, y = batch(0, device)
        return [stage.forward_seconds for stage in pipe.measure(x, target=y).stages]


@pytest.mark.cuda
@pytest.mark.multirank
def test_measure_finds_the_stage_whose_computations_take_long() -> None:
    """And not what it takes to issue them, which is the same for all."""
    for slow, fast in run("cuda", 2, costs_of_a_slow_stage):
        assert slow > 0.01  # the GPU cannot be done before
        assert slow > 2 * fast
