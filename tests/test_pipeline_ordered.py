"""``deterministic=True``: the same bits for every mesh and schedule, and a word where that cannot be had."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pipeline_models as models
import pytest
import ranks
import torch
from torch import nn

import hpcomm
from hpcomm.pipeline.ordered import Tree, total_of

MICROBATCHES, ROWS, WIDTH = 8, 3, 8  # of the global batch
Found = dict[str, torch.Tensor]


# --- The tree ---------------------------------------------------------------------------------------------------------


class Named:
    """A term that remembers how it was summed: stands for a tensor."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_(self, other: Named) -> Named:
        return Named(f"({self.text}+{other.text})")


def sum_of(leaves: int, order: list[int]) -> str:
    tree = Tree(leaves)
    for leaf in order:
        tree.put(leaf, [Named(str(leaf))])  # type: ignore[list-item]
    (total,) = tree.take()
    return total.text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_order_of_terms_does_not_change_the_sum(leaves: int, text: str) -> None:
    generator = random.Random(leaves)
    for _ in range(20):
        order = list(range(leaves))
        generator.shuffle(order)
        assert sum_of(leaves, order) == text


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_a_tree_of_replicas_goes_on_where_theirs_end(replicas: int, microbatches: int) -> None:
    leaves = replicas * microbatches
    over = Tree(replicas)
    for replica in range(replicas):
        tree = Tree(microbatches)
        for microbatch in range(microbatches):
            tree.put(microbatch, [Named(str(replica * microbatches + microbatch))])  # type: ignore[list-item]
        over.put(replica, tree.take())
    assert over.take()[0].text == sum_of(leaves, list(range(leaves)))  # type: ignore[union-attr]


def test_terms_that_are_missing_are_an_error_of_ours() -> None:
    tree = Tree(4)
    for leaf in (0, 1, 3):
        tree.put(leaf, [torch.ones(1)])
    with pytest.raises(hpcomm.InternalError, match="before all had come"):
        tree.take()


def test_a_sum_is_that_of_its_terms_and_leaves_them_alone() -> None:
    terms = [torch.tensor(10.0**i, dtype=torch.float64) for i in range(7)]
    assert Fraction(total_of(terms).item()) == 1111111
    assert [term.item() for term in terms] == [10.0**i for i in range(7)]


# --- Pipelines --------------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(nn.Conv1d(3, 1, 1), nn.Flatten(), *block)


def trained(dp: int, pp: int, schedules: list[str], options: dict[str, Any]) -> dict[str, Found]:
    """Losses, norms and weights of three steps, by schedule; this rank's part of them."""
    results = {}
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        for schedule in schedules:
            pipe = hpcomm.Pipeline(
                layers(),
                mesh=mesh,
                num_microbatches=MICROBATCHES // dp,
                loss_fn=nn.functional.mse_loss,
                schedule=schedule,
                reduce=("slack", "eager", "end")[len(schedule) % 3],
                **options,
            )
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            found: Found = {}
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                rows = MICROBATCHES * ROWS
                x, y = torch.randn(rows, 3, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
                mine = slice(mesh.dp.rank * rows // dp, (mesh.dp.rank + 1) * rows // dp)
                optimizer.zero_grad()
                found[f"loss {step}"] = pipe.step(x[mine], target=y[mine])
                found[f"norm {step}"] = hpcomm.clip_grad_norm_(pipe, 0.5)
                optimizer.step()
            found["evaluated"] = pipe.eval().eval_step(x[mine], target=y[mine])
            results[schedule] = found | {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return results


def require_bits(found: list[dict[str, Found]], want: Found) -> None:
    for schedule in found[0]:
        seen = set()
        for rank, results in enumerate(found):
            for name, value in results[schedule].items():
                assert value.dtype == want[name].dtype
                assert torch.equal(value, want[name]), (schedule, rank, name, value, want[name])
                seen.add(name)
        assert seen == want.keys()


@pytest.fixture(scope="module")
def want() -> Found:
    return ranks.run(1, trained, 1, 1, ["1f1b"], {"deterministic": True})[0]["1f1b"]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_the_same_bits_on_every_mesh(dp: int, pp: int, transport: str, want: Found) -> None:
    schedules = [*models.SCHEDULES] if transport == "shm" else ["1f1b", "zbv"]
    options = {"deterministic": True, "bucket_cap_mb": 0.0005}
    env = {"HPCOMM_CPU_TRANSPORT": transport}
    require_bits(ranks.run(dp * pp, trained, dp, pp, schedules, options, env=env, timeout=60), want)


@pytest.mark.parametrize("rules", ["nccl", "nccl:lanes"])
def test_the_same_bits_under_nccls_rules(rules: str, want: Found) -> None:
    options = {"deterministic": True, "bucket_cap_mb": 0.0005}
    env = {"HPCOMM_EMULATE": rules}
    require_bits(ranks.run(4, trained, 2, 2, ["1f1b", "zbv"], options, env=env, timeout=60), want)


def test_nothing_of_that_holds_by_itself(want: Found) -> None:
    found = ranks.run(2, trained, 2, 1, ["1f1b"], {})
    with pytest.raises(AssertionError):
        require_bits(found, want)
    for name, value in found[0]["1f1b"].items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


def make(mesh: hpcomm.Mesh, model: nn.Module, microbatches: int, **options: Any) -> hpcomm.Pipeline:
    options = {"loss_fn": nn.functional.mse_loss, "deterministic": True} | options
    return hpcomm.Pipeline(model, mesh=mesh, num_microbatches=microbatches, **options)


def refused_pipelines() -> None:
    with hpcomm.init(dp=2) as mesh:
        layer = nn.Linear(2, 2)
        with pytest.raises(hpcomm.InvalidArgument, match="needs a power of two as num_microbatches, not 6"):
            make(mesh, nn.Sequential(layer), 6)
        with pytest.raises(hpcomm.InvalidArgument, match=r"'0.weight' belongs to several stages"):
            make(mesh, nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()), 4, schedule="interleaved_1f1b")
        pipe = make(mesh, nn.Sequential(layer, nn.Tanh(), layer), 4)  # in one stage: its graph adds both uses up
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_pipelines_that_cannot_promise_it_are_refused() -> None:
    ranks.run(2, refused_pipelines)


def refused_step(rows: int, reduce: bool, weight: float, words: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (output - target).sum(), weight

    with hpcomm.init(dp=2) as mesh:
        pipe = make(mesh, nn.Sequential(nn.Linear(2, 2)), 4, loss_fn=loss_fn)
        with pytest.raises(hpcomm.InvalidArgument, match=words):
            pipe.step(torch.ones(rows, 2), target=torch.ones(rows, 2), reduce=reduce)


@pytest.mark.parametrize(
    ("rows", "reduce", "weight", "words"),
    [
        (6, True, 1.0, "needs equal microbatches; 4 cannot be cut from a batch of 6 samples"),
        (4, False, 1.0, "use more microbatches"),
        (4, True, 0.5, r"the weight 0\.5; only whole numbers"),
    ],
)
def test_steps_that_cannot_keep_it_are_refused(rows: int, reduce: bool, weight: float, words: str) -> None:
    ranks.run(2, refused_step, rows, reduce, weight, words)
