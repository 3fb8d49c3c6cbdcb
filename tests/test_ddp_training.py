"""Training loops as people write them: what the replicas become is what one process becomes on all ranks' batches."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import hpcomm

_SMALL = 0.0002  # MiB: several buckets
_STEPS = 4
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def part(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    """The batch of a rank."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def whole(step: int, rows: int = 4) -> torch.Tensor:
    return torch.cat([part(rank, step, rows) for rank in range(dist.get_world_size())])


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).square().mean()


def assert_same(module: nn.Module, alone: nn.Module, bound: float = 1e-10) -> None:
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def wrap(module: nn.Module, **options: Any) -> hpcomm.DistributedDataParallel:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return hpcomm.DistributedDataParallel(module, **{"bucket_cap_mb": _SMALL, **options})


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)


def both(module: nn.Module, loss: Loss = loss_of, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Trains a wrapper over the ranks and a copy alone."""
    alone = copy.deepcopy(module)
    wrapped = wrap(module, **options)
    mine, its = adam(wrapped), adam(alone)
    for step in range(_STEPS):
        mine.zero_grad()
        loss(wrapped, part(dist.get_rank(), step)).backward()
        mine.step()
        its.zero_grad()
        loss(alone, whole(step)).backward()
        its.step()
    assert_same(wrapped.module, alone)
    return wrapped, alone


# --- The step ---------------------------------------------------------------------------------------------------------


def accumulates_and_clips() -> None:
    """As nanoGPT does: the flag is set by hand, gradients are clipped between the last backward and the step."""
    module = Net()
    alone = copy.deepcopy(module)
    wrapped = wrap(module)
    mine, its = adam(wrapped), adam(alone)
    for step in range(_STEPS):
        for micro in range(3):
            wrapped.require_backward_grad_sync = micro == 2
            (loss_of(wrapped, part(dist.get_rank(), 3 * step + micro)) / 3).backward()
            (loss_of(alone, whole(3 * step + micro)) / 3).backward()
        norms = [clip_grad_norm_(m.parameters(), 0.01) for m in (wrapped, alone)]
        torch.testing.assert_close(*norms)
        assert norms[0] > 0.01
        for optimizer in (mine, its):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_same(wrapped.module, alone)


def clips_divided() -> None:
    """No rank has a whole gradient; a parameter that gets none in a step, and one that crosses parts of the ranks."""
    module = Mixed()
    alone = copy.deepcopy(module)
    wrapped = wrap(module, shard_optimizer=True)
    mine, its = wrapped.make_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, norm_type in enumerate((2.0, 1.0, math.inf, 3.0)):
        for m, x in ((wrapped, part(dist.get_rank(), step)), (alone, whole(step))):
            loss_of(m, x).backward()
        norms = [
            hpcomm.clip_grad_norm_(wrapped, 0.01, norm_type),
            clip_grad_norm_(alone.parameters(), 0.01, norm_type),
        ]
        assert norms[0] > 0.01
        torch.testing.assert_close(*norms, check_dtype=False)
        for optimizer in (mine, its):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(wrapped.module, alone, 1e-5)
    before = copy.deepcopy(module.state_dict())
    (loss_of(wrapped, part(dist.get_rank(), 9)) * (math.inf if dist.get_rank() == 0 else 1)).backward()
    with pytest.raises(hpcomm.NumericsMismatch, match="norm is (inf|nan)"):
        hpcomm.clip_grad_norm_(wrapped, 1.0, error_if_nonfinite=True)
    mine.zero_grad()
    assert hpcomm.clip_grad_norm_(wrapped, 1.0) == 0  # what was dropped does not count
    mine.step()
    torch.testing.assert_close(module.state_dict(), before)
    for bad in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(hpcomm.InvalidArgument, match="not negative|greater than 0"):
            hpcomm.clip_grad_norm_(wrapped, **bad)


def scales() -> None:
    """Torch's own GradScaler, with an overflow on one rank."""
    module = Net()
    alone = copy.deepcopy(module)
    wrapped = wrap(module)
    mine, its = adam(wrapped), adam(alone)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(_STEPS):
        bad = math.inf if step == 1 else 1.0
        for scaler, optimizer, loss in (
            (scalers[0], mine, loss_of(wrapped, part(dist.get_rank(), step)) * (bad if dist.get_rank() == 1 else 1)),
            (scalers[1], its, loss_of(alone, whole(step)) * bad),
        ):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [s.get_scale() for s in scalers] == [4.0, 4.0]
    assert_same(wrapped.module, alone)


def two_networks() -> None:
    """Generator and discriminator, each with its wrapper and optimizer, as GANs are trained."""
    pair = [Net(1), Net(2)]
    alone = copy.deepcopy(pair)
    wrapped = [wrap(m, find_unused_parameters=True) for m in pair]
    optimizers = [[adam(m) for m in several] for several in (wrapped, alone)]
    for step in range(_STEPS):
        for (make, judge), (of_make, of_judge), x in (
            (wrapped, optimizers[0], part(dist.get_rank(), step)),
            (alone, optimizers[1], whole(step)),
        ):
            of_judge.zero_grad()
            (judge(make(x).detach()).square().mean() - judge(x).mean()).backward()
            of_judge.step()
            of_make.zero_grad()
            for p in judge.parameters():
                p.requires_grad_(False)
            judge(make(x)).mean().backward()
            for p in judge.parameters():
                p.requires_grad_(True)
            of_make.step()
    for mine, its in zip(wrapped, alone, strict=True):
        assert_same(mine.module, its)


def two_networks_without_freezing() -> None:
    """The generator's backward reaches the discriminator's parameters, and its wrapper reduces them as well."""
    pair = [Net(1), Net(2)]
    alone = copy.deepcopy(pair)
    wrapped = [wrap(m) for m in pair]
    optimizers = [[adam(m) for m in several] for several in (wrapped, alone)]
    for step in range(_STEPS):
        for (make, judge), (of_make, of_judge), x in (
            (wrapped, optimizers[0], part(dist.get_rank(), step)),
            (alone, optimizers[1], whole(step)),
        ):
            made = make(x)
            of_judge.zero_grad()
            judge(torch.cat([made.detach(), x])).square().mean().backward()
            of_judge.step()
            of_make.zero_grad()
            judge(made).square().mean().backward()
            of_make.step()
    for mine, its in zip(wrapped, alone, strict=True):
        assert_same(mine.module, its)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(8, 8).double().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False).double(), nn.Linear(2, 8, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapts() -> None:
    wrapped, _ = both(nn.Sequential(Adapted(), nn.Tanh(), Adapted()))
    fresh = Adapted()
    for name, p in wrapped.module.named_parameters():
        if "base" in name:
            assert p.grad is None
            torch.testing.assert_close(p, fresh.get_parameter(name[2:]), rtol=0, atol=0)


class Tied(nn.Module):
    """The embedding is the head, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 5).long().remainder(12)
        return self.head(torch.tanh(self.body(self.table(tokens)))).log_softmax(-1)[..., 0]


def ties() -> None:
    both(Tied())


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8).double(), nn.ModuleList(Net(seed) for seed in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputes(reentrant: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    both(Recomputed(reentrant), **options)


def takes_steps_in_the_backward(how: str) -> None:
    """Each parameter is stepped as soon as its gradient is reduced, and dropped."""
    module = Net()
    alone = copy.deepcopy(module)
    wrapped = wrap(module)
    if how == "fused":
        wrapped._register_fused_optim(torch.optim.SGD, lr=0.1)
    its = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(_STEPS):
        loss_of(wrapped, part(dist.get_rank(), step)).backward()
        if how == "behind":
            with torch.no_grad():
                for p in wrapped.parameters():
                    p.sub_(0.1 * p.grad)
        wrapped.zero_grad()
        its.zero_grad()
        loss_of(alone, whole(step)).backward()
        its.step()
    assert_same(wrapped.module, alone)


def looks_in_hooks() -> None:
    """Hooks of the user behind the accumulation run, once each, and see what is accumulated here."""
    module = Net()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=name: seen.setdefault(n, []).append(p.grad.clone()))
    both(module)
    local = Net()
    loss_of(local, part(dist.get_rank(), 0)).backward()
    for name, p in local.named_parameters():
        assert len(seen[name]) == _STEPS
        torch.testing.assert_close(seen[name][0], p.grad)


def changes_in_hooks() -> None:
    """A hook on a gradient changes what is reduced."""
    module = Net()
    wrapped = wrap(module)
    alone = copy.deepcopy(module)
    for p in (*module.parameters(), *alone.parameters()):
        p.register_hook(lambda g: g * 3)
    loss_of(wrapped, part(dist.get_rank(), 0)).backward()
    loss_of(alone, whole(0)).backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def compiles(what: str) -> None:
    module = Net()
    alone = copy.deepcopy(module)
    inner = torch.compile(module, backend="aot_eager") if what == "inner" else module
    if what == "in place":
        module.compile(backend="aot_eager")
    wrapped = wrap(inner, bucket_cap_mb=25)
    called = torch.compile(wrapped, backend="aot_eager") if what == "wrapper" else wrapped
    mine, its = adam(wrapped), adam(alone)
    for step in range(_STEPS):
        for m, optimizer, x in ((called, mine, part(dist.get_rank(), step)), (alone, its, whole(step))):
            optimizer.zero_grad()
            loss_of(m, x).backward()
            optimizer.step()
    assert_same(wrapped.module, alone)


@pytest.mark.parametrize(
    "loop",
    [
        accumulates_and_clips,
        scales,
        two_networks,
        two_networks_without_freezing,
        adapts,
        ties,
        looks_in_hooks,
        changes_in_hooks,
        *(
            functools.partial(recomputes, reentrant, options)
            for reentrant in (False, True)
            for options in ({}, {"static_graph": True}, {"find_unused_parameters": True})
            if not (reentrant and "find_unused_parameters" in options)  # torch's refuses it as well
        ),
        *(functools.partial(takes_steps_in_the_backward, how) for how in ("fused", "behind")),
        *(functools.partial(compiles, what) for what in ("inner", "in place", "wrapper")),
    ],
    ids=lambda loop: loop.__name__ if not isinstance(loop, functools.partial) else f"{loop.func.__name__}{loop.args}",
)
def test_a_loop_trains_as_one_process_does(loop: Callable[[], None]) -> None:
    ranks.run(2, loop)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.stack([x.reshape(-1, 1, 2, 4), x.reshape(-1, 1, 2, 4).flip(-1)], 1).reshape(-1, 2, 2, 4)
        x = nn.functional.interpolate(x, scale_factor=2)
        return self.head(self.norm(self.conv(x)).mean((-1, -2)))


def pictures() -> None:
    """channels_last, in evaluation mode of the norm, whose statistics are each rank's own."""
    module = Pictures().to(memory_format=torch.channels_last).eval()
    wrapped, _ = both(module)
    assert wrapped.module.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_pictures_in_channels_last() -> None:
    ranks.run(2, pictures)


# --- Around the step --------------------------------------------------------------------------------------------------


def saves_and_loads() -> None:
    """In the middle, through a file, into a new wrapper and a new optimizer; the keys are those of torch's wrapper."""
    module = Net()
    wrapped, alone = both(module)
    stock = nn.parallel.DistributedDataParallel(Net())
    assert list(wrapped.state_dict()) == list(stock.state_dict())
    mine, its = adam(wrapped), adam(alone)
    for restarted in (False, True):
        for step in range(2):
            for m, optimizer, x in ((wrapped, mine, part(dist.get_rank(), step)), (alone, its, whole(step))):
                optimizer.zero_grad()
                loss_of(m, x).backward()
                optimizer.step()
        assert_same(wrapped.module, alone)
        if not restarted:
            file = io.BytesIO()
            torch.save((wrapped.state_dict(), mine.state_dict()), file)
            file.seek(0)
            states = torch.load(file)
            del mine, wrapped
            gc.collect()
            wrapped = wrap(Net(dist.get_rank()))
            wrapped.load_state_dict(states[0])
            mine = adam(wrapped)
            mine.load_state_dict(states[1])


def averages_weights() -> None:
    """Timm's ModelEma: a copy of the module inside, and torch's AveragedModel of the module."""
    module = Net()
    wrapped = wrap(module)
    optimizer = adam(wrapped)
    ema = torch.optim.swa_utils.AveragedModel(wrapped.module)
    of_the_wrapper = torch.optim.swa_utils.AveragedModel(wrapped)  # a copy of the wrapper that is never trained
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, part(dist.get_rank(), step)).backward()
        optimizer.step()
        ema.update_parameters(wrapped.module)
        of_the_wrapper.update_parameters(wrapped)
        if dist.get_rank() == 0:
            with torch.no_grad():
                best = copy.deepcopy(wrapped)
                best(part(0, 99))
                of_the_wrapper(part(0, 99))
    assert_same(ema.module, of_the_wrapper.module.module)
    sums = torch.stack([p.sum() for p in ema.parameters()])
    both_sums = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(both_sums, sums.detach())
    assert torch.equal(*both_sums)


def makes_another_one() -> None:
    """A wrapper is dropped and another one made around the same module, several times."""
    module = Net()
    alone = copy.deepcopy(module)
    its = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        wrapped = wrap(module, bucket_cap_mb=_SMALL * (step + 1))
        mine = torch.optim.SGD(module.parameters(), lr=0.1)
        for inner in range(2):
            for m, optimizer, x in (
                (wrapped, mine, part(dist.get_rank(), 10 * step + inner)),
                (alone, its, whole(10 * step + inner)),
            ):
                optimizer.zero_grad()
                loss_of(m, x).backward()
                optimizer.step()
        assert_same(module, alone)
        gone = weakref.ref(wrapped)
        del wrapped
        gc.collect()
        assert gone() is None
    module(part(0, 0)).sum().backward()  # nobody reduces it any more
    torch.testing.assert_close(
        module.last.bias.grad - torch.full((8,), 4.0, dtype=torch.float64), its.param_groups[0]["params"][5].grad
    )


def two_at_once_around_one_module() -> None:
    """The first one is still alive, as under a trainer that wraps again after a validation: both reduce."""
    module = Net()
    first = wrap(module)
    loss_of(first, part(dist.get_rank(), 0)).backward()
    second = wrap(module)
    for step in range(3):
        module.zero_grad()
        loss_of(second, part(dist.get_rank(), step)).backward()
        local = copy.deepcopy(module)
        local.zero_grad()
        loss_of(local, whole(step)).backward()
        for p, q in zip(module.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def destroys_its_group() -> None:
    """With a live wrapper; gradients stay, evaluation goes on, and another job may begin."""
    wrapped = wrap(Net())
    loss_of(wrapped, part(dist.get_rank(), 0)).backward()
    kept = [p.grad.clone() for p in wrapped.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    for p, g in zip(wrapped.parameters(), kept, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0)
    wrapped.module(part(0, 1))
    wrapped.state_dict()


def inside_another() -> None:
    """A wrapper in a wrapper: the inner one's parameters are reduced by both, to the same."""
    inner = wrap(Net(1))
    outer = wrap(nn.Sequential(inner, Net(2)), find_unused_parameters=True)
    alone = nn.Sequential(Net(1), Net(2))
    for step in range(3):
        outer.zero_grad()
        alone.zero_grad()
        loss_of(outer, part(dist.get_rank(), step)).backward()
        loss_of(alone, whole(step)).backward()
        for p, q in zip(outer.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def evaluates_on_one_rank() -> None:
    """Between steps, under no_grad, in evaluation mode, through the wrapper; with buffers that are broadcast."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = Net(), nn.BatchNorm1d(8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.net(x))

    wrapped = wrap(Normed(), broadcast_buffers=False)
    optimizer = adam(wrapped)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, part(dist.get_rank(), step)).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            wrapped.eval()
            with torch.no_grad():
                wrapped(part(0, 77))
            with torch.inference_mode():
                wrapped(part(0, 78))
            wrapped.train()
    sums = torch.stack([p.sum() for p in wrapped.parameters()]).detach()
    told = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(told, sums)
    assert torch.equal(*told)


def has_an_uneven_last_batch() -> None:
    """Rank 1 has one row where rank 0 has four: each rank's mean counts alike, as in torch."""
    wrapped = wrap(Net())
    alone = Net()
    for rows in (4, 1):
        wrapped.zero_grad()
        loss_of(wrapped, part(dist.get_rank(), 0, rows if dist.get_rank() == 1 else 4)).backward()
    sum(loss_of(alone, part(rank, 0, 1 if rank == 1 else 4)) for rank in range(2)).div(2).backward()
    for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def freezes_later(find_unused: bool) -> None:
    """Progressive freezing, as in fine-tuning: torch asks for a new wrapper, or for find_unused_parameters."""
    wrapped = wrap(Net(), find_unused_parameters=find_unused)
    loss_of(wrapped, part(dist.get_rank(), 0)).backward()
    wrapped.module.first.requires_grad_(False)
    if not find_unused:
        module = wrapped.module
        del wrapped
        wrapped = wrap(module)
    alone = copy.deepcopy(wrapped.module)
    for step in range(3):
        wrapped.zero_grad()
        alone.zero_grad()
        loss_of(wrapped, part(dist.get_rank(), step)).backward()
        loss_of(alone, whole(step)).backward()
        for (name, p), q in zip(wrapped.module.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def copies_one_with_sparse_gradients() -> None:
    """What a copy reduces by is chosen as for the first one."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    wrapped = copy.deepcopy(wrap(Looked()))
    wrapped(torch.tensor([dist.get_rank()])).sum().backward()
    assert wrapped.module.table.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "program",
    [
        saves_and_loads,
        averages_weights,
        makes_another_one,
        two_at_once_around_one_module,
        destroys_its_group,
        inside_another,
        evaluates_on_one_rank,
        has_an_uneven_last_batch,
        functools.partial(freezes_later, False),
        functools.partial(freezes_later, True),
        copies_one_with_sparse_gradients,
    ],
    ids=lambda run: run.__name__ if not isinstance(run, functools.partial) else f"{run.func.__name__}{run.args}",
)
def test_a_program_works_around_its_steps(program: Callable[[], None]) -> None:
    ranks.run(2, program)


def infinite_in_half() -> None:
    """An overflow on one rank arrives as one on all, also in 16 bits, and the step after it is as ever."""
    for dtype in (torch.bfloat16, torch.float16):
        wrapped = wrap(Net().float(), grad_dtype=dtype)
        for step, factor in enumerate((1.0, math.inf, 1.0)):
            wrapped.zero_grad()
            (loss_of(wrapped, part(dist.get_rank(), step).float()) * (factor if dist.get_rank() == 1 else 1)).backward()
            finite = [bool(p.grad.isfinite().all()) for p in wrapped.parameters()]
            assert finite == [factor == 1.0] * len(finite)
        alone = Net().float()
        loss_of(alone, whole(2).float()).backward()
        for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2**-6, atol=2**-7 * q.grad.abs().max().item())


def test_an_infinity_in_16_bits() -> None:
    ranks.run(2, infinite_in_half)


def fraction() -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    """Trains with a divided optimizer beside a whole one; returns what a checkpoint holds, of both."""
    module = Mixed()
    alone = copy.deepcopy(module)
    wrapped = wrap(module, shard_optimizer=True)
    mine = wrapped.make_optimizer(torch.optim.AdamW, groups_of(wrapped.module), lr=0.05)
    its = torch.optim.AdamW(groups_of(alone), lr=0.05)
    plan = [torch.optim.lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.8**n]) for o in (mine, its)]
    train_on(wrapped, mine, alone, its, plan)
    state = wrapped.gather_optimizer_state(mine)
    assert_same_state(state, its.state_dict())
    return state, module.state_dict(), sum(p.numel() for g in mine.param_groups for p in g["params"])


class Mixed(nn.Module):
    """Axes in another order, no axes, several dtypes, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.net = Net()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.across = nn.Parameter(torch.randn(6, 8, dtype=torch.float64).t())
        self.single = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.single((self.net(x) @ self.across * self.scale).float()).double()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    first = list(module.net.first.parameters())
    ids = {id(p) for p in first}
    return [{"params": first, "weight_decay": 0.2}, {"params": [p for p in module.parameters() if id(p) not in ids]}]


def train_on(wrapped: nn.Module, mine: Any, alone: nn.Module, its: Any, plan: list[Any], begin: int = 0) -> None:
    for step in range(begin, begin + 3):
        for m, optimizer, x in ((wrapped, mine, part(dist.get_rank(), step)), (alone, its, whole(step))):
            optimizer.zero_grad()
            loss_of(m, x).backward()
            optimizer.step()
        for scheduler in plan:
            scheduler.step()
    assert_same(wrapped.module, alone, 1e-5)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for number, its in expected["state"].items():
        torch.testing.assert_close(actual["state"][number], its, rtol=1e-5, atol=1e-6)
    assert actual["param_groups"] == expected["param_groups"]


def resumed(file: bytes) -> None:
    state, weights = torch.load(io.BytesIO(file))
    module = Mixed()
    module.load_state_dict(weights)
    alone = copy.deepcopy(module)
    wrapped = wrap(module, shard_optimizer=True, bucket_cap_mb=25)
    mine = wrapped.make_optimizer(torch.optim.AdamW, groups_of(wrapped.module), lr=1.0)
    its = torch.optim.AdamW(groups_of(alone), lr=1.0)
    wrapped.load_optimizer_state(mine, state)
    its.load_state_dict(copy.deepcopy(state))
    assert_same_state(wrapped.gather_optimizer_state(mine), state)
    train_on(wrapped, mine, alone, its, [], begin=3)
    assert_same_state(wrapped.gather_optimizer_state(mine), its.state_dict())
    fewer = wrapped.make_optimizer(torch.optim.AdamW, [wrapped.module.scale])
    for call in (wrapped.gather_optimizer_state, lambda o: wrapped.load_optimizer_state(o, state)):
        with pytest.raises(hpcomm.InvalidArgument, match=r"not made by make_optimizer\(\)"):
            call(its)
    with pytest.raises(ValueError, match=r"groups of \[2, 8\] parameters, .* has \[1\]|different number of param"):
        wrapped.load_optimizer_state(fewer, state)
    if dist.get_world_size() > 1:
        if dist.get_rank() == 0:
            next(iter(mine.state.values()))["odd"] = torch.zeros(3, 3)
        with pytest.raises(
            hpcomm.InvalidArgument, match=r"rank 0: 'odd' in the optimizer's state is of shape \(3, 3\)"
        ):
            wrapped.gather_optimizer_state(mine)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradients_of_a_divided_optimizer_are_clipped(size: int) -> None:
    ranks.run(size, clips_divided)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2)])
def test_a_divided_optimizer_goes_on_with_another_number_of_ranks(before: int, after: int) -> None:
    results = ranks.run(before, fraction)
    for state, _, _ in results[1:]:
        assert_same_state(state, results[0][0])
    file = io.BytesIO()
    torch.save(results[0][:2], file)
    ranks.run(after, resumed, file.getvalue())
