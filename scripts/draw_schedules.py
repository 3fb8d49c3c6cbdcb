"""Draws the gallery of schedules: docs/reference/schedules/*.svg and the page that shows them.

    python scripts/draw_schedules.py [FOLDER]

Pure arithmetic, so the files are the same on every machine; tests/test_pictures.py compares them with those that are
committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcomm import plan
from hpcomm.plan.render import to_svg

PP, MICROBATCHES = 4, 8

# name, stages per rank, what to look at
GALLERY = [
    ("gpipe", 1, "All forwards, then all backwards. Every rank keeps the activations of all microbatches."),
    ("1f1b", 1, "The same bubble as GPipe; a rank keeps at most as many microbatches as there are ranks behind it."),
    (
        "eager_1f1b",
        1,
        "Twice the warm-up: hides messages that take a part of a computation's time, and keeps up to twice as much.",
    ),
    ("interleaved_1f1b", 2, "Two stages per rank (the second is framed): half the bubble, twice the messages."),
    (
        "looped_bfs",
        2,
        "All microbatches on one stage, then on the next: half the bubble, all activations kept, and a "
        "stage's reductions start while the next stage computes.",
    ),
    ("zb1p", 1, "Backwards divided: weight gradients, which nobody waits for, move to where the bubble was."),
    ("zb1p", 2, "The same with two stages per rank."),
    (
        "zbv",
        2,
        "Two stages per rank in the shape of a V: no bubble between a rank's first and last action when the "
        "three parts take equally long, with 1F1B's memory.",
    ),
    (
        "dualpipev",
        2,
        "A V as well; in the steady state a forward stands beside the backward that it can be overlapped with.",
    ),
    ("forward_only", 1, "Evaluation."),
]


def costs_of(num_stages: int) -> plan.CostModel:
    """Ranks do the same work in every picture: with two stages each, a stage takes half."""
    costs = plan.CostModel()
    share = PP / num_stages
    costs.stages = [plan.StageCost(share, 2 * share)] * num_stages
    costs.link_latency_seconds = 0.05
    costs.collective_latency_seconds = 0.3
    return costs


def draw(folder: Path) -> None:
    """Writes all files below ``folder``."""
    pictures = folder / "schedules"
    pictures.mkdir(parents=True, exist_ok=True)
    page = [
        "# Schedules",
        "",
        f"{PP} pipeline ranks, {MICROBATCHES} microbatches, 2 replicas (one is drawn). A rank takes 1 s for",
        "the forward of a microbatch and 2 s for its backward, a message 0.05 s, a step of a reduction 0.3 s, of which",
        "one between two ranks takes two. Colours are those of Okabe and Ito.",
        "Drawn by `python scripts/draw_schedules.py`; `python -m hpcomm plan show --schedule NAME --svg FILE` draws",
        "yours. What the schedules promise, and where they come from, stands in `hpcomm/plan/loops.py` and",
        "`hpcomm/plan/zero_bubble.py`.",
        "",
        "| schedule | stages per rank | seconds | bubbles | exposed communication | microbatches held, at most |",
        "|---|---|---|---|---|---|",
    ]
    sections: list[str] = []
    for name, per_rank, text in GALLERY:
        stages = PP * per_rank
        costs = costs_of(stages)
        compiled = plan.compile(
            name,
            pp=PP,
            dp=2,
            num_microbatches=MICROBATCHES,
            stages_per_rank=per_rank,
            bucket_bytes=None if name == "forward_only" else [[1]] * stages,
            costs=costs,
        )
        compiled.verify()
        timeline = compiled.simulate(costs)
        # Of a rank's whole share of the model, whatever the number of stages.
        held = max(compiled.peak_activations()) / per_rank
        page.append(
            f"| `{name}` | {per_rank} | {timeline.makespan_seconds:.2f} | {timeline.bubble_share:.1%} | "
            f"{timeline.exposed_share:.1%} | {held:g} |"
        )
        file = f"{name}-{per_rank}.svg"
        to_svg(compiled, pictures / file, costs, title=f"{name}: {per_rank} stage{'s' * (per_rank > 1)} per rank")
        sections += ["", f"## {name}, {per_rank} stage{'s' * (per_rank > 1)} per rank", "", text, ""]
        sections += [f"![Time line of {name}](schedules/{file})"]
    (folder / "schedules.md").write_text("\n".join([*page, *sections]) + "\n")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs" / "reference")
