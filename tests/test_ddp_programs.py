"""What programs do with a wrapper beside training it: one rank evaluates, tensors are swapped, wrappers are copied."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import hpcomm
from hpcomm.ddp import native

_SMALL = 0.0001  # MiB: a bucket for each layer
_PEER = 10  # a Control channel of these tests


class Branches(nn.Module):
    """Layers of one shape, which run in the order in which they were made, or in the other one."""

    def __init__(self, reverse: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(int(reverse))
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(layers))
        self.reverse = reverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.reverse else self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def assert_averaged(module: nn.Module, step: int) -> None:
    """The gradients of ``module`` are those of the losses of all ranks."""
    losses = [module(batch(rank, step)).square().sum() for rank in range(dist.get_world_size())]
    expected = torch.autograd.grad(sum(losses) / len(losses), list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def one_rank_evaluates() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches())
    if dist.get_rank() == 0:
        with torch.no_grad():
            wrapped(batch(0, 0))
        assert wrapped.reduction is None
    dist.barrier()
    wrapped(batch(dist.get_rank(), 1)).square().sum().backward()
    assert "hpcomm's reducer" in str(wrapped.reduction)
    assert_averaged(wrapped.module, 1)


def test_one_rank_evaluates_before_the_first_step() -> None:
    ranks.run(2, one_rank_evaluates)


def begins_with_other_tensors() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    frozen = {name: p.detach() for name, p in wrapped.named_parameters()}
    x = batch(dist.get_rank(), 0).requires_grad_()
    torch.func.functional_call(wrapped, frozen, (x,)).sum()
    doubled = {name: p * 1 for name, p in wrapped.named_parameters()}
    torch.func.functional_call(wrapped, doubled, (x,)).square().sum().backward()
    assert_averaged(wrapped.module, 0)
    wrapped.zero_grad()
    wrapped(batch(dist.get_rank(), 1)).square().sum().backward()
    assert_averaged(wrapped.module, 1)


def test_the_first_forward_may_be_a_functional_call() -> None:
    ranks.run(2, begins_with_other_tensors)


def begins_with_other_parameters() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    others = {name: nn.Parameter(p.detach().clone()) for name, p in wrapped.named_parameters()}
    x = batch(dist.get_rank(), 0)
    torch.func.functional_call(wrapped, others, (x,)).square().sum().backward()
    alone = torch.autograd.grad(wrapped.module(x).square().sum(), list(wrapped.parameters()))
    for other, gradient in zip(others.values(), alone, strict=True):  # the wrapper's are reduced, not the caller's
        torch.testing.assert_close(other.grad, gradient, rtol=0, atol=0)
    assert all(p.grad is None for p in wrapped.parameters())
    for step in range(1, 3):
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        assert_averaged(wrapped.module, step)


def test_the_first_forward_may_be_a_functional_call_with_parameters() -> None:
    ranks.run(2, begins_with_other_parameters)


def replaces_a_layer() -> None:
    """Between the wrapper and the first step."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    torch.manual_seed(7)
    wrapped.module.layers[1] = nn.Linear(8, 8, dtype=torch.float64)
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        assert_averaged(wrapped.module, step)


def test_a_layer_may_be_replaced_before_the_first_step() -> None:
    ranks.run(2, replaces_a_layer)


def forwards_in_another_order(over: str, layers: int, options: dict[str, Any]) -> None:
    """Also on one lane each wrapper is known by itself, and learns the order of its own backward."""
    with hpcomm.init(dp=2) as mesh:
        where: dict[str, Any] = {"mesh": mesh} if over == "mesh" else {"process_group": mesh.group("dp")}
        pair = [
            hpcomm.DistributedDataParallel(module, **where, **{"bucket_cap_mb": _SMALL, **options})
            for module in (Branches(), Branches(reverse=True, layers=layers))
        ]
        for step in range(3):
            turns = (1, 0) if mesh.rank == 1 else (0, 1)
            losses = {turn: pair[turn](batch(mesh.rank, step)).square().sum() for turn in turns}
            for turn in (0, 1):
                pair[turn].zero_grad()
                losses[turn].backward()
                assert_averaged(pair[turn].module, step)


@pytest.mark.parametrize("over", ["mesh", "group"])
@pytest.mark.parametrize("layers", [2, 3], ids=["alike", "unlike"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": "auto"}], ids=str)
def test_wrappers_whose_forwards_come_in_another_order(over: str, layers: int, options: dict[str, Any]) -> None:
    ranks.run(2, forwards_in_another_order, over, layers, options)


def one_rank_looks_at_gradients() -> None:
    """Nobody waits for a forward, also where it could be followed by a backward."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches())
    if dist.get_rank() == 0:
        with wrapped.no_sync():
            torch.autograd.grad(wrapped(batch(0, 0)).sum(), list(wrapped.parameters()))
    dist.barrier()
    wrapped(batch(dist.get_rank(), 1)).square().sum().backward()
    assert_averaged(wrapped.module, 1)


def test_one_rank_takes_gradients_before_the_first_step() -> None:
    ranks.run(2, one_rank_looks_at_gradients)


def freezes_another_layer() -> None:
    with hpcomm.init(dp=3) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh)
        wrapped.module.layers[int(mesh.rank == 2)].requires_grad_(False)
        for _ in range(2):
            loss = wrapped(batch(mesh.rank, 0)).sum()
            with pytest.raises(hpcomm.SchemaMismatch, match="rank 0 has 'layers.1.weight .*, rank 2 has 'layers.0.wei"):
                loss.backward()


def test_replicas_that_freeze_other_layers_are_told() -> None:
    ranks.run(3, freezes_another_layer)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def attach_to_sparse() -> None:
    dist.init_process_group("gloo")
    stock = nn.parallel.DistributedDataParallel(Looked())
    with pytest.raises(hpcomm.InvalidArgument, match=r"attach\(\): a module produces sparse gradients"):
        hpcomm.attach(stock)
    stock(torch.tensor([dist.get_rank()])).sum().backward()  # it works as before


def test_attach_refuses_sparse_gradients() -> None:
    ranks.run(2, attach_to_sparse)


class Looks(nn.Module):
    """A sparse gradient of which no module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.ones(8, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.embedding(x, self.table, sparse=True))


def looks_up(options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Looks(), **options)
    loss = wrapped(torch.tensor([dist.get_rank()])).sum()
    words = r"parameter table is sparse.* torch\.nn\.Embedding\(\.\.\., sparse=True\)"
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        loss.backward()


@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": _SMALL}, {"grad_dtype": torch.bfloat16}, {"check_finite": True}], ids=str
)
def test_a_sparse_gradient_that_nobody_expects_is_named(options: dict[str, Any]) -> None:
    ranks.run(2, looks_up, options)


def names_buckets_that_are_none() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    with wrapped.no_sync():
        wrapped(batch(dist.get_rank(), 0)).square().sum().backward()
    wrong: list[Any] = [-1, wrapped.buckets, 2**70, "0", 0.0, None, True, torch.tensor(0)]
    for bucket in wrong:
        for call in (wrapped.start_reduction, wrapped.finish_reduction):
            with pytest.raises(ValueError, match=rf"{call.__name__}\(.*integers from 0 to {wrapped.buckets - 1}"):
                call(bucket)
    with pytest.raises(ValueError, match="bucket 0 was not started"):
        wrapped.finish_reduction(0)
    for bucket in range(wrapped.buckets):
        wrapped.start_reduction(bucket)
        wrapped.finish_reduction(bucket)
    assert_averaged(wrapped.module, 0)


def test_buckets_that_there_are_not_are_refused() -> None:
    ranks.run(2, names_buckets_that_are_none)


def copies_a_sharded_one() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), shard_optimizer=True)
    optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
    wrapped(batch(dist.get_rank(), 0)).square().sum().backward()
    optimizer.step()
    other = copy.deepcopy(wrapped)
    optimizers = optimizer, other.make_optimizer(torch.optim.SGD, lr=0.1)
    for step in range(1, 3):
        for each, its in zip((wrapped, other), optimizers, strict=True):
            each(batch(dist.get_rank(), step)).square().sum().backward()
            its.step()
    for mine, its in zip(wrapped.parameters(), other.parameters(), strict=True):
        assert mine.data_ptr() != its.data_ptr()
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_a_copy_of_a_sharded_wrapper_trains_by_itself() -> None:
    ranks.run(2, copies_a_sharded_one)


def freezes_all(everywhere: bool) -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh)
        if everywhere or mesh.rank == 1:
            wrapped.module.requires_grad_(False)
        words = 'rank 0 has "hpcomm\'s reducer", rank 1 has .*no parameter requires a gradient'
        # Rank 1 is told in its first forward if rank 0 was faster.
        told: list[contextlib.AbstractContextManager[Any]] = [
            pytest.raises(hpcomm.SchemaMismatch, match=words),
            contextlib.suppress(hpcomm.SchemaMismatch),
        ]
        with contextlib.nullcontext() if everywhere else told[mesh.rank]:
            wrapped(batch(mesh.rank, 0).requires_grad_()).sum().backward()
        mesh.control.exchange([0, 1], _PEER, b"", 20)
        if not everywhere and mesh.rank == 1:  # nothing of it is reduced, so it was not told in a backward
            for _ in range(2):
                with pytest.raises(hpcomm.SchemaMismatch, match=words):
                    wrapped(batch(mesh.rank, 1))
        if everywhere:  # torch's hooks are still there
            wrapped.module.requires_grad_(True)
            wrapped(batch(mesh.rank, 1)).square().sum().backward()
            assert_averaged(wrapped.module, 1)


@pytest.mark.parametrize("everywhere", [True, False])
def test_all_parameters_may_be_frozen_before_the_first_step(everywhere: bool) -> None:
    ranks.run(2, freezes_all, everywhere)


def freezes_all_and_adds() -> None:
    """The wrapper has parameters that it did not have when it was made, and no other."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    wrapped.module.requires_grad_(False)
    torch.manual_seed(7)
    wrapped.module.layers[0] = nn.Linear(8, 8, dtype=torch.float64)
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        added = wrapped.module.layers[0]
        losses = [wrapped.module(batch(rank, step)).square().sum() for rank in range(2)]
        for parameter, gradient in zip(
            added.parameters(), torch.autograd.grad(sum(losses) / 2, list(added.parameters())), strict=True
        ):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_all_may_be_frozen_but_a_layer_that_is_new() -> None:
    ranks.run(2, freezes_all_and_adds)


def has_torchs_reducer(how: str) -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh)
        if mesh.rank == 0 and how == "hook":
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        if mesh.rank == 0 and how == "static":
            wrapped._set_static_graph()
        # In the forward, where the other rank was faster.
        with pytest.raises(hpcomm.SchemaMismatch, match="rank 0 has \"torch's reducer .*, rank 1 has \"hpcomm's red"):
            wrapped(batch(mesh.rank, 0)).sum().backward()
        mesh.control.exchange([0, 1], _PEER, b"", 20)


@pytest.mark.parametrize("how", ["hook", "static"])
def test_a_rank_with_another_reducer_is_told_of(how: str) -> None:
    ranks.run(2, has_torchs_reducer, how)


def forgets_a_wrapper() -> None:
    """A forward does not need the other ranks, also when they have dropped theirs."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches())
    if dist.get_rank() == 0:
        del wrapped
    else:
        while not wrapped._hpcomm_lane.control.has_left(0):
            time.sleep(0.01)
        wrapped(batch(1, 0))
    dist.barrier()


def test_a_forward_without_the_other_wrappers() -> None:
    ranks.run(2, forgets_a_wrapper)


def tells_twice() -> None:
    """A Ctrl-C came when the other one was told: the forward is repeated."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL)
    if dist.get_rank() == 0:

        class Interrupted(native.Meeting):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                raise KeyboardInterrupt

        meeting, native.Meeting = native.Meeting, Interrupted
        with pytest.raises(KeyboardInterrupt):
            wrapped(batch(0, 0))
        native.Meeting = meeting
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        assert_averaged(wrapped.module, step)


def test_a_first_forward_may_be_repeated() -> None:
    ranks.run(2, tells_twice)


def hears_behind_an_interrupt() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh)
        if mesh.rank == 0:
            loss = wrapped(batch(0, 0)).square().sum()

            def press() -> None:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGINT)
                mesh.control.send(1, _PEER, b"pressed")

            def backward_with_a_finger() -> None:
                thread.start()
                loss.backward()

            thread = threading.Thread(target=press)
            with pytest.raises(KeyboardInterrupt):
                backward_with_a_finger()
            thread.join()
            wrapped.zero_grad()
        else:

            class Late(native.Meeting):
                def __init__(self, *args: Any) -> None:
                    mesh.control.receive(0, _PEER, 20)
                    super().__init__(
                        *args
                    )  # comes before the other one looks for signals, but for one time in a hundred

            native.Meeting = Late
        wrapped(batch(mesh.rank, 0)).square().sum().backward()
        assert_averaged(wrapped.module, 0)


def test_what_is_heard_behind_a_ctrl_c_is_kept() -> None:
    ranks.run(2, hears_behind_an_interrupt)


def changes_its_mind() -> None:
    """One rank has run a forward with hpcomm's reducer before all get torch's: nobody takes that for a difference."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches())
    if dist.get_rank() == 0:
        wrapped(batch(0, 9))
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        assert_averaged(wrapped.module, step)
        assert wrapped._hpcomm_attendance.is_over
        assert not any(p._post_accumulate_grad_hooks for p in wrapped.parameters())


def test_all_ranks_may_change_to_torchs_reducer_before_the_first_step() -> None:
    ranks.run(2, changes_its_mind)


def one_rank_backs_without_reducing() -> None:
    """With torch's reducer, too, no rank waits for the others where nothing is reduced."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches())
    if dist.get_rank() == 0:
        with wrapped.no_sync():
            loss = wrapped(batch(0, 9)).sum()
        loss.backward()
        wrapped.zero_grad()
    dist.barrier()
    wrapped(batch(dist.get_rank(), 1)).square().sum().backward()
    assert_averaged(wrapped.module, 1)


def test_torchs_reducer_waits_for_nobody_where_nothing_is_reduced() -> None:
    ranks.run(2, one_rank_backs_without_reducing, env={"HPCOMM_DDP_REDUCER": "torch"})


def copies(same_order: bool) -> None:
    """Copies are told apart, also where a rank has one of its own that it never trains."""
    dist.init_process_group("gloo")
    pair = [hpcomm.DistributedDataParallel(Branches(), bucket_cap_mb=_SMALL) for _ in range(2)]
    others = [copy.deepcopy(pair[0]), pickle.loads(pickle.dumps(pair[1]))]
    if dist.get_rank() == 0:
        with torch.no_grad():
            copy.deepcopy(pair[0])(batch(0, 9))
    turns = (0, 1) if same_order or dist.get_rank() == 0 else (1, 0)
    if not same_order:
        with pytest.raises(hpcomm.HpcommError):
            others[turns[0]](batch(0, 9))
        return
    for step in range(3):
        losses = [others[turn](batch(dist.get_rank(), step + turn)).square().sum() for turn in turns]
        for turn in reversed(turns):
            others[turn].zero_grad()
            losses[turn].backward()
            assert_averaged(others[turn].module, step + turn)


def test_copies_are_wrappers_of_their_own() -> None:
    ranks.run(2, copies, True)


def test_copies_of_two_wrappers_never_take_each_others_place() -> None:
    """Where ranks begin with another one, all are told after a while; their gradients are not mixed."""

    def attempt(limit: float) -> None:
        ranks.run(2, copies, False, env={"HPCOMM_TIMEOUT": f"{limit:g}"}, timeout=60)

    with_patience(attempt, 2.0)  # which the first meetings have to keep as well


class Interrupted:
    """A Control where Ctrl-C comes behind the first of the messages to several ranks."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def send(self, *args: Any) -> None:
        self._control.send(*args)
        self._sent += 1
        if self._sent == 1:
            raise KeyboardInterrupt


class Lane:
    def __init__(self, lane: Any) -> None:
        self._lane = lane
        self.control = Interrupted(lane.control)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


def tells_the_order_twice() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Branches(reverse=True), bucket_cap_mb=_SMALL)
    for step in range(3):
        if dist.get_rank() == 0 and step == 1:
            lane, wrapped.reducer._lane = wrapped.reducer._lane, Lane(wrapped.reducer._lane)
            with pytest.raises(KeyboardInterrupt):
                wrapped(batch(0, 9))
            wrapped.reducer._lane = lane
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().sum().backward()
        assert_averaged(wrapped.module, step)
    assert not wrapped.reducer._learns


def test_a_ctrl_c_between_the_messages_of_the_learned_order() -> None:
    ranks.run(3, tells_the_order_twice)


def looks_in_a_handler(first: bool, options: dict[str, Any]) -> None:
    """A handler of a signal runs while this rank waits for the other one in its backward."""
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh, bucket_cap_mb=_SMALL, **options)
        if not first:
            wrapped(batch(mesh.rank, 0)).square().sum().backward()
        wrapped.zero_grad()
        if mesh.rank == 0:
            seen: list[Any] = []
            expected = "expecting" if first else "draining"

            def look(*_: object) -> None:
                if wrapped.reducer._native.state != expected:  # this machine was slow: once more
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
                    return
                seen.append((wrapped.reducer._native.state, wrapped.describe_buckets(), wrapped.reducer.counts))
                wrapped._get_ddp_logging_data()
                mesh.control.send(1, _PEER, b"seen")

            signal.signal(signal.SIGALRM, look)
            loss = wrapped(batch(0, 1)).square().sum()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            loss.backward()
            assert [state for state, _, _ in seen] == [expected]
            assert "bucket 0 | " in seen[0][1]
        else:
            mesh.control.receive(0, _PEER, 20)
            wrapped(batch(1, 1)).square().sum().backward()
        assert_averaged(wrapped.module, 1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_handler_of_a_signal_looks_at_the_reducer(first: bool, options: dict[str, Any]) -> None:
    ranks.run(2, looks_in_a_handler, first, options)


def resets_in_a_handler() -> None:
    """What a handler drops is not handed out, and the next step is as ever."""
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(Branches(), mesh=mesh, bucket_cap_mb=_SMALL)
        for step in range(2):
            wrapped.zero_grad()
            wrapped(batch(mesh.rank, step)).square().sum().backward()
        wrapped.zero_grad()
        if mesh.rank == 0:

            def drop(*_: object) -> None:
                if wrapped.reducer._native.state != "draining":  # this machine was slow: once more
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
                    return
                mesh.control.send(1, _PEER, b"dropping")
                wrapped.reducer.reset()

            signal.signal(signal.SIGALRM, drop)
            loss = wrapped(batch(0, 2)).square().sum()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            loss.backward()
        else:
            mesh.control.receive(0, _PEER, 20)
            wrapped(batch(1, 2)).square().sum().backward()
        wrapped.zero_grad()
        wrapped(batch(mesh.rank, 3)).square().sum().backward()
        assert_averaged(wrapped.module, 3)


def test_a_handler_of_a_signal_drops_a_reduction() -> None:
    ranks.run(2, resets_in_a_handler)
