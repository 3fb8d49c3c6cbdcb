"""Where a model's layers are: each rank trains its own, so another Pipeline of the model may need values of others."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpcomm.communicator import agree
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.checks import is_extra
from hpcomm.pipeline.parameters import broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.chain import Call

__all__: list[str] = []


class Home:
    """Where one Pipeline has its layers.

    Args:
        ranks: of the job, by layer.
    """

    def __init__(self, ranks: Mapping[torch.nn.Module, frozenset[int]]) -> None:
        self._ranks = weakref.WeakKeyDictionary(ranks)
        self._others: weakref.WeakSet[Home] = weakref.WeakSet()  # that have some of these layers elsewhere
        self._is_behind = False

    def know(self, other: Home) -> None:
        """Both have some layer, on different ranks."""
        self._others.add(other)
        other._others.add(self)

    def note_training(self) -> None:
        """From now on only the values here are current."""
        behind = [other for other in self._others if not other._is_behind]
        for other in behind:
            other._is_behind = True
        if behind:
            for layer, ranks in self._ranks.items():
                _places[layer].ranks = ranks

    def note_loaded(self) -> None:
        """The values here are new."""
        self._is_behind = False

    def require_current(self, what: str) -> None:
        """Raises InvalidArgument where another Pipeline has trained these layers since, on other ranks."""
        if self._is_behind:
            raise InvalidArgument(
                f"{what}: another Pipeline of the same model, which places its layers on other ranks, has trained them "
                "since: the values here are old. Make a new Pipeline, which fetches them"
            )


@dataclass
class _Place:
    ranks: frozenset[int]  # of the job: their values of the layer are current
    homes: weakref.WeakSet[Home]


_places: weakref.WeakKeyDictionary[torch.nn.Module, _Place] = weakref.WeakKeyDictionary()


def move_in(mesh: Mesh, calls: Sequence[Sequence[Call]], placement: Sequence[int]) -> Home:
    """Layers that another Pipeline has trained on other ranks get their values from there (collective over the mesh).

    Args:
        calls: the layers of every stage; those of this rank are on the mesh's device.
        placement: the pipeline rank of every stage.

    Raises:
        InvalidArgument: the values are on ranks that this mesh does not have.
        SchemaMismatch: on some ranks the model is one that was not in a Pipeline, say.
    """
    ranks: dict[torch.nn.Module, frozenset[int]] = {}
    names: dict[torch.nn.Module, str] = {}
    for stage, stage_calls in enumerate(calls):
        replicas = range(placement[stage] * mesh.dp.size, (placement[stage] + 1) * mesh.dp.size)
        for call in stage_calls:
            ranks[call.layer] = ranks.get(call.layer, frozenset()) | set(replicas)
            names.setdefault(call.layer, call.name)
    home = Home(ranks)
    apart = [layer for layer in ranks if layer in _places and not ranks[layer] <= _places[layer].ranks]
    lines = [f"{names[one]} from ranks {sorted(_places[one].ranks)} to {sorted(ranks[one])}" for one in apart]
    agree(mesh.control, "layers that another Pipeline has elsewhere", lines, timeout=mesh.timeout)
    for layer in apart:
        place = _places[layer]
        if max(place.ranks) >= mesh.size:
            raise InvalidArgument(
                f"Pipeline: another one has trained {names[layer]} on ranks {sorted(place.ranks)}, and this mesh has "
                f"{mesh.size}; take its full_state_dict() there, and load it into the model"
            )
        here = sorted(place.ranks | ranks[layer])
        if mesh.rank in here:
            _fetch(mesh, layer, here, here.index(min(place.ranks)))
        place.ranks |= ranks[layer]
    for layer, own in ranks.items():
        place = _places.setdefault(layer, _Place(own, weakref.WeakSet()))
        for other in place.homes:
            if other._ranks[layer] != own:
                home.know(other)
        place.homes.add(home)
    return home


def _fetch(mesh: Mesh, layer: torch.nn.Module, ranks: Sequence[int], root: int) -> None:
    lane = mesh.lane(ranks, "gradient")
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if not is_extra(name, value):
                broadcast(lane, value, root)
