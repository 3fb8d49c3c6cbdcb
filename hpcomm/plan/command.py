"""``hpcomm plan show | verify | simulate | tune | import``: plans at the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcomm.errors import DeadlockError, InvalidArgument, SchemaMismatch
from hpcomm.plan.chrome import to_chrome_trace
from hpcomm.plan.compile import compile as compile_plan
from hpcomm.plan.costs import costs_to_json, load_costs
from hpcomm.plan.files import read_text, say, write_text
from hpcomm.plan.layers import load_layers
from hpcomm.plan.render import to_svg
from hpcomm.plan.schedules import SCHEDULES
from hpcomm.plan.serialize import from_json, to_json
from hpcomm.plan.table import draw, num_microbatches_of, parse, placement_of, require_positive
from hpcomm.plan.timeline import draw_ticks, first_replicas
from hpcomm.plan.torch_csv import plan_from_csv, table_from_csv
from hpcomm.plan.tuning import BUCKET_BYTES, STAGES_PER_RANK, WEIGHT_COPIES, Search

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StepPlan, Timeline

_T = TypeVar("_T")


def add_to(commands: Any) -> None:
    """Adds ``plan`` to the subparsers of hpcomm's command line."""
    plan = commands.add_parser("plan", help="make, prove, simulate, draw and tune plans of a training step")
    verbs = plan.add_subparsers(title="what to do", required=True, metavar="VERB")

    show = verbs.add_parser("show", help="print a plan, and draw it")
    _add_source(show)
    show.add_argument("--ticks", type=float, metavar="SECONDS", help="print what is computed, a column per tick")
    show.add_argument("--svg", type=_file, metavar="FILE", help="draw the simulated time line")
    show.add_argument("--trace", type=_file, metavar="FILE", help="write it for chrome://tracing and Perfetto")
    show.add_argument("--json", type=_file, metavar="FILE", help="write the plan")
    show.set_defaults(run=_show)

    verify = verbs.add_parser("verify", help="prove that no rank hangs, or print the circle in which ranks wait")
    _add_source(verify)
    verify.add_argument("--slots", action="store_true", help="every lane has a slot of its own: proves less")
    verify.add_argument(
        "--max-activations", type=_number(0), default=0, metavar="N", help="microbatches held by a rank"
    )
    verify.set_defaults(run=_verify)

    simulate = verbs.add_parser("simulate", help="how long a step takes, and where the time goes")
    _add_source(simulate)
    simulate.set_defaults(run=_simulate)

    tuning = verbs.add_parser("tune", help="pick schedule, stages per rank, microbatches and bucket size")
    tuning.add_argument("layers", type=_file, metavar="LAYERS.json", help="of the model: docs/reference/plan-files.md")
    tuning.add_argument("--pp", type=int, required=True)
    tuning.add_argument("--dp", type=_number(1), default=1)
    tuning.add_argument("--batch", type=_number(1, 1 << 20), required=True, help="samples of a replica per step")
    tuning.add_argument("--memory", type=float, metavar="BYTES", help="of a rank, for activations, slots and weights")
    tuning.add_argument("--costs", type=_file, metavar="FILE", help="a cost model; its stages are not used")
    tuning.add_argument("--device", choices=["cpu", "cuda"], help="where it will run")
    tuning.add_argument("--json", type=_file, metavar="FILE", help="write the best plan")
    tuning.add_argument(
        "--costs-json", type=_file, metavar="FILE", help="write the cost model with its stages, to simulate it"
    )
    tuning.set_defaults(run=_tune)

    importing = verbs.add_parser("import", help="read the CSV of torch.distributed.pipelining, or a drawn table")
    importing.add_argument(
        "table", type=_file, metavar="FILE", help="a .csv of torch, or rows such as 'rank 0 | F0 F1 B0 B1'"
    )
    importing.add_argument("--as-it-stands", action="store_true", help="judge the communication of the CSV itself")
    importing.add_argument("--dp", type=_number(1), default=1)
    importing.add_argument("--json", type=_file, metavar="FILE", help="write the plan")
    importing.set_defaults(run=_import)


def _file(text: str) -> str:
    """Of options and arguments that name a file: an empty one is a shell's variable that was not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file's name, found an empty one")
    return text


def _number(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Reads an integer of an option; argparse says which one is wrong."""

    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {most}, found {value}")
        return value

    read.__name__ = "integer"  # argparse: "invalid integer value: 'x'"
    return read


def _add_source(parser: argparse.ArgumentParser) -> None:
    """A plan in a file, or the arguments of compile()."""
    parser.add_argument("file", nargs="?", type=_file, metavar="PLAN.json", help="a plan that was written before")
    made = [
        parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b"),
        parser.add_argument("--pp", type=int, default=4, help="pipeline ranks"),
        parser.add_argument("--dp", type=_number(1), default=1, help="replicas of each"),
        parser.add_argument("--tp", type=_number(1), default=1, help="shards of each replica"),
        parser.add_argument("--microbatches", "-m", type=int, default=8),
        parser.add_argument("--stages-per-rank", type=int),
        parser.add_argument("--buckets", type=_number(0, 100_000), default=1, help="gradient buckets of each stage"),
        parser.add_argument("--bucket-bytes", type=_number(0, 2**63 - 1), default=0),
        parser.add_argument("--activation-bytes", type=_number(0, 2**63 - 1), default=0, help="of a message"),
        parser.add_argument("--slot-depth", type=_number(0)),
        parser.add_argument("--reduce", choices=["eager", "slack", "end"], default="slack"),
        parser.add_argument("--schema", choices=["frozen", "per_message"], default="frozen"),
        parser.add_argument(
            "--device", choices=["cpu", "cuda"], help="where it will run: who guarantees the start order"
        ),
    ]
    parser.set_defaults(of_a_new_plan=[(action, action.default) for action in made])
    for action in made:
        action.default = None  # not given: _source
    parser.add_argument(
        "--costs", type=_file, metavar="FILE", help="a cost model (JSON); without one, forwards take 1 and B 2"
    )


def _source(options: argparse.Namespace) -> tuple[StepPlan, CostModel | None]:
    costs = _from_file(load_costs, options.costs) if options.costs else None
    if options.file:
        try:
            text = _from_file(read_text, options.file)
        except FileNotFoundError:
            hint = f"; for the schedule write --schedule {options.file}" if options.file in SCHEDULES else ""
            raise FileNotFoundError(f"there is no plan file {options.file}{hint}") from None
        for action, _ in options.of_a_new_plan:
            if getattr(options, action.dest) is not None:
                raise InvalidArgument(
                    f"{options.file} is a plan already: {action.option_strings[0]} makes another, without a file"
                )
        plan = _from_file(lambda _: from_json(text), options.file)
        _require_stages(options.costs, costs, plan.num_stages)
        return plan, costs
    for action, default in options.of_a_new_plan:
        if getattr(options, action.dest) is None:
            setattr(options, action.dest, default)
    per_rank = (
        SCHEDULES[options.schedule].stages_per_rank if options.stages_per_rank is None else options.stages_per_rank
    )
    require_positive(options.pp, options.microbatches, per_rank)  # before lists of that length are made
    _require_stages(options.costs, costs, options.pp * per_rank)
    trains = options.schedule != "forward_only"
    plan = compile_plan(
        options.schedule,
        pp=options.pp,
        dp=options.dp,
        tp=options.tp,
        num_microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
        bucket_bytes=[[options.bucket_bytes] * options.buckets] * (options.pp * per_rank) if trains else None,
        activation_bytes=options.activation_bytes,
        slot_depth=options.slot_depth,
        reduce=options.reduce,
        schema=options.schema,
        device=options.device,
        costs=costs,
    )
    return plan, costs


def _from_file(read: Callable[[Path], _T], path: str | Path) -> _T:
    """What ``read`` makes of a file; what is wrong with it is said under its name."""
    try:
        return read(Path(path))
    except ValueError as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _require_stages(path: str, costs: CostModel | None, num_stages: int) -> None:
    if costs is not None and len(costs.stages) not in (0, num_stages):
        raise InvalidArgument(
            f'{path}: "stages" has {len(costs.stages)} entries, the plan has {num_stages} stages. Leave it out, or for '
            "the plan of `plan tune --json` take what --costs-json writes with it"
        )


def _show(options: argparse.Namespace) -> int:
    plan, costs = _source(options)
    print(plan if options.ticks is None else draw_ticks(plan, costs, tick=options.ticks), end="")
    if options.ticks is not None:
        print()
    if options.svg:
        to_svg(plan, options.svg, costs)
        _announce(options.svg)
    if options.trace:
        to_chrome_trace(plan, options.trace, costs)
        _announce(options.trace)
    _write(plan, options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    plan, _ = _source(options)
    return _judge(plan, slots=options.slots, max_activations=options.max_activations)


def _judge(plan: StepPlan, **how: Any) -> int:
    try:
        result = plan.verify(**how)
    except (DeadlockError, SchemaMismatch, InvalidArgument) as error:
        print(f"rejected: {error}")
        return 1
    print(
        f"verified: {result.operations} operations of {result.ranks} ranks, {result.edges} edges without a circle, "
        f"plan {plan.hash:016x}\ntaken for granted: {result.start_order}"
    )
    return 0


def _simulate(options: argparse.Namespace) -> int:
    plan, costs = _source(options)
    timeline = plan.simulate(costs)
    print(_shares(timeline))
    # Without bytes of a stage's activations each microbatch of it counts as one.
    has_bytes = costs is not None and any(stage.activation_bytes != 1 for stage in costs.stages)
    unit = "bytes" if has_bytes else "microbatches of a stage"
    print(f"seconds of each rank; activations, at most, in {unit}")
    print("rank   compute   exposed    bubble  activations")
    for rank in first_replicas(plan):
        times = timeline.ranks[rank]
        print(
            f"{rank:4}  {times.compute_seconds:8.4g}  {times.exposed_seconds:8.4g}  {times.bubble_seconds:8.4g}  "
            f"{times.peak_activations:.6g}"
        )
    return 0


def _shares(timeline: Timeline) -> str:
    return (
        f"{timeline.makespan_seconds:.6g} s a step; of all ranks' time bubbles are {timeline.bubble_share:.2%}, "
        f"exposed communication {timeline.exposed_share:.2%}"
    )


def _tune(options: argparse.Namespace) -> int:
    layers = _from_file(load_layers, options.layers)
    costs = _from_file(load_costs, options.costs) if options.costs else None
    search = Search(layers, options.pp, options.dp, options.batch, costs, WEIGHT_COPIES, options.device)
    best = search.best(search.choices(None, STAGES_PER_RANK, None, BUCKET_BYTES), memory_bytes=options.memory, keep=10)
    print("  seconds   bubble  exposed  memory of a rank  schedule")
    for rated in best:
        print(
            f"{rated.makespan_seconds:9.4g}  {rated.bubble_share:6.1%}  {rated.exposed_share:6.1%}  "
            f"{rated.memory_bytes:16.4g}  {rated.choice}"
        )
    if options.json or options.costs_json:
        fastest = search.candidate(best[0].choice)
        _write(fastest.plan, options.json)
        if options.costs_json:
            write_text(options.costs_json, costs_to_json(fastest.costs))
            _announce(options.costs_json)
    return 0


def _import(options: argparse.Namespace) -> int:
    is_csv = options.table.lower().endswith(".csv")
    if options.as_it_stands:
        if not is_csv:
            raise InvalidArgument("--as-it-stands needs a .csv with communication in it")
        if options.dp != 1:
            raise InvalidArgument("--as-it-stands takes the CSV as it is, which is of one replica: without --dp")
        plan = _from_file(lambda path: plan_from_csv(read_text(path)), options.table)
    else:
        read = table_from_csv if is_csv else parse
        table = _from_file(lambda path: read(read_text(path)), options.table)
        if not any(table):
            raise InvalidArgument(f"{options.table}: the schedule has no computations")
        placement = placement_of(table)
        print(draw(table))
        trains = any(action.kind != "F" for actions in table for action in actions)
        plan = compile_plan(
            table,
            pp=len(table),
            dp=options.dp,
            num_microbatches=num_microbatches_of(table),
            stage_to_rank=placement,
            bucket_bytes=[[0]] * len(placement) if trains else None,
        )
    print(plan, end="")
    _write(plan, options.json)
    return _judge(plan)


def _write(plan: StepPlan, path: str | None) -> None:
    if path:
        write_text(path, to_json(plan))
        _announce(path)


def _announce(path: str) -> None:
    say(f"wrote {path}")
