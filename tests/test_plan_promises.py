"""What the docstrings and options of plans promise and no other test asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hpcomm
from hpcomm import _C
from hpcomm.cli import main
from hpcomm.plan import Layer, tune
from hpcomm.plan import compile as compile_plan
from hpcomm.plan.layers import stage_cost
from hpcomm.plan.serialize import from_json
from hpcomm.plan.torch_csv import plan_from_csv, plan_to_csv


def tuned(layers: Sequence[Layer], **options: Any) -> Any:
    given: dict[str, Any] = {
        "pp": 3,
        "batch": 8,
        "dp": 2,
        "schedules": ["1f1b"],
        "stages_per_rank": [1],
        "num_microbatches": [4],
        "weight_copies": 0.0,
    }
    (found,) = tune(layers, **{**given, **options})
    return found


def test_tuned_memory_holds_the_messages_of_both_ways() -> None:
    layers = [Layer(1.0, output_bytes=8.0)] * 6
    found = tuned(layers)  # samples of 8 bytes, 2 in a message; the middle rank takes in both ways
    assert found.memory_bytes == found.plan.slot_depth * 32
    found = tuned(layers, schedules=["interleaved_1f1b"], stages_per_rank=[2])
    assert found.memory_bytes == found.plan.slot_depth / 2 * 64


def test_tuned_memory_is_that_of_the_rank_that_needs_most() -> None:
    layers = [Layer(1.0, activation_bytes=1.0), Layer(1.0, activation_bytes=100.0)]
    assert tuned(layers, pp=2).memory_bytes == 200
    assert tuned(layers, pp=2, memory_bytes=200).memory_bytes == 200


def test_what_was_measured_of_a_step_is_kept() -> None:
    costs = _C.CostModel()
    costs.step_seconds, costs.host_waits = 5.0, not costs.host_waits
    found = tuned([Layer(1.0)] * 6, costs=costs)
    assert found.costs.step_seconds == 5.0
    assert found.costs.host_waits == costs.host_waits


def test_the_cost_of_a_stage_has_its_overhead_in_every_part() -> None:
    cost = stage_cost([Layer(1.0, overhead_seconds=0.5)], 2)
    assert (cost.forward_seconds, cost.backward_seconds) == (2.5, 5.0)
    assert (cost.input_grad_seconds, cost.weight_grad_seconds) == (2.5, 2.5)


def test_costs_are_given_once() -> None:
    wrongs: list[dict[str, Any]] = [{"forward_cost": [1.0, 1.0]}, {"backward_cost": [1.0, 1.0]}]
    for wrong in [*wrongs, {"link_latency": 1.0}, {"link_bandwidth": 1.0}]:
        with pytest.raises(hpcomm.InvalidArgument, match="not both"):
            compile_plan("1f1b", pp=2, num_microbatches=2, costs=_C.CostModel(), **wrong)


def test_groups_communicators_and_opaque_stages_count() -> None:
    grouped = compile_plan("1f1b", pp=4, num_microbatches=8, max_communicators=1, group=True)
    assert any(op.group >= 0 for op in grouped.operations)

    def size(plan: Any) -> int:
        return max(sum(rank in spec.ranks for spec in plan.communicators) for rank in range(plan.world))

    assert size(compile_plan("1f1b", pp=2, dp=2, num_microbatches=4, bucket_bytes=[[4]] * 2)) == 4
    assert size(compile_plan("1f1b", pp=2, dp=2, num_microbatches=4, bucket_bytes=[[4]] * 2, max_communicators=2)) == 2
    opaque = compile_plan("1f1b", pp=2, dp=2, num_microbatches=2, opaque_stages=[1])
    assert {tuple(op.participants) for op in opaque.operations if op.stage == 1 and op.kind.name == "FORWARD"} == {
        (2, 3)
    }


def made(tmp_path: Path, *arguments: Any) -> Any:
    path = tmp_path / "plan.json"
    assert main([*map(str, arguments), "--json", str(path)]) == 0
    return from_json(path.read_text())


def test_every_option_of_plan_show_counts(tmp_path: Path) -> None:
    sizes = {"pp": 2, "dp": 2, "num_microbatches": 4, "bucket_bytes": [[8, 8]] * 2}
    asked = ["plan", "show", "--pp", 2, "--dp", 2, "-m", 4, "--buckets", 2, "--bucket-bytes", 8]
    plain = compile_plan("1f1b", **sizes)
    assert made(tmp_path, *asked).hash == plain.hash
    for options, same in [
        (["--reduce", "end"], {"reduce": "end"}),
        (["--schema", "per_message"], {"schema": "per_message"}),
        (["--activation-bytes", 64], {"activation_bytes": 64}),
        (["--slot-depth", 3], {"slot_depth": 3}),
        (["--device", "cuda"], {"device": "cuda"}),
        (["--tp", 2], {"tp": 2}),
    ]:
        wanted = compile_plan("1f1b", **sizes, **same)
        assert wanted.hash != plain.hash
        assert made(tmp_path, *asked, *options).hash == wanted.hash, options


def test_options_of_import_and_tune_count(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    table.write_text("rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1\n")
    assert made(tmp_path, "plan", "import", table, "--dp", 2).dp == 2
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({"format": "hpcomm.Layers", "layers": [{"forward_seconds": 1, "count": 4}]}))
    best = made(tmp_path, "plan", "tune", layers, "--pp", 2, "--batch", 4, "--device", "cuda")
    assert best.start_order.name == "ISSUE_ORDER"


def test_the_slot_depth_of_a_table_counts() -> None:
    text = plan_to_csv(compile_plan("1f1b", pp=2, num_microbatches=4))
    assert plan_from_csv(text, slot_depth=2).slot_depth == 2
