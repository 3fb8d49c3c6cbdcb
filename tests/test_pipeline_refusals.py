"""Pipelines that are refused: on every rank, at once and in words, whatever is wrong and on whichever rank."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from patience import with_patience
from torch import nn

import hpcomm
from hpcomm.pipeline.stage import evaluate

LIMIT = 120.0  # seconds; no rank may wait so long for another one's error: a run of ranks ends before


def rank() -> int:
    return int(os.environ["RANK"])


def layers(**changes: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(changes.get(f"at_{i}", nn.Linear(4, 4)) for i in range(4)))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def refused(model: nn.Module, kinds: tuple[type[Exception], ...], **options: Any) -> Exception:
    with hpcomm.init(dp=-1, pp=2, timeout=LIMIT) as mesh:
        defaults: dict[str, Any] = {"num_microbatches": 4, "loss_fn": loss}
        with pytest.raises(kinds) as caught:
            hpcomm.Pipeline(model, mesh=mesh, **{**defaults, **options})
        mesh.barrier()  # it is usable
    return caught.value


ON_RANK_1 = {
    "num_microbatches": ("4", "num_microbatches='4'; a whole number, at least 1"),
    "bucket_cap_mb": (None, "TypeError"),
    "keywords": (None, "TypeError"),
    "schedule": ("/nowhere/there.csv", "No such file or directory: '/nowhere/there.csv'"),
    "model": (None, "no words for this"),
    "stages_per_rank": (0, "1 stages per rank, not 0"),
}


class Unspeakable(nn.Identity):
    """Fails where ranks compare their models."""

    def extra_repr(self) -> str:
        raise RuntimeError("no words for this")


def wrong_on_rank_1(argument: str) -> tuple[str, bool]:
    options = {argument: ON_RANK_1[argument][0]} if rank() == 1 and argument != "model" else {}
    model = layers(at_1=Unspeakable()) if rank() == 1 and argument == "model" else layers()
    error = refused(model, (hpcomm.SchemaMismatch,), **options)
    return str(error), error.__cause__ is not None


@pytest.mark.parametrize("argument", ON_RANK_1)
def test_what_is_wrong_on_one_rank_is_told_on_all(argument: str) -> None:
    (zero, other_cause), (one, own_cause) = ranks.run(2, wrong_on_rank_1, argument)
    for words in (zero, one):
        assert ON_RANK_1[argument][1] in words
        assert "rank 0 has 'problem: None'" in words
        assert len(words) < 1000
    assert own_cause
    assert not other_cause


def other_schedules() -> str:
    schedule = ("1f1b", "gpipe")[rank()]
    return str(refused(layers(), (hpcomm.SchemaMismatch,), schedule=schedule, num_microbatches=64))


def test_schedules_that_differ_are_told_by_a_row() -> None:
    for words in ranks.run(2, other_schedules):
        assert "schedule, rank 0: 0F0 0F1" in words
        assert len(words) < 3000


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h * self.phase).real


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "complex": ({}, "parameter 3.phase is torch.complex64"),
    "cap": ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan"),
    "infinite cap": ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf"),
    "split": ({"split_at": "2"}, r"split_at='2' is a string; pass a list"),
    "keywords": ({"keywords": "mask"}, r"keywords='mask' is a string"),
}


def wrong_everywhere(case: str) -> str:
    model = layers(at_3=Complex()) if case == "complex" else layers()
    return str(refused(model, (hpcomm.InvalidArgument,), **WRONG[case][0]))


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_everywhere_is_said_in_words(case: str) -> None:
    for words in ranks.run(2, wrong_everywhere, case):
        assert WRONG[case][1] in words


def schedule_files(folder: Path) -> None:
    """A file is read as ``plan import`` reads it: UTF-8, with a byte order mark or without; errors name it."""
    table, other, none = folder / "table.csv", folder / "latin.csv", folder / "none.csv"
    text = "0F0,0B0\n"
    with hpcomm.init() as mesh:
        for given in (text.encode(), text.encode("utf-8-sig")):
            table.write_bytes(given)
            assert hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=1, loss_fn=loss, schedule=table).plan.pp == 1
        other.write_bytes(b"0F0,\xff\n")
        none.write_text("0F0,soon\n")
        for path in (other, none):
            with pytest.raises(hpcomm.InvalidArgument, match=str(path)):
                hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=1, loss_fn=loss, schedule=str(path))


def test_a_schedules_file_is_read_whatever_wrote_it(tmp_path: Path) -> None:
    ranks.run(1, schedule_files, tmp_path)


def shared_statistics() -> str:
    norm = nn.BatchNorm1d(4)
    return str(refused(layers(at_0=norm, at_3=norm), (hpcomm.InvalidArgument,)))


def test_a_batch_norm_of_two_ranks_is_refused() -> None:
    for words in ranks.run(2, shared_statistics):
        assert "3 (BatchNorm1d) is in stage 1 and in one of another rank" in words


def shared_without_statistics() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with hpcomm.init(dp=-1, pp=2) as mesh:
        pipe = hpcomm.Pipeline(layers(at_0=norm, at_3=norm), mesh=mesh, num_microbatches=2, loss_fn=loss)
        pipe.step(torch.randn(8, 4))


def test_one_without_statistics_is_not() -> None:
    ranks.run(2, shared_without_statistics)


class Odd(nn.Module):
    """A layer with buffers of types that no transport sums, conjugated ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.tensor([1 << 31, rank()], dtype=torch.uint32))
        self.register_buffer("phase", torch.full((2, 3), 1j * rank(), dtype=torch.complex64).T)
        self.register_buffer("mirror", torch.full((2,), 1j * rank(), dtype=torch.complex64).conj())
        self.register_buffer("flag", torch.tensor(rank() == 0))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Noted(Odd):
    """Its state dict has an entry of another kind, as those of quantized layers have."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "_extra_note"] = {"bits": 8}


class Extra(Odd):
    """Its state is made when it is asked for: no tensor, or one of another size on each rank."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return torch.ones(1 + rank()) if self.extra == "tensor" else {"a": 1}

    def set_extra_state(self, _: Any) -> None:
        pass


def odd_state() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        for extra in ("", "note", "tensor", "dict"):
            odd = Noted() if extra == "note" else Extra(extra) if extra else Odd()
            model = layers(at_1=odd, at_3=Odd())
            pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=loss)
            pipe.step(torch.randn(8, 4))
            # Of the first replica: ranks 0 and 2.
            first = 2 * mesh.coordinate["pp"]
            for name, value in pipe.state_dict().items():
                if name.endswith("counts"):
                    assert value.tolist() == [1 << 31, first]
                elif name.endswith("phase"):
                    assert value.tolist() == [[1j * first] * 2] * 3
                elif name.endswith("mirror"):
                    assert value.tolist() == [-1j * first] * 2
                elif name.endswith("flag"):
                    assert value.item() is (first == 0)
            if extra:
                with pytest.raises(hpcomm.InvalidArgument, match=r"1\._extra_(state|note) is extra state"):
                    pipe.full_state_dict()
            else:
                whole = pipe.full_state_dict()
                assert [whole[f"{i}.counts"].tolist()[1] for i in (1, 3)] == [0, 2]
                assert [bool(whole[f"{i}.flag"]) for i in (1, 3)] == [True, False]
                assert whole["3.phase"].tolist() == [[2j] * 2] * 3
            mesh.barrier()


def test_buffers_of_any_type_and_extra_state() -> None:
    ranks.run(4, odd_state)


def step_or_evaluation() -> str:
    mesh = hpcomm.init(dp=2, pp=1, timeout=LIMIT)
    pipe = hpcomm.Pipeline(nn.Sequential(nn.Linear(4, 4)), mesh=mesh, num_microbatches=2, loss_fn=loss)
    pipe.eval_step(torch.randn(4, 4))
    with pytest.raises((hpcomm.SchemaMismatch, hpcomm.PeerError)) as caught:
        (pipe.step if mesh.rank == 0 else pipe.eval_step)(torch.randn(4, 4))
    return str(caught.value)


def test_replicas_that_train_and_evaluate_at_once_are_told() -> None:
    assert any("1 of 2 ranks evaluate, the others train" in words for words in ranks.run(2, step_or_evaluation))


def nothing_to_train_on() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=2, loss_fn=None)
        _, outputs = pipe.eval_step(torch.randn(4, 4), return_outputs=True)
        assert (outputs is None) == (mesh.rank == 0)
        for call in (lambda: pipe.loss_of(1, 2), lambda: pipe.step(torch.randn(4, 4))):
            with pytest.raises(hpcomm.InvalidArgument, match="loss_fn=None"):
                call()


def test_a_pipeline_without_a_loss_only_evaluates() -> None:
    ranks.run(2, nothing_to_train_on)


def late(limit: float) -> str:
    mesh = hpcomm.init(dp=1, pp=2, timeout=limit)
    if mesh.rank == 0:
        with pytest.raises(hpcomm.TimedOut) as caught:
            hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=2, loss_fn=loss)
        mesh.control.send(1, 991, b"told")
        return str(caught.value)
    assert mesh.control.receive(0, 991, LIMIT) == b"told"
    return ""


def test_a_time_out_says_what_was_waited_for() -> None:
    def attempt(limit: float) -> None:
        assert "to compare the model or the arguments of Pipeline" in ranks.run(2, late, limit, timeout=60)[0]

    with_patience(attempt, 1.0)  # which the start has to keep as well


def hooked() -> nn.Sequential:
    model = layers()
    model.register_forward_hook(lambda _, __, output: output * 2)
    return model


def refused_alone(options: dict[str, Any], words: str) -> None:
    model = options.pop("model", layers)()
    with hpcomm.init() as mesh, pytest.raises(hpcomm.InvalidArgument, match=words):
        hpcomm.Pipeline(model, mesh=mesh, **{"num_microbatches": 4, "loss_fn": loss, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"whole": ["tabel"]}, "no layer of the model takes the keyword argument 'tabel'"),
        ({"keywords": ["mask"]}, "no layer of the model takes the keyword argument 'mask'"),
        ({"num_microbatches": 1.5}, "num_microbatches=1.5; a whole number"),
        ({"model": lambda: torch.compile(layers())}, r"compile its layers, by layer\.compile\(\)"),
        ({"model": hooked}, "a hook on the Sequential itself, which is never called"),
    ],
)
def test_what_nobody_would_notice_is_refused(options: dict[str, Any], words: str) -> None:
    refused_alone(dict(options), words)


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/there"])
def test_a_trace_that_cannot_be_written_names_its_variable(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("HPCOMM_TRACE", folder)
    refused_alone({}, f"HPCOMM_TRACE='{folder}': no folder")


def test_a_weight_on_a_device_is_warned_of() -> None:
    def loss_fn(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.sum(), torch.empty((), device="meta")  # as one on a GPU, but for a number

    with (
        pytest.warns(UserWarning, match="a tensor on meta: .* the host waits"),
        pytest.raises(RuntimeError, match="meta"),
    ):
        evaluate(loss_fn, torch.ones(2), None)


# --- Steps ------------------------------------------------------------------------------------------------------------

REGRESSION = nn.functional.mse_loss
# What each rank of a replica passes, and who refuses it in which words.
WRONG_STEPS: dict[str, tuple[Any, list[tuple[tuple[Any, ...], dict[str, Any]]], int, str]] = {
    "no target": (REGRESSION, [((8,), {})] * 2, 1, "loss_fn does not fit to a step with no target: missing a required"),
    "a target for nobody": (loss, [((8,), {"target": 8})] * 2, 1, "loss_fn does not fit to a step with a target: too"),
    "a target by position": (
        REGRESSION,
        [((8, 8), {})] * 2,
        0,
        "first layer, '0' (Linear), does not take the positional",
    ),
    "more rows on the last stage": (
        REGRESSION,
        [((4,), {"target": 4}), ((8,), {"target": 8})],
        1,
        "a microbatch has 1 rows on rank 0, that of the first stage, and 2 on rank 1: all ranks of a replica",
    ),
    "fewer": (REGRESSION, [((8,), {"target": 8}), ((4,), {"target": 4})], 1, "2 rows on rank 0, that of the first"),
    "a target alone": (REGRESSION, [((8,), {}), ((None,), {"target": 5})], 1, "and 1 on rank 1"),
    "keywords alone": (loss, [((8,), {"mask": 8}), ((None,), {"mask": 5})], 1, "and 1 on rank 1"),
}


class Masked(nn.Linear):
    def forward(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(h if mask is None else h * mask)


def wrong_step(case: str) -> None:
    loss_fn, arguments, _, _ = WRONG_STEPS[case]
    with hpcomm.init(pp=2, timeout=LIMIT) as mesh:
        model = layers(at_2=Masked(4, 4))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=4, loss_fn=loss_fn, split_at=[2])
        inputs, keywords = arguments[mesh.rank]
        given = [None if rows is None else torch.ones(rows, 4) for rows in inputs]
        mesh.barrier()  # nobody refuses while another one is still making it
        pipe.step(*given, **{name: torch.ones(rows, 4) for name, rows in keywords.items()})


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_arguments_of_a_step_that_do_not_fit_are_told_on_every_rank(case: str) -> None:
    *_, who, words = WRONG_STEPS[case]
    outcomes = ranks.run(2, wrong_step, case, expect_failure=True)
    assert outcomes[who].exception == "InvalidArgument"
    assert outcomes[1 - who].exception == "PeerError"
    for outcome in outcomes:
        assert words in outcome.message


def errors_of_their_own() -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise TypeError("of the loss itself")

    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=1, loss_fn=broken)
        with pytest.raises(TypeError, match="of the loss itself"):
            pipe.step(torch.ones(2, 4), target=torch.ones(2, 4))


def test_type_errors_of_a_program_stay_as_they_are() -> None:
    ranks.run(1, errors_of_their_own)


def copied() -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=1, loss_fn=loss)
        averages = torch.optim.swa_utils.AveragedModel(pipe.module)  # copies its model
        for way in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(hpcomm.InvalidArgument, match="copy.deepcopy\\(pipe.module\\)"):
                way(pipe)
        pipe.step(torch.ones(2, 4))
        averages.update_parameters(pipe.module)


def test_a_pipeline_is_not_copied() -> None:
    ranks.run(1, copied)


def test_what_is_no_mesh_is_refused() -> None:
    mesh: Any = None
    with pytest.raises(hpcomm.InvalidArgument, match="Pipeline: mesh=None is no mesh; pass the one that hpcomm.init"):
        hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=1, loss_fn=loss)
    with pytest.raises(hpcomm.InvalidArgument, match="GradScaler: mesh=None is no mesh"):
        hpcomm.GradScaler(mesh)
    with pytest.raises(hpcomm.InvalidArgument, match="DistributedDataParallel: mesh='dp' is no mesh"):
        hpcomm.DistributedDataParallel(nn.Linear(2, 2), mesh="dp")  # type: ignore[arg-type]


def other_model(only_on: int) -> str:
    with hpcomm.init(pp=2) as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=4, loss_fn=loss)
        other = layers()[:3] if only_on in (mesh.rank, -1) else layers()
        kind = hpcomm.InvalidArgument if only_on == -1 else hpcomm.SchemaMismatch
        with pytest.raises(kind) as caught:
            hpcomm.verify(pipe, other, torch.ones(8, 4))
        assert hpcomm.verify(pipe, layers(), torch.ones(8, 4)).compared == 8
    return str(caught.value)


@pytest.mark.parametrize("only_on", [-1, 1])
def test_verify_refuses_a_model_that_is_built_otherwise(only_on: int) -> None:
    for words in ranks.run(2, other_model, only_on):
        assert "it has no 3.weight" in words


def other_batches(what: str) -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.mse_loss)
        x, y = torch.full((8, 4), 1.0 + mesh.dp.rank), torch.full((8, 4), 2.0)
        batch = {"x": x, "target": y}
        if mesh.pp.rank == 1 and mesh.dp.rank == 1:
            batch[what] = batch[what] + torch.eye(8)[:, :4]  # another order of samples, say
        words = rf"rank 1 and rank 3, which are stages of one replica, were given different batches: {what}\. All ranks"
        with pytest.raises(hpcomm.SchemaMismatch, match=words):
            hpcomm.verify(pipe, layers(), **batch)
        assert hpcomm.verify(pipe, layers(), x, target=y).compared == 8


@pytest.mark.parametrize("what", ["x", "target"])
def test_verify_names_stages_that_were_given_other_batches(what: str) -> None:
    ranks.run(4, other_batches, what)


def test_a_wrong_argument_on_one_rank_alone_ends_nothing() -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
        x = torch.ones(4, 4)
        wrong: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
            ((x,), {"target": x, "tgt": x}),
            ((x[:1],), {"target": x[:1]}),
            ((x,), {}),
            ((x, x), {}),  # the target by position
        ]
        for call, (arguments, options) in itertools.product((pipe.step, pipe.eval_step), wrong):
            with pytest.raises(hpcomm.InvalidArgument):
                call(*arguments, **options)
        assert pipe.step(x, target=x).isfinite()
        assert hpcomm.verify(pipe, layers(), x, target=x).compared == 8


def clipped_without_a_reduction() -> None:
    with hpcomm.init(dp=2) as mesh:
        pipe = hpcomm.Pipeline(layers(), mesh=mesh, num_microbatches=2, loss_fn=loss)
        assert hpcomm.clip_grad_norm_(pipe, 1.0) == 0.0
        x = torch.full((4, 4), 10.0**mesh.rank)
        pipe.step(x, reduce=False)
        with pytest.raises(hpcomm.InvalidArgument, match="the last step had reduce=False"):
            hpcomm.clip_grad_norm_(pipe, 1.0)
        pipe.step(x)
        assert hpcomm.clip_grad_norm_(pipe, 1.0) > 0.0


def test_gradients_that_are_not_reduced_are_not_clipped() -> None:
    ranks.run(2, clipped_without_a_reduction)
