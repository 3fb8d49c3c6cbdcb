"""to_svg(): a simulated plan as a picture, a row per rank and lane, bubbles visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from hpcomm.plan.files import write_text
from hpcomm.plan.timeline import Span, first_replicas, spans

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StepPlan, Timeline

# M. Okabe, K. Ito, "Color Universal Design": eight colours that colour-blind readers can tell apart. Those of
# communication are the darker ones, and stand on rows of their own.
COLOURS = {
    "FORWARD": "#56B4E9",
    "BACKWARD": "#E69F00",
    "INPUT_GRAD": "#F0E442",
    "WEIGHT_GRAD": "#009E73",
    "forward": "#0072B2",
    "backward": "#D55E00",
    "gradient": "#CC79A7",
    "scalar": "#000000",
}
NAMES = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "INPUT_GRAD": "input gradient",
    "WEIGHT_GRAD": "weight gradient",
    "forward": "activations",
    "backward": "gradients of activations",
    "gradient": "reductions",
    "scalar": "loss",
}
MAX_ROWS = 64

_WIDTH = 1200  # of the time axis
_MARGIN = 76
_COMPUTE = 22  # heights of rows
_LANE = 7
_GAP = 8
_TOP = 58
_LETTER = 6.4  # width of a letter of a label, at font size 10; digits are as wide as capitals, but for W
_WIDE = 9.9


def to_svg(
    plan: StepPlan,
    path: str | PathLike[str],
    costs: CostModel | None = None,
    *,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
) -> None:
    """Writes the simulated time line of ``plan`` as an SVG that any browser shows; details in tooltips.

    Args:
        costs: what is simulated, in seconds and bytes; without it forwards take 1 second and backwards 2.
        ranks: the rows; by default the first replica of each pipeline rank, at most 64 of them.
        title: the first line; by default the plan's sizes.

    Raises:
        InvalidArgument: the plan means nothing, or the costs do not fit it.
        DeadlockError: the plan cannot end.
        OSError: the file cannot be written.
    """
    write_text(path, svg(plan, costs, ranks=ranks, title=title))


def svg(
    plan: StepPlan,
    costs: CostModel | None = None,
    *,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
) -> str:
    """The text of ``to_svg``'s file."""
    timeline = plan.simulate(costs)
    rows = list(first_replicas(plan)[:MAX_ROWS] if ranks is None else ranks)
    drawn = list(spans(plan, timeline, rows))
    return draw_spans(plan, rows, drawn, timeline.makespan_seconds, title or _sizes(plan), _figures(timeline))


def draw_spans(
    plan: StepPlan, rows: Sequence[int], drawn: Sequence[Span], makespan: float, title: str, figures: str
) -> str:
    """Any time line of the plan's actions, simulated or measured, as SVG: a row per rank, two lines of text above."""
    by_rank: dict[int, list[Span]] = {rank: [] for rank in rows}
    for span in drawn:
        by_rank[span.rank].append(span)
    present = {span.lane for row in by_rank.values() for span in row}
    lanes = [lane for lane in ("forward", "backward", "gradient", "scalar") if lane in present]
    pitch = _COMPUTE + _LANE * len(lanes) + _GAP
    height = _TOP + pitch * len(rows) + 40
    scale = _WIDTH / makespan if makespan > 0 else 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_MARGIN + _WIDTH + 16} {height}" '
        f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="10">',
        '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect width="6" height="6" fill="#FFFFFF"/><path d="M0,6 L6,0" stroke="#BBBBBB" stroke-width="1"/>'
        "</pattern></defs>",
        f'<rect width="{_MARGIN + _WIDTH + 16}" height="{height}" fill="#FFFFFF"/>',
        f'<text x="{_MARGIN}" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="{_MARGIN}" y="34" fill="#444444">{escape(figures)}</text>',
        *_legend({_key(span) for row in by_rank.values() for span in row}),
    ]
    several = plan.num_stages > plan.pp
    for number, rank in enumerate(rows):
        y = _TOP + number * pitch
        parts.append(f'<text x="{_MARGIN - 8}" y="{y + 15}" text-anchor="end">rank {rank}</text>')
        parts.append(
            f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH}" height="{_COMPUTE}" fill="url(#bubble)" stroke="#BBBBBB" '
            f'stroke-width="0.5"/>'
        )
        first_stage = min((_stage(span) for span in by_rank[rank] if span.lane == "compute"), default=0)
        parts += [
            _box(span, y, lanes, scale, is_later=several and _stage(span) != first_stage) for span in by_rank[rank]
        ]
    parts += _axis(makespan, scale, _TOP + pitch * len(rows))
    return "\n".join([*parts, "</svg>\n"])


def _sizes(plan: StepPlan) -> str:
    copies = [f"{plan.dp} replicas"] * (plan.dp > 1) + [f"{plan.tp} shards"] * (plan.tp > 1)
    replicas = f", {' x '.join(copies)} of each (one is shown)" if copies else ""
    ranks = f", the first {MAX_ROWS} of {plan.pp} pipeline ranks" if plan.pp > MAX_ROWS else ""
    return f"{plan.num_stages} stages on {plan.pp} ranks, {plan.num_microbatches} microbatches{replicas}{ranks}"


def _figures(timeline: Timeline) -> str:
    return (
        f"{timeline.makespan_seconds:.4g} s, bubbles {timeline.bubble_share:.1%}, exposed communication "
        f"{timeline.exposed_share:.1%} of all ranks' time; hatched: nothing is computed"
    )


def _key(span: Span) -> str:
    return span.kind if span.lane == "compute" else span.lane


def _stage(span: Span) -> int:
    """Of a computation, from its title: "FORWARD mb 3 of stage 2"."""
    last = span.title.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _legend(keys: set[str]) -> list[str]:
    parts, x = [], float(_MARGIN)
    for key, colour in COLOURS.items():
        if key in keys:
            parts.append(f'<rect x="{x:.1f}" y="41" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14:.1f}" y="50">{NAMES[key]}</text>')
            x += 14 + _LETTER * len(NAMES[key]) + 14
    return parts


def _box(span: Span, y: float, lanes: Sequence[str], scale: float, *, is_later: bool) -> str:
    x = _MARGIN + span.start * scale
    width = (span.end - span.start) * scale
    tip = f"<title>{escape(span.title)}: {span.start:.6g} to {span.end:.6g} s</title>"
    colour = COLOURS[_key(span)]
    if span.lane != "compute":
        # What takes no time is a tick.
        top = y + _COMPUTE + _LANE * lanes.index(span.lane)
        return (
            f'<rect x="{x:.2f}" y="{top + 1}" width="{max(width, 1.5):.2f}" height="{_LANE - 2}" fill="{colour}">'
            f"{tip}</rect>"
        )
    # Further stages of a rank are framed, as the papers shade them.
    frame = 'stroke="#000000" stroke-width="1.4"' if is_later else 'stroke="#FFFFFF" stroke-width="0.6"'
    box = (
        f'<rect x="{x + 0.4:.2f}" y="{y + 1}" width="{max(width - 0.8, 0.4):.2f}" height="{_COMPUTE - 2}" '
        f'fill="{colour}" {frame}>{tip}</rect>'
    )
    # Narrow boxes have small letters, or none.
    letters = sum(_WIDE if letter == "W" else _LETTER for letter in span.label)
    size = next((size for size in (10, 8, 6.5) if width > letters * size / 10 + 3), None)
    if size is not None:
        box += (
            f'<text x="{x + width / 2:.2f}" y="{y + 15}" font-size="{size}" text-anchor="middle">'
            f"{escape(span.label)}</text>"
        )
    return box


def _axis(makespan: float, scale: float, y: float) -> list[str]:
    if makespan <= 0:
        return []
    step = 10 ** math.floor(math.log10(makespan / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if makespan / (step * factor) <= 12)
    parts = []
    for tick in range(math.floor(makespan / step + 1e-9) + 1):
        x = _MARGIN + tick * step * scale
        parts.append(f'<path d="M{x:.2f},{y - 4} v5" stroke="#444444" stroke-width="1"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 13}" text-anchor="middle" fill="#444444">{tick * step:.6g}</text>')
    parts.append(f'<text x="{_MARGIN + _WIDTH}" y="{y + 27}" text-anchor="end" fill="#444444">seconds</text>')
    return parts
