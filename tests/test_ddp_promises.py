"""What the docstrings of DistributedDataParallel and its optimizers promise and no other test asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import hpcomm
from hpcomm.ddp import sizes


def ignored_is_left() -> None:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for p in module.parameters():
            p.data.fill_(10.0**mesh.rank)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
        hpcomm.DistributedDataParallel(module, mesh=mesh)
        assert module[0].weight[0, 0] == 1.0
        assert module[1].weight[0, 0] == 10.0**mesh.rank


def test_parameters_that_are_ignored_are_not_sent() -> None:
    ranks.run(2, ignored_is_left)


def transposed_is_sent() -> None:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Linear(3, 4, bias=False)
        module.weight = nn.Parameter((torch.arange(12.0).view(3, 4) + 100 * mesh.rank).t())
        hpcomm.DistributedDataParallel(module, mesh=mesh)
        assert torch.equal(module.weight, torch.arange(12.0).view(3, 4).t())


def test_transposed_parameters_are_sent() -> None:
    ranks.run(2, transposed_is_sent)


def mesh_and_device_mesh() -> None:
    with (
        hpcomm.init(dp=2) as mesh,
        pytest.raises(hpcomm.InvalidArgument, match="pass mesh= or process_group=, not both"),
    ):
        hpcomm.DistributedDataParallel(nn.Linear(2, 2), mesh=mesh, device_mesh=mesh.device_mesh["dp"])


def test_a_mesh_and_a_device_mesh_are_not_both_given() -> None:
    ranks.run(2, mesh_and_device_mesh)


def forced_native() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(2, 2), mesh=mesh, static_graph=True)
        needed = "HPCOMM_DDP_REDUCER=native, but torch's reducer is needed: static_graph"
        with pytest.raises(hpcomm.InvalidArgument, match=needed):
            wrapped(torch.ones(1, 2))


def test_the_native_reducer_says_what_it_lacks() -> None:
    ranks.run(2, forced_native, env={"HPCOMM_DDP_REDUCER": "native"})


def differs(option: str) -> None:
    with hpcomm.init(dp=2, timeout=5.0) as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(2, 2), mesh=mesh, **{option: mesh.rank == 1})
        wrapped(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("option", ["check_finite", "find_unused_parameters"])
def test_options_that_differ_are_shown(option: str) -> None:
    for outcome in ranks.run(2, differs, option, expect_failure=True):
        assert outcome.exception == "SchemaMismatch", outcome
        assert f"{option}=False" in outcome.message
        assert f"{option}=True" in outcome.message


def infinity_norm_of_what_crosses() -> None:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Linear(32, 32, bias=False).double()
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, shard_optimizer=True)
        wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
        x = torch.ones(1, 32, dtype=torch.float64)
        wrapped(x).sum().backward()
        norm = hpcomm.clip_grad_norm_(wrapped, 10.0, float("inf"))
        assert norm.dtype == torch.float64
        assert norm == 1.0, norm


def test_the_infinity_norm_of_a_parameter_in_two_parts() -> None:
    ranks.run(2, infinity_norm_of_what_crosses)


def data_is_set() -> None:
    with hpcomm.init(dp=2) as mesh:
        torch.manual_seed(0)
        module = nn.Linear(32, 32, bias=False)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, shard_optimizer=True)
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=1.0)
        module.weight.data = torch.full((32, 32), 7.0)
        wrapped(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        assert torch.equal(module.weight, torch.full((32, 32), 6.0)), module.weight
        module.weight.data = module.weight.data.double()
        with pytest.raises(hpcomm.InvalidArgument, match="convert the model before it is wrapped"):
            optimizer.step()


def test_data_that_is_replaced_is_stepped() -> None:
    ranks.run(2, data_is_set)


def frozen_with_a_gradient() -> None:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[0].requires_grad_(False)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, shard_optimizer=True)
        optimizer = wrapped.make_optimizer(torch.optim.SGD, list(module.parameters()), lr=1.0)
        module[0].requires_grad_(True)
        wrapped(torch.ones(1, 4)).sum().backward()
        with pytest.raises(hpcomm.InvalidArgument, match="was frozen when it was wrapped has a gradient"):
            optimizer.step()


def test_a_gradient_of_what_was_frozen_is_named() -> None:
    ranks.run(2, frozen_with_a_gradient)


def two_optimizers_one_parameter() -> None:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Linear(32, 32)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, shard_optimizer=True)
        one, two = (wrapped.make_optimizer(torch.optim.SGD, lr=1.0) for _ in range(2))
        wrapped(torch.ones(1, 32)).sum().backward()
        one.step()
        with pytest.raises(hpcomm.InvalidArgument, match="was stepped by another optimizer of this wrapper"):
            two.step()


def test_a_parameter_is_stepped_by_one_optimizer() -> None:
    ranks.run(2, two_optimizers_one_parameter)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) for layer in self.children()), torch.zeros(()))


def copy_with_a_new_layer() -> None:
    with hpcomm.init(dp=2) as mesh:
        torch.manual_seed(0)
        wrapped = hpcomm.DistributedDataParallel(Grows(), mesh=mesh)
        wrapped.module.second = nn.Linear(4, 4)
        other = copy.deepcopy(wrapped)
        other(torch.full((1, 4), 10.0**mesh.rank)).sum().backward()
        for layer in other.module.children():
            assert torch.equal(layer.weight.grad, torch.full((4, 4), 5.5))


def test_a_copy_reduces_layers_that_came_later() -> None:
    ranks.run(2, copy_with_a_new_layer)


def join_divides_by_those_left() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 1, bias=False), mesh=mesh)
        with wrapped.join(divide_by_initial_world_size=False):
            for _ in range(1 if mesh.rank == 0 else 0):
                wrapped(torch.full((1, 4), 3.0)).sum().backward()
                assert torch.equal(wrapped.module.weight.grad, torch.full((1, 4), 3.0))


def test_join_may_divide_by_the_ranks_that_are_left() -> None:
    ranks.run(2, join_divides_by_those_left)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mine", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.mine


def buffers_after_reduce_on_last() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Counts(), mesh=mesh)
        for step in range(3):
            wrapped.module.mine.fill_(step + 10.0**mesh.rank)
            with wrapped.reduce_on_last(2):
                for _ in range(2):
                    wrapped(torch.ones(1, 4)).sum().backward()
            assert wrapped.module.mine == step + 1.0


def test_buffers_are_synchronised_behind_reduce_on_last() -> None:
    ranks.run(2, buffers_after_reduce_on_last)


def nested() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 4), mesh=mesh)
        with (
            pytest.raises(hpcomm.InvalidArgument, match=r"reduce_on_last\(\) inside itself"),
            wrapped.reduce_on_last(1),
            wrapped.reduce_on_last(1),
        ):
            pass


def test_reduce_on_last_is_not_nested() -> None:
    ranks.run(2, nested)


def measured_otherwise() -> tuple[float, ...]:
    with hpcomm.init(dp=2) as mesh:
        seconds = iter([1e-3 * 10.0**mesh.rank, 2e-3 * 10.0**mesh.rank])
        sizes._median_seconds = lambda *_: next(seconds)
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(1024, 1024), mesh=mesh, bucket_cap_mb="auto")
        return tuple(wrapped._hpcomm_sizes.cost)


def test_bucket_sizes_are_those_of_all_ranks() -> None:
    one, other = ranks.run(2, measured_otherwise)
    assert one == other


def torchs(what: str) -> str:
    with hpcomm.init(dp=2) as mesh:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        options: dict[str, Any] = {}
        if what == "skip":
            options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        if what == "delay":
            options = {
                "delay_all_reduce_named_params": [("0.weight", module[0].weight)],
                "param_to_hook_all_reduce": module[0].bias,
            }
        if what == "python":
            torch._dynamo.config.optimize_ddp = "python_reducer"
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, **options)
        if what == "compiled":
            torch._dynamo.config.compiled_autograd = True
        if what == "rpc":
            torch._C._distributed_rpc._is_current_rpc_agent_set = lambda: True
        wrapped._choose()
        return str(wrapped.reduction)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("skip", "skip_all_reduce_unused_params"),
        ("delay", "delay_all_reduce_named_params"),
        ("python", "optimize_ddp='python_reducer'"),
        ("compiled", "compiled autograd"),
        ("rpc", "RPC is in use"),
    ],
)
def test_why_torchs_reducer_is_taken_is_told(what: str, why: str) -> None:
    for told in ranks.run(2, torchs, what):
        assert why in told
