"""StepPlans as JSON text: how rank 0 hands its plan to the others, and how plans are kept in files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.files import parse_json

if TYPE_CHECKING:
    from hpcomm._C import StepPlan

_FORMAT = "hpcomm.StepPlan"
_VERSION = 3
# One row per operation: a plan has many, their field names would be most of the text.
_COLUMNS = [
    "kind",
    "stage",
    "peer_stage",
    "microbatch",
    "bucket",
    "payload",
    "communicator",
    "participants",
    "bytes",
    "group",
]
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1


def to_json(plan: StepPlan) -> str:
    """The plan as JSON text, with its hash."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "hash": f"{plan.hash:016x}",
            "pp": plan.pp,
            "dp": plan.dp,
            "tp": plan.tp,
            "num_microbatches": plan.num_microbatches,
            "slot_depth": plan.slot_depth,
            "stage_to_rank": plan.stage_to_rank,
            "buckets": plan.buckets,
            "ties": [[tie.stages, tie.bytes] for tie in plan.ties],
            "schema": plan.schema.name,
            "start_order": plan.start_order.name,
            "communicators": [[spec.lane.name, spec.ranks] for spec in plan.communicators],
            "columns": _COLUMNS,
            "operations": [
                [
                    op.kind.name,
                    op.stage,
                    op.peer_stage,
                    op.microbatch,
                    op.bucket,
                    op.payload.name,
                    op.communicator,
                    op.participants,
                    op.bytes,
                    op.group,
                ]
                for op in plan.operations
            ],
            "lists": [[[issue.op, issue.host] for issue in issues] for issues in plan.lists],
            "dependencies": plan.dependencies,
        },
        separators=(",", ":"),
    )


def from_json(text: str) -> StepPlan:
    """The plan that ``to_json`` wrote: well formed, with the hash that it had, but not verified.

    Raises:
        InvalidArgument: ``text`` is no such plan, or damaged; the message names the place.
    """
    document = parse_json(text, "a StepPlan")
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise InvalidArgument(f'not a StepPlan: "format" must be "{_FORMAT}"')
    version = _int(document.get("version"), "version")
    if version != _VERSION:
        raise InvalidArgument(f"a StepPlan of version {version}; this hpcomm reads version {_VERSION}")
    if document.get("columns") != _COLUMNS:
        raise InvalidArgument(f'"columns" must be {_COLUMNS}')
    plan = _build(document)
    found = f"{plan.hash:016x}"
    if document.get("hash") != found:
        raise InvalidArgument(f"damaged StepPlan: its hash is {found}, the text says {document.get('hash')!r:.40}")
    try:
        plan.require_well_formed()
    except InvalidArgument as error:
        raise InvalidArgument(f"not a well-formed StepPlan: {error}") from error
    return plan


def _build(document: dict[str, Any]) -> StepPlan:
    native = load()
    plan: StepPlan = native.StepPlan()
    plan.pp = _int(document.get("pp"), "pp")
    plan.dp = _int(document.get("dp"), "dp")
    plan.tp = _int(document.get("tp"), "tp")
    plan.num_microbatches = _int(document.get("num_microbatches"), "num_microbatches")
    plan.slot_depth = _int(document.get("slot_depth"), "slot_depth")
    plan.stage_to_rank = _ints(document.get("stage_to_rank"), "stage_to_rank")
    plan.buckets = [
        [_int(size, f"buckets[{stage}]", _INT64) for size in _list(sizes, f"buckets[{stage}]")]
        for stage, sizes in enumerate(_list(document.get("buckets"), "buckets"))
    ]
    ties = []
    for i, row in enumerate(_list(document.get("ties"), "ties")):
        stages, size = _list(row, f"ties[{i}]", 2)
        ties.append(native.Tie(_ints(stages, f"ties[{i}]"), _int(size, f"ties[{i}]", _INT64)))
    plan.ties = ties
    plan.schema = _member(native.Schema, document.get("schema"), "schema")
    plan.start_order = _member(native.StartOrder, document.get("start_order"), "start_order")
    communicators = []
    for i, row in enumerate(_list(document.get("communicators"), "communicators")):
        where = f"communicators[{i}]"
        lane, ranks = _list(row, where, 2)
        communicators.append(native.CommunicatorSpec(_ints(ranks, where), _member(native.Lane, lane, where)))
    plan.communicators = communicators
    operations = []
    for i, row in enumerate(_list(document.get("operations"), "operations")):
        where = f"operations[{i}]"
        kind, *numbers, payload, communicator, participants, size, group = _list(row, where, len(_COLUMNS))
        stage, peer_stage, microbatch, bucket = (_int(number, where) for number in numbers)
        operations.append(
            native.Operation(
                _member(native.OpKind, kind, where),
                stage=stage,
                peer_stage=peer_stage,
                microbatch=microbatch,
                bucket=bucket,
                payload=_member(native.Payload, payload, where),
                communicator=_int(communicator, where),
                participants=_ints(participants, where),
                bytes=_int(size, where, _INT64),
                group=_int(group, where),
            )
        )
    plan.operations = operations
    lists = []
    for rank, issues in enumerate(_list(document.get("lists"), "lists")):
        where = f"lists[{rank}]"
        lists.append([native.Issue(*_pair(issue, where)) for issue in _list(issues, where)])
    plan.lists = lists
    plan.dependencies = [
        _pair(row, f"dependencies[{i}]") for i, row in enumerate(_list(document.get("dependencies"), "dependencies"))
    ]
    return plan


def _int(value: object, where: str, limit: int = _INT32) -> int:
    # bool is an int to Python, not to a plan.
    if not isinstance(value, int) or isinstance(value, bool) or not -limit <= value <= limit:
        raise InvalidArgument(f"{where}: expected an integer of {limit.bit_length() + 1} bits, found {value!r:.40}")
    return value


def _list(value: object, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        size = "" if length is None else f" of {length}"
        raise InvalidArgument(f"{where}: expected a list{size}, found {value!r:.40}")
    return value


def _ints(value: object, where: str) -> list[int]:
    return [_int(number, where) for number in _list(value, where)]


def _pair(value: object, where: str) -> tuple[int, int]:
    first, second = _ints(_list(value, where, 2), where)
    return first, second


def _member(enum: Any, value: object, where: str) -> Any:
    if not isinstance(value, str) or value not in enum.__members__:
        raise InvalidArgument(f"{where}: expected one of {', '.join(enum.__members__)}, found {value!r:.40}")
    return enum.__members__[value]
