"""``hpcomm trace report``: what steps took, action by action, beside what their plan had predicted."""

from __future__ import annotations

import json
import re
import statistics
from typing import TYPE_CHECKING, Any

from hpcomm.pipeline.recorder import COMPUTE, cost_model, seconds_of, with_rest
from hpcomm.plan.files import write_text
from hpcomm.plan.render import draw_spans, svg
from hpcomm.plan.timeline import Span, draw_strips, first_replicas, label, spans
from hpcomm.trace import Bucket, Message, Rank, Timed, Trace, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcomm._C import CostModel

__all__ = [
    "Bucket",
    "Message",
    "Rank",
    "Timed",
    "Trace",
    "chrome",
    "costs_of",
    "measured_spans",
    "picture",
    "read",
    "table",
    "timeline",
]


def costs_of(trace: Trace) -> CostModel:
    """A cost model with the computations as they were measured, per stage over the steps but the first. Ranks of a host
    share its cores where it has fewer.
    """
    numbers = sorted(trace.steps)[1:] or sorted(trace.steps)
    seconds = seconds_of(
        trace.plan,
        (
            action
            for number in numbers
            for rank in trace.steps[number].values()
            for action in with_rest(
                trace.plan,
                [(op, end - begin - waited, cpu) for op, begin, waited, end, cpu in rank.actions],
                rank.rest,
                trace.seats,
            )
        ),
        trace.seats or None,
    )
    return cost_model(trace.plan.num_stages, seconds, trace.seats or None)


def planned(costs: CostModel) -> str:
    """What a plan that is simulated with ``costs`` is called."""
    shared = f" on {costs.cores_per_host} cores for {costs.ranks_per_host} ranks" if costs.cores_per_host else ""
    return f"planned, with the measured computations{shared}"


def table(trace: Trace, number: int) -> str:
    """Where the time of a step went: by rank, by edge, by bucket."""
    plan, step = trace.plan, trace.steps[number]
    length = max(rank.end for rank in step.values())
    predicted = plan.simulate(costs_of(trace))
    lines = [
        f"step {number}: {length * 1e3:.3f} ms; simulated from the measured computations, messages and reductions "
        f"at the time that they take the host: {predicted.makespan_seconds * 1e3:.3f} ms",
        "",
        f"{'rank':>4} {'compute':>9} {'wait':>9} {'issue':>9} {'at the end':>10} {'rest':>9}   ms; share computed",
    ]
    for index, rank in step.items():
        compute = wait = issue = 0.0
        for op, begin, waited, end, _ in rank.actions:
            operation = plan.operations[op]
            wait += waited
            if operation.kind.name in COMPUTE:
                compute += end - begin - waited
            else:
                issue += end - begin - waited
        drain = rank.end - rank.issued
        rest = length - compute - wait - issue - drain
        figures = " ".join(f"{value * 1e3:>9.3f}" for value in (compute, wait, issue))
        share = compute / length if length else 0.0
        lines.append(f"{index:>4} {figures} {drain * 1e3:>10.3f} {rest * 1e3:>9.3f}   {share:.1%}")
    return "\n".join([*lines, *_edges(trace, number, length), *_buckets(trace, number, length)])


def _edges(trace: Trace, number: int, length: float) -> list[str]:
    """What receivers waited for, by edge. They wait for the sender to send (a bubble), then for the message to come."""
    plan, step = trace.plan, trace.steps[number]
    sent = {
        (rank, timed.op): timed
        for rank, found in step.items()
        for timed in found.actions
        if plan.operations[timed.op].kind.name == "TRANSFER"
    }
    rows: dict[tuple[int, int, str], list[tuple[float, float, float]]] = {}
    for rank, found in step.items():
        for op, begin, end in found.messages:
            operation = plan.operations[op]
            (peer,) = set(operation.participants) - {rank}
            payload = "act" if operation.payload.name == "ACTIVATION" else "grad"
            # The call in which it was sent: small messages are copied there, once for both ranks.
            call = sent[peer, op]
            bubble = max(0.0, min(end, call.begin) - begin)
            rows.setdefault((peer, rank, payload), []).append((end - begin, bubble, call.end - call.begin))
    if not rows:
        return []
    lines = ["", f"{'edge':>9} {'for':>5} {'messages':>9} {'wait':>9} {'bubble':>9} {'wire':>9} {'sending':>9}   ms"]
    lines[-1] += "; shares of the step: bubble, wire"
    for (source, target, payload), times in sorted(rows.items()):
        wait, bubble, sending = (sum(column) for column in zip(*times, strict=True))
        figures = " ".join(f"{value * 1e3:>9.3f}" for value in (wait, bubble, wait - bubble, sending))
        shares = f"{bubble / length:.1%}, {(wait - bubble) / length:.1%}"
        lines.append(f"{f'{source}->{target}':>9} {payload:>5} {len(times):>9} {figures}   {shares}")
    return lines


def _buckets(trace: Trace, number: int, length: float) -> list[str]:
    """Where the time of reductions went, from issue to end: means over the ranks that took part."""
    plan, step = trace.plan, trace.steps[number]
    found: dict[int, list[Bucket]] = {}
    for rank in step.values():
        for bucket in rank.buckets:
            if len(plan.operations[bucket.op].participants) > 1:
                found.setdefault(bucket.op, []).append(bucket)
    if not found:
        return []
    head = ("queue", "pack", "bubble", "wire", "unpack", "total")
    lines = ["", f"{'bucket':>9} {'KiB':>9} " + " ".join(f"{name:>9}" for name in head) + "   ms"]
    lines[-1] += "; shares of the step: bubble, wire"
    for op, parts in sorted(found.items(), key=lambda item: min(part.issued for part in item[1])):
        operation = plan.operations[op]
        last = max(part.packed for part in parts)  # nobody's reduction ends before all have come
        columns = zip(
            *[
                (
                    part.begun - part.issued,
                    part.packed - part.begun,
                    min(last, part.reduced) - part.packed,
                    part.reduced - min(last, part.reduced),
                    part.ended - part.reduced,
                    part.ended - part.issued,
                )
                for part in parts
            ],
            strict=True,
        )
        means = [statistics.fmean(column) for column in columns]
        where = f"tie {operation.bucket}" if operation.kind.name == "TIED" else f"{operation.stage}.R{operation.bucket}"
        ranks = ",".join(map(str, operation.participants))
        figures = " ".join(f"{value * 1e3:>9.3f}" for value in means)
        shares = f"{means[2] / length:.1%}, {means[3] / length:.1%}"
        lines.append(f"{where:>9} {operation.bytes / 1024:>9.1f} {figures}   {shares} (ranks {ranks})")
    return lines


def measured_spans(trace: Trace, number: int, ranks: Sequence[int]) -> list[Span]:
    """The computations of a step as they ran, waits left out."""
    plan = trace.plan
    several = plan.num_stages > plan.pp
    found = []
    for rank in ranks:
        actions = {action.op: action for action in plan.actions(rank)}
        for op, begin, waited, end, _ in trace.steps[number][rank].actions:
            action = actions[op]
            if action.kind.name in COMPUTE:
                name, title = label(action, several), plan.describe(op, rank)
                found.append(Span(rank, "compute", action.kind.name, name, title, begin + waited, end))
    return found


def timeline(trace: Trace, number: int, columns: int = 100) -> str:
    """The plan as simulated from the measured computations, and below it the step as it ran: text, on one scale."""
    plan = trace.plan
    ranks = first_replicas(plan)
    costs = costs_of(trace)
    simulated = plan.simulate(costs)
    length = max(rank.end for rank in trace.steps[number].values())
    scale = max(length, simulated.makespan_seconds)
    return "\n".join(
        [
            f"{planned(costs)}: {simulated.makespan_seconds * 1e3:.1f} ms",
            draw_strips(spans(plan, simulated, ranks), ranks, scale, columns),
            f"measured: {length * 1e3:.1f} ms",
            draw_strips(measured_spans(trace, number, ranks), ranks, scale, columns),
        ]
    )


def picture(trace: Trace, number: int) -> str:
    """The plan as simulated from the measured computations, and below it the step as it ran: SVG."""
    plan = trace.plan
    ranks = first_replicas(plan)
    length = max(rank.end for rank in trace.steps[number].values())
    costs = costs_of(trace)
    above = svg(plan, costs, title=planned(costs))
    figures = f"{length:.4g} s; hatched: waits, issues, and what Python takes"
    below = draw_spans(plan, ranks, measured_spans(trace, number, ranks), length, "measured", figures)
    heights = [float(_height(text)) for text in (above, below)]
    width = re.search(r'viewBox="0 0 (\S+) ', above)[1]  # type: ignore[index]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {sum(heights):g}">\n'
        + above.replace("<svg ", f'<svg x="0" y="0" width="{width}" height="{heights[0]:g}" ', 1)
        + below.replace("<svg ", f'<svg x="0" y="{heights[0]:g}" width="{width}" height="{heights[1]:g}" ', 1)
        + "</svg>\n"
    )


def _height(text: str) -> str:
    return re.search(r'viewBox="0 0 \S+ ([\d.]+)"', text)[1]  # type: ignore[index]


def chrome(trace: Trace) -> str:
    """All steps of the trace for chrome://tracing and Perfetto: a process per rank."""
    events = []
    zero = 0.0
    for number, step in trace.steps.items():
        for span in measured_spans(trace, number, list(step)):
            start, length = (zero + span.start) * 1e6, (span.end - span.start) * 1e6
            events.append(
                {"ph": "X", "name": span.label, "pid": span.rank, "tid": 0, "ts": start, "dur": length}
                | {"args": {"operation": span.title, "step": number}}
            )
        zero += max(rank.end for rank in step.values())
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def add_to(commands: Any) -> None:
    """Adds ``trace`` to the subparsers of hpcomm's command line."""
    trace = commands.add_parser("trace", help="what steps took, beside what was planned")
    verbs = trace.add_subparsers(title="what to do", required=True, metavar="VERB")
    verb = verbs.add_parser("report", help="where the time of a step went, from what HPCOMM_TRACE=FOLDER has left")
    verb.add_argument("folder", metavar="FOLDER")
    verb.add_argument("--step", type=int, help="its number; the last one by default")
    verb.add_argument("--svg", metavar="FILE", help="draw the step below its plan")
    verb.add_argument("--chrome", metavar="FILE", help="write all steps of its plan for chrome://tracing and Perfetto")
    verb.set_defaults(run=_report)


def _report(options: Any) -> int:
    trace = read(options.folder, options.step)
    number = max(trace.steps) if options.step is None else options.step
    print(table(trace, number))
    print(f"\n{timeline(trace, number)}")
    if options.svg:
        write_text(options.svg, picture(trace, number))
    if options.chrome:
        write_text(options.chrome, chrome(trace))
    return 0
