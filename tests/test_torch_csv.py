"""torch's CSV: its own schedules are read and judged, ours are read by its own loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torchs

import hpcomm.plan
from hpcomm.errors import DeadlockError, HpcommError, InvalidArgument
from hpcomm.plan import ComputeAction, Table, plan_from_csv, plan_to_csv, table_from_csv, to_csv
from hpcomm.plan.schedules import by_name
from hpcomm.plan.table import placement_of


class FakeStage:
    """What torch's schedules look at of a stage while they lay out their tables; it computes nothing."""

    def __init__(self, index: int, num_stages: int, group_size: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, num_stages, group_size
        self.group_rank = 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = torch.nn.Identity()
        self.device = torch.device("cpu")
        self.stage_index_to_group_rank = None
        self.has_backward = True


def stock(class_name: str, pp: int, per_rank: int, m: int) -> Any:
    is_v = class_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    indices = [0, 2 * pp - 1] if is_v else range(0, pp * per_rank, pp)
    return getattr(torchs, class_name)([FakeStage(index, pp * per_rank, pp) for index in indices], m)


# torch 2.15 waits in words for each message and reduction.
WAITS = hasattr(torchs, "WAIT_SEND_F")


def dumped(schedule: Any, path: Path, form: str) -> str:
    schedule._dump_csv(path, format=form)
    return path.read_text()


# torch's class, ours, stages per rank
TWINS = [
    ("ScheduleInterleaved1F1B", "interleaved_1f1b", 2),
    ("ScheduleInterleaved1F1B", "interleaved_1f1b", 3),
    ("ScheduleLoopedBFS", "looped_bfs", 2),
    ("ScheduleInterleavedZeroBubble", "zb1p", 1),
    ("ScheduleInterleavedZeroBubble", "zb1p", 2),
    ("ScheduleZBVZeroBubble", "zbv", 2),
    ("ScheduleDualPipeV", "dualpipev", 2),
]
SIZES = [(pp, rounds * pp) for pp in (2, 4, 8) for rounds in (2, 4)]


@pytest.mark.parametrize(("class_name", "name", "per_rank"), TWINS)
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_the_same_schedules_as_torchs(
    tmp_path: Path, class_name: str, name: str, per_rank: int, pp: int, m: int
) -> None:
    theirs = table_from_csv(dumped(stock(class_name, pp, per_rank, m), tmp_path / "t.csv", "compute_only"))
    ours, placement, _ = by_name(name, pp, m, per_rank)
    assert placement_of(theirs) == placement
    if name == "looped_bfs":  # theirs takes the microbatches back in the reverse order
        ours = [[a._replace(microbatch=m - 1 - a.microbatch) if a.kind == "B" else a for a in row] for row in ours]
    assert theirs == ours
    plan = hpcomm.plan.compile(
        theirs, pp=pp, num_microbatches=m, stage_to_rank=placement, bucket_bytes=[[8]] * len(placement)
    )
    plan.verify()


@pytest.mark.parametrize(("class_name", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
@pytest.mark.parametrize(("pp", "m"), [*SIZES, (4, 5)])
def test_the_same_gpipe_and_1f1b_as_torchs(class_name: str, name: str, pp: int, m: int) -> None:
    # These two have no CSV of their own in torch 2.13; they say what they would compute, bubbles and all.
    order = getattr(torchs, class_name)(FakeStage(0, pp, pp), m)._get_pipeline_order()
    if order is None:
        pytest.skip(f"{class_name} of this torch has no table for {pp} stages and {m} microbatches")
    text = "\n".join(",".join("" if action is None else str(action) for action in order[rank]) for rank in range(pp))
    table = table_from_csv(text)
    ours, placement, _ = by_name(name, pp, m)
    assert placement_of(table) == placement
    if name == "1f1b" and table != ours:
        # torch 2.13's table of 1F1B numbers the last rank's forwards from 1; its runtime does not use that table.
        assert [a.microbatch for a in table[-1] if a.kind == "F"] == list(range(1, m + 1))
        with pytest.raises(InvalidArgument, match=f"FORWARD mb {m} of stage {pp - 1}"):
            hpcomm.plan.compile(table, pp=pp, num_microbatches=m)
        table[-1] = [a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in table[-1]]
    assert table == ours
    hpcomm.plan.compile(table, pp=pp, num_microbatches=m, bucket_bytes=[[8]] * pp).verify()


@pytest.mark.parametrize(("class_name", "name", "per_rank"), TWINS)
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_torchs_communication_verifies_as_it_stands(
    tmp_path: Path, class_name: str, name: str, per_rank: int, pp: int, m: int
) -> None:
    # torch 2.13 lowers a table by walking through it once for all ranks, and notes send and receive at the same time:
    # one global order.
    plan = plan_from_csv(dumped(stock(class_name, pp, per_rank, m), tmp_path / "t.csv", "compute_comms"))
    result = plan.verify()
    assert result.operations == len(plan.operations)
    assert {op.kind.name for op in plan.operations} >= {"FORWARD", "TRANSFER", "REDUCE"}


def just_in_time(table: Table, placement: list[int]) -> str:
    """The table with each receive just before the computation that needs it, and each send just behind its own."""
    last = len(placement) - 1

    def crosses(stage: int, other: int) -> bool:
        return 0 <= other <= last and placement[stage] != placement[other]

    rows = []
    for actions in table:
        cells = []
        for action in actions:
            stage, m = action.stage, action.microbatch
            before, behind = (stage - 1, stage + 1) if action.kind == "F" else (stage + 1, stage - 1)
            letter = "F" if action.kind == "F" else "B"
            computes = action.kind != "W"
            cells += [f"{stage}RECV_{letter}{m}"] if computes and crosses(stage, before) else []
            cells += [f"{stage}{action}"]
            cells += [f"{stage}SEND_{letter}{m}"] if computes and crosses(stage, behind) else []
        rows.append(",".join(cells))
    return "\n".join(rows)


@pytest.mark.parametrize(("name", "per_rank"), [("1f1b", 1), *[(name, count) for _, name, count in TWINS]])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_communication_just_in_time_cannot_end_without_buffers(name: str, per_rank: int, pp: int, m: int) -> None:
    table, placement, _ = by_name(name, pp, m, per_rank)
    plan = plan_from_csv(just_in_time(table, placement))
    with pytest.raises(DeadlockError, match="the plan cannot end:\n  rank .* waits to"):
        plan.verify()


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("class_name", "name", "per_rank"), TWINS)
def test_torch_loads_what_we_write(tmp_path: Path, class_name: str, name: str, per_rank: int, form: str) -> None:
    table, placement, _ = by_name(name, 4, 8, per_rank)
    if form == "compute_only":
        text = to_csv(table)
        assert table_from_csv(text) == table
    else:
        plan = hpcomm.plan.compile(
            name, pp=4, num_microbatches=8, stages_per_rank=per_rank, bucket_bytes=[[8, 8]] * len(placement)
        )
        text = plan_to_csv(plan, waits=WAITS)
        assert table_from_csv(text) == table
        plan_from_csv(text).verify()  # in our order it needs nothing
    path = tmp_path / "ours.csv"
    path.write_text(text)
    loaded = stock(class_name, 4, per_rank, 8)
    loaded._load_csv(path, format=form)
    assert loaded.stage_index_to_group_rank == dict(enumerate(placement))
    read = [[str(action) for action in row] for row in loaded.pipeline_order_with_comms.values()]
    computed = [[f"{a.stage}{a}" for a in row] for row in table]
    assert [
        [cell for cell in row if "_" not in cell and "UNSHARD" not in cell and "RESHARD" not in cell] for row in read
    ] == computed
    if form == "compute_comms":
        assert [",".join(row) for row in read] == text.split()
        # torch's own check that the order can be walked through; it knows no reductions.
        for row in loaded.pipeline_order_with_comms.values():
            row[:] = [action for action in row if "REDUCE_GRAD" not in str(action)]
        loaded._simulate()


def test_an_overlapped_pair_is_issued_one_after_the_other() -> None:
    text = "0F0,(3F0;0B0)OVERLAP_F_B,3I0,3W0\n,1F0,2F0\n"
    assert [str(action) for action in table_from_csv(text)[0]] == ["F0", "F0", "B0", "I0", "W0"]
    assert table_from_csv(text)[1] == [ComputeAction("F", 1, 0), ComputeAction("F", 2, 0)]


def test_cells_that_cannot_be_read_are_named() -> None:
    for text, complaint in [
        ("0F0,0X1", "row 0: '0X1' is no action"),
        ("0F0\n1F", "row 1: '1F' is no action"),
        ("0F0,0UNSHARD3", "'0UNSHARD3' is no action"),
        ("0F0,0WAIT_SEND_F", "'0WAIT_SEND_F' is no action"),
        ("0F0,1WAIT_RECV_F0", "'1WAIT_RECV_F0' is no action"),
        ("0F0,(0F1;0Q1)OVERLAP_F_B", "'0Q1' is no action"),
    ]:
        with pytest.raises(InvalidArgument, match=complaint):
            table_from_csv(text)
    for text, complaint in [
        ("0F0,1SEND_F0\n1F0", "row 0: stage 1 does not compute there"),
        ("0F0\n1F0,1SEND_F0", "row 1: 1SEND_F0 leads to a stage that is not there"),
        ("0F0\n0F1", "stage 0 stands in the rows of ranks 0 and 1"),
    ]:
        with pytest.raises(InvalidArgument, match=complaint):
            plan_from_csv(text)


def test_a_file_without_the_receive_is_rejected() -> None:
    with pytest.raises(HpcommError, match="waits for ever: rank 1 issues only 0"):
        plan_from_csv("0F0,0SEND_F0\n1F0").verify()
    plan_from_csv("0F0,0SEND_F0\n1RECV_F0,1F0").verify()


def test_each_message_and_reduction_is_waited_for_once_behind_its_use() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2, bucket_bytes=[[8], [8]])
    rows = [row.split(",") for row in plan_to_csv(plan, waits=True).split()]
    without = [row.split(",") for row in plan_to_csv(plan).split()]
    assert [[cell for cell in row if "WAIT" not in cell] for row in rows] == without
    for row in rows:
        sent = [cell for cell in row if "SEND" in cell and "WAIT" not in cell]
        waited = [cell.replace("WAIT_", "") for cell in row if "WAIT_SEND" in cell]
        assert sorted(waited) == sorted(sent)
    assert rows[0].index("0WAIT_SEND_F0") == rows[0].index("0B0") + 1
    assert rows[1][-2:] == ["1WAIT_SEND_B0", "1WAIT_SEND_B1"]
    for stage, row in enumerate(rows):
        assert row[row.index(f"{stage}REDUCE_GRAD") + 1] == f"{stage}WAIT_REDUCE_GRAD"


def test_what_torch_cannot_express_is_refused() -> None:
    skip = hpcomm.plan.compile("gpipe", pp=3, num_microbatches=1, links=[(0, 1, 8), (1, 2, 8), (0, 2, 8)])
    with pytest.raises(InvalidArgument, match="the plan joins 0 and 2"):
        plan_to_csv(skip)
    tied = hpcomm.plan.compile("gpipe", pp=2, num_microbatches=1, ties=[([0, 1], 8)])
    with pytest.raises(InvalidArgument, match="the plan reduces tie 0"):
        plan_to_csv(tied)


@pytest.mark.parametrize("read", [table_from_csv, plan_from_csv])
def test_lines_may_end_in_any_way(read: Callable[[str], Any]) -> None:
    text = "0F0,0B0\n1F0,1B0\n" if read is table_from_csv else "0F0,0B0\n"
    assert str(read(text.replace("\n", "\r"))) == str(read(text.replace("\n", "\r\n"))) == str(read(text))


def test_what_is_no_csv_is_a_value_error() -> None:
    with pytest.raises(InvalidArgument, match="this is no CSV"):
        table_from_csv('0F0,"' + "0" * 200_000)  # more than a cell may have
