"""Schedules: pure functions that give each pipeline rank its compute actions, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class ComputeAction(NamedTuple):
    """One computation of one stage on one microbatch: ``F`` forward, ``B`` backward."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


# Pipeline rank -> its actions.
Table = list[list[ComputeAction]]


def gpipe(num_stages: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards; one stage per pipeline rank.

    Backwards run in the order of the forwards, not in the reverse order of the paper's figure: gradients are
    then added up in the order in which 1F1B adds them, and both schedules give the same bits. The bubble is
    the same.

    Raises ``ValueError`` when a size is below 1.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019.
    """
    _require_positive(num_stages, num_microbatches)
    return [
        [ComputeAction("F", stage, m) for m in range(num_microbatches)]
        + [ComputeAction("B", stage, m) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    Stage ``s`` keeps the activations of at most ``num_stages - s`` microbatches, GPipe those of all of them.
    With fewer microbatches than stages the early stages have no steady state: all their forwards are warm-up.

    Raises ``ValueError`` when a size is below 1.

    Sources: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019;
    with a flush at the end of the step: "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
    ICML 2021, and "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
    """
    _require_positive(num_stages, num_microbatches)
    table: Table = []
    for stage in range(num_stages):
        warm_up = min(num_stages - 1 - stage, num_microbatches)
        actions = [ComputeAction("F", stage, m) for m in range(warm_up)]
        for m in range(num_microbatches - warm_up):
            actions += [ComputeAction("F", stage, warm_up + m), ComputeAction("B", stage, m)]
        actions += [ComputeAction("B", stage, m) for m in range(num_microbatches - warm_up, num_microbatches)]
        table.append(actions)
    return table


SCHEDULES: dict[str, Callable[[int, int], Table]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def by_name(name: str) -> Callable[[int, int], Table]:
    """The generator called ``name``. Raises ``ValueError`` with the known names."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(sorted(SCHEDULES))}") from None


def _require_positive(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 microbatch, not {num_stages} and {num_microbatches}")
