"""Schedules whose backwards are undivided: GPipe, 1F1B, eager 1F1B, forms with several stages per rank, forward only.

Pure functions of sizes: ``(pp, num_microbatches, stages_per_rank)`` to a table.
"""

from __future__ import annotations

from hpcomm.plan.table import ComputeAction, Kind, Table, first_microbatches, require_positive


def gpipe(num_stages: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards; one stage per pipeline rank.

    Backwards run in the order of the forwards, not in the reverse order of the paper's figure: gradients are
    then added up in the order in which 1F1B adds them, and both schedules give the same bits. The bubble is
    the same: (p - 1) / (m + p - 1) of the step for p stages of equal cost and m microbatches.

    Raises:
        InvalidArgument: a size is below 1.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019, arXiv:1811.06965, section 2.3.
    """
    return looped_bfs(num_stages, num_microbatches, 1)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    Stage ``s`` keeps the activations of at most ``num_stages - s`` microbatches, GPipe those of all of them; the bubble
    is GPipe's. With fewer microbatches than stages the early stages have no steady state: all their forwards are
    warm-up.

    Raises:
        InvalidArgument: a size is below 1.

    Sources: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019;
    with a flush at the end of the step: "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
    ICML 2021, and "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    arXiv:2104.04473, section 2.2.1.
    """
    return _one_f_one_b(num_stages, num_microbatches, 1)


def eager_1f1b(num_stages: int, num_microbatches: int) -> Table:
    """1F1B with twice the warm-up, so that messages travel while both of their ends compute.

    In 1F1B stage ``s`` has ``num_stages - s`` microbatches under way: in each round it waits until one has gone to the
    stages behind it and come back. Here it has ``2 (num_stages - s) - 1``, and keeps as many activations. Messages of
    up to a forward between two stages, or half of one where a stage takes in and hands on, cost their first way there
    and their last way back. Where they take no time, the bubble is 1F1B's.

    Raises:
        InvalidArgument: a size is below 1.

    Source: Y. Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023, arXiv:2211.05322.
    """
    return _one_f_one_b(num_stages, num_microbatches, 2)


def _one_f_one_b(num_stages: int, num_microbatches: int, warm_up: int) -> Table:
    """``warm_up``: forwards of it, for each stage that is behind."""
    require_positive(num_stages, num_microbatches)
    return [
        one_backward_per_forward(
            [ComputeAction("F", stage, m) for m in range(num_microbatches)],
            [ComputeAction("B", stage, m) for m in range(num_microbatches)],
            warm_up=warm_up * (num_stages - 1 - stage),
        )
        for stage in range(num_stages)
    ]


def interleaved_1f1b(pp: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """1F1B over ``stages_per_rank`` stages per rank, placed in a loop: the bubble is as many times smaller.

    Microbatches go round in groups of ``pp``: a rank computes a group on its first stage, then on its second. With a
    multiple of ``pp`` microbatches, and backwards of at most two forwards, the bubble is (p - 1) / (v m) of the
    computation; other numbers get the table of the next multiple without the microbatches that do not exist, and its
    bubble at most.

    Raises:
        InvalidArgument: a size is below 1.

    Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, arXiv:2104.04473, section 2.2.2 and figure 4.
    """
    require_positive(pp, num_microbatches, stages_per_rank)
    if stages_per_rank == 1:
        return one_f_one_b(pp, num_microbatches)
    table = []
    for rank in range(pp):
        forwards, backwards = grouped(pp, rank, num_microbatches, stages_per_rank, "B")
        warm_up = (stages_per_rank - 1) * pp + 2 * (pp - 1 - rank)
        table.append(one_backward_per_forward(forwards, backwards, warm_up))
    return first_microbatches(table, num_microbatches)


def looped_bfs(pp: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """Breadth first: all microbatches on a rank's first stage, then on its second, ...; then back.

    Placed in a loop. The bubble is (p - 1) / (v m) of the computation for m >= p. Keeps the activations of all
    microbatches, as GPipe does, but a stage's gradients are complete, and on their way, while the next stage computes.

    Raises:
        InvalidArgument: a size is below 1.

    Source: J. Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv:2211.05953, section 3.
    """
    require_positive(pp, num_microbatches, stages_per_rank)
    table: Table = []
    for rank in range(pp):
        stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
        table.append(
            [ComputeAction("F", stage, m) for stage in stages for m in range(num_microbatches)]
            + [ComputeAction("B", stage, m) for stage in reversed(stages) for m in range(num_microbatches)]
        )
    return table


def forward_only(pp: int, num_microbatches: int, stages_per_rank: int = 1) -> Table:
    """Evaluation: no backwards, and so no gradients to send or reduce. Stages in a loop, groups as in interleaved 1F1B.

    Raises:
        InvalidArgument: a size is below 1.
    """
    require_positive(pp, num_microbatches, stages_per_rank)
    table = [grouped(pp, rank, num_microbatches, stages_per_rank, "B")[0] for rank in range(pp)]
    return first_microbatches(table, num_microbatches)


# --- What interleaved schedules share ---------------------------------------------------------------------------------


def grouped(
    pp: int, rank: int, num_microbatches: int, stages_per_rank: int, backward: Kind
) -> tuple[list[ComputeAction], list[ComputeAction]]:
    """A rank's forwards and its backwards by groups of ``pp`` microbatches, the last group filled up."""
    stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
    groups = [range(first, first + pp) for first in range(0, num_microbatches, pp)]
    forwards = [ComputeAction("F", stage, m) for group in groups for stage in stages for m in group]
    backwards = [ComputeAction(backward, stage, m) for group in groups for stage in reversed(stages) for m in group]
    return forwards, backwards


def one_backward_per_forward(
    forwards: list[ComputeAction], backwards: list[ComputeAction], warm_up: int
) -> list[ComputeAction]:
    """The first ``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    actions = forwards[:warm_up]
    steady = forwards[warm_up:]
    for forward, backward in zip(steady, backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(steady) :]
