"""Which layers each stage gets, and why: by hand, by parameter counts, or from a profile; the cut as it was decided."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.control_channels import ControlChannel
from hpcomm.errors import HpcommError, InvalidArgument
from hpcomm.pipeline.balance import Problem, best_starts
from hpcomm.pipeline.chain import layers_of, section, skips_of
from hpcomm.pipeline.profile import LayerProfile, profile

if TYPE_CHECKING:
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.meta import InitFn
    from hpcomm.plan.table import Table

__all__ = ["Balance", "Cut"]


Layer = tuple[str, torch.nn.Module]


@dataclass
class Balance:
    """Asks a Pipeline to cut its model by what the layers take, measured on rank 0; all ranks use its answer.

    Args:
        sample: positional argument or arguments of the model, of the size of one microbatch; needed on rank 0 only.
        keywords: keyword arguments for it.
        memory_limit: bytes of a rank for parameters, their gradients, the optimizer's state and what its microbatches
            in flight keep for the backward, as the schedule has them. What torch itself and the messages need is not
            counted.
        optimizer_bytes: state per element of a trainable parameter: 8 for Adam in float32, 0 for plain SGD.
        bytes_per_second: of the links between stages; a boundary may be the slowest part then.
        repeats: how often each layer is timed; the shortest time counts.
        layers: an earlier profile (``pipe.cut.layers``), used instead of measuring.
    """

    sample: torch.Tensor | tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None
    memory_limit: float = math.inf
    optimizer_bytes: float = 8.0
    bytes_per_second: float = math.inf
    repeats: int = 3
    layers: Sequence[LayerProfile] | None = None

    def __post_init__(self) -> None:
        if self.memory_limit <= 0 or self.bytes_per_second <= 0 or self.repeats < 1 or self.optimizer_bytes < 0:
            raise InvalidArgument(
                f"Balance: memory_limit={self.memory_limit}, bytes_per_second={self.bytes_per_second} and "
                f"repeats={self.repeats} must be positive, optimizer_bytes={self.optimizer_bytes} not negative"
            )


@dataclass(frozen=True)
class StageShare:
    """What one stage got. Seconds of one microbatch; bytes at their peak."""

    stage: int
    rank: int  # on pp
    layers: tuple[str, ...]
    cost: float  # seconds where they were measured; parameters used per sample otherwise
    forward_seconds: float
    backward_seconds: float
    output_bytes: float  # handed on to the next stage, per microbatch
    memory_bytes: float


@dataclass(frozen=True)
class Cut:
    """How a model was cut. ``print(pipe.cut)`` shows it as a table."""

    stages: tuple[StageShare, ...]
    layers: tuple[LayerProfile, ...]  # empty where nothing was measured

    @property
    def imbalance(self) -> float:
        """How much longer the busiest rank computes than the mean of the ranks: 0.1 is 10 %."""
        loads: dict[int, float] = {}
        for share in self.stages:
            loads[share.rank] = loads.get(share.rank, 0.0) + share.cost
        mean = sum(loads.values()) / len(loads)
        return max(loads.values()) / mean - 1.0 if mean else 0.0

    def __str__(self) -> str:
        head = ["stage", "rank", "layers", "first", "last"]
        head += ["forward ms", "backward ms", "sent MB", "memory MB"] if self.layers else ["cost"]
        rows = [head]
        for s in self.stages:
            row = [str(s.stage), str(s.rank), str(len(s.layers)), s.layers[0], s.layers[-1]]
            if self.layers:
                row += [f"{s.forward_seconds * 1e3:.3f}", f"{s.backward_seconds * 1e3:.3f}"]
                row += [f"{s.output_bytes / 1e6:.3f}", f"{s.memory_bytes / 1e6:.3f}"]
            else:
                row += [f"{s.cost:.0f}"]
            rows.append(row)
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        basis = "measured" if self.layers else "by parameter counts"
        return "\n".join([*lines, f"imbalance: {self.imbalance:.1%} (busiest rank over the mean; {basis})"])


def layer_cost(layer: torch.nn.Module) -> float:
    """A stand-in for a layer's compute: its parameters, each used once per sample.

    A lookup touches one row of its table, so an embedding counts as one row. Every layer costs at least 1.
    """
    lookups = {
        id(parameter): module.embedding_dim
        for module in layer.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    return 1.0 + sum(lookups.get(id(parameter), parameter.numel()) for parameter in layer.parameters())


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """First index of each of ``parts`` consecutive, non-empty runs whose largest sum is as small as possible.

    Raises:
        InvalidArgument: fewer layers than parts.
    """
    return best_starts(Problem(costs, parts))


def starts_of(model: torch.nn.Module, parts: int, split_at: Sequence[str | int] | None = None) -> list[int]:
    """The first layer of each of ``parts`` stages.

    Args:
        model: a chain.
        split_at: the layers (name or index) that begin stages 1, 2, ...; balanced by :func:`layer_cost` if None.

    Raises:
        InvalidArgument: see :func:`balance`; or ``split_at`` does not give ``parts`` stages of at least one layer.
    """
    layers = _named(model)
    if split_at is None:
        return balance([layer_cost(layer) for _, layer in layers], parts)
    starts = [0, *(_index(layers, place) for place in split_at)]
    if len(starts) != parts:
        raise InvalidArgument(f"split_at={list(split_at)!r} gives {len(starts)} stages, the schedule has {parts}")
    if starts != sorted(set(starts)) or starts[-1] >= len(layers):
        raise InvalidArgument(f"split_at={list(split_at)!r}: places must ascend, from 1 to {len(layers) - 1}")
    return starts


def cut(model: torch.nn.Module, parts: int, split_at: Sequence[str | int] | None = None) -> list[torch.nn.Module]:
    """``parts`` stages of a chain, cut as :func:`starts_of` says."""
    return stages_at(model, starts_of(model, parts, split_at))


def stages_at(model: torch.nn.Module, starts: Sequence[int]) -> list[torch.nn.Module]:
    """The stages, whose parameters keep the names that they have in ``model``."""
    ends = [*starts[1:], len(_named(model))]
    return [section(model, start, end) for start, end in zip(starts, ends, strict=True)]


def described(
    model: torch.nn.Module,
    starts: Sequence[int],
    placement: Sequence[int],
    table: Table,
    wishes: Balance,
    layers: Sequence[LayerProfile] = (),
) -> Cut:
    """The cut at ``starts`` with what each stage takes; by parameter counts where nothing was measured."""
    named = _named(model)
    memory = _memory(layers, in_flight(table, len(placement)), wishes) if layers else None
    crossing = _crossing(model, layers) if layers else []
    shares = []
    for stage, (first, end) in enumerate(zip(starts, [*starts[1:], len(named)], strict=True)):
        mine = layers[first:end]
        shares.append(
            StageShare(
                stage,
                placement[stage],
                tuple(name for name, _ in named[first:end]),
                sum(row.seconds for row in mine) if layers else sum(layer_cost(layer) for _, layer in named[first:end]),
                sum(row.forward_seconds for row in mine),
                sum(row.backward_seconds for row in mine),
                crossing[end] if layers and end < len(named) else 0.0,
                memory(stage, first, end) if memory else 0.0,
            )
        )
    return Cut(tuple(shares), tuple(layers))


def decide(
    model: torch.nn.Module,
    mesh: Mesh,
    placement: Sequence[int],
    table: Table,
    wishes: Balance,
    init_fn: InitFn | None,
    seed: int,
) -> tuple[list[int], list[LayerProfile]]:
    """Rank 0 profiles and cuts; everybody gets its answer (collective over the mesh).

    Raises:
        InvalidArgument: on every rank, what rank 0 met.
    """
    control = mesh.control
    if control.rank != 0:
        told = json.loads(control.receive(0, ControlChannel.CUT, mesh.timeout).decode())
    else:
        try:
            layers = wishes.layers
            if layers is None:
                layers = profile(
                    model,
                    (wishes.sample,) if isinstance(wishes.sample, torch.Tensor) else tuple(wishes.sample),
                    wishes.keywords,
                    device=mesh.device,
                    repeats=wishes.repeats,
                    seed=seed,
                    init_fn=init_fn,
                )
            starts = profiled_starts(model, layers, placement, table, wishes)
            told = {"starts": starts, "layers": [asdict(row) for row in layers]}
        except Exception as error:  # of the model's own code as well: the others wait for an answer
            kind = "" if isinstance(error, HpcommError) else f"{type(error).__name__} while profiling: "
            told = {"problem": f"{kind}{error}"}
        for peer in range(1, mesh.size):
            control.send(peer, ControlChannel.CUT, json.dumps(told).encode())
    if "problem" in told:
        raise InvalidArgument(told["problem"])
    return told["starts"], [LayerProfile(**row) for row in told["layers"]]


def profiled_starts(
    model: torch.nn.Module, layers: Sequence[LayerProfile], placement: Sequence[int], table: Table, wishes: Balance
) -> list[int]:
    """The best cut of a profiled model.

    Raises:
        InvalidArgument: the profile is of another model, or no cut fits.
    """
    names = [name for name, _ in _named(model)]
    if [row.name for row in layers] != names:
        raise InvalidArgument(
            f"Balance: the profile has {len(layers)} layers that are not the model's {len(names)} ({', '.join(names)})"
        )
    return best_starts(
        Problem(
            [row.seconds for row in layers],
            len(placement),
            _crossing(model, layers),
            wishes.bytes_per_second,
            _memory(layers, in_flight(table, len(placement)), wishes),
            wishes.memory_limit,
            placement,
        )
    )


def in_flight(table: Table, stages: int) -> list[int]:
    """The most microbatches of each stage whose forward has run and whose backward has not, in the table's order."""
    if all(action.kind == "F" for row in table for action in row):
        return [0] * stages
    most, now = [0] * stages, [0] * stages
    for row in table:
        for action in row:
            if action.kind == "F":
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in ("B", "W"):  # a divided backward keeps its tensors until W
                now[action.stage] -= 1
    return most


def _memory(layers: Sequence[LayerProfile], flight: Sequence[int], wishes: Balance) -> Any:
    """Bytes of a stage as a function of (stage, first, end)."""
    fixed, kept = [0.0], [0.0]
    for row in layers:
        state = wishes.optimizer_bytes * row.trainable_elements
        fixed.append(fixed[-1] + row.parameter_bytes + row.trainable_bytes + state)
        kept.append(kept[-1] + row.activation_bytes)

    def bytes_of(stage: int, first: int, end: int) -> float:
        return fixed[end] - fixed[first] + flight[stage] * (kept[end] - kept[first])

    return bytes_of


def _crossing(model: torch.nn.Module, layers: Sequence[LayerProfile]) -> list[float]:
    """Bytes that pass before each layer: the output of the one before, and skipped values on their way."""
    place = {row.name: i for i, row in enumerate(layers)}
    crossing = [0.0, *(float(row.output_bytes) for row in layers[:-1])]
    reach: dict[int, int] = {}  # a source's farthest target
    for target, sources in skips_of(model).items():
        for name in sources:
            reach[place[name]] = max(reach.get(place[name], 0), place[target])
    for source, farthest in reach.items():
        for boundary in range(source + 2, farthest + 1):
            crossing[boundary] += layers[source].output_bytes
    return crossing


def _named(model: torch.nn.Module) -> list[Layer]:
    return [(name, layer) for name, layer in layers_of(model) if layer is not None]


def _index(layers: list[Layer], place: str | int) -> int:
    if isinstance(place, int):
        return place
    names = [name for name, _ in layers]
    if place not in names:
        raise InvalidArgument(f"split_at names layer {place!r}; the model has {', '.join(names)}")
    return names.index(place)
