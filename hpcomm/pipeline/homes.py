"""Where a model's layers are: each rank trains its own, so another Pipeline of the model may need values of others."""

from __future__ import annotations

import copy
import json
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.communicator import agree
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.parameters import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.chain import Call

__all__: list[str] = []


@dataclass(eq=False)
class _Place:
    """Of one tensor, which modules may share, or of what else a module has."""

    ranks: frozenset[int]  # of the job: their values are current
    tensor: int = 0  # id() of what it was made for; that may be another one by now, in the same modules or not
    homes: weakref.WeakSet[Home] = field(default_factory=weakref.WeakSet)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        return _Place(self.ranks)  # of a copy: its values are those of this moment


class _Places(dict[str, _Place]):
    """A module's, by the names of its parameters and buffers, and "" for all else. Kept in the module, so that copies
    of it have them; where it is pickled it is an empty OrderedDict, which needs no hpcomm to be read, nor a permission.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Places:
        return _Places({name: copy.deepcopy(place, memo) for name, place in self.items()})

    def __reduce__(self) -> tuple[Callable[[], dict[str, _Place]], tuple[()]]:
        return OrderedDict, ()


_KEY = "_hpcomm_places"
_ALL_ELSE = ""
# Modules that have places. By what keeps a parameter: the layers of a Pipeline may be wrappers that were made for it.
_known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _places_of(module: torch.nn.Module) -> _Places:
    found = module.__dict__.get(_KEY)
    return found if isinstance(found, _Places) else _Places()


class Home:
    """Where one Pipeline has its layers.

    Args:
        ranks: of the job, by place.
    """

    def __init__(self, ranks: Mapping[_Place, frozenset[int]]) -> None:
        self._ranks = dict(ranks)
        self._others: weakref.WeakSet[Home] = weakref.WeakSet()  # that have some of these tensors elsewhere
        self._is_behind = False
        self._sole_since = -1  # of the changes: only the values here are current
        self._is_paused = False
        self._loaded: _Loaded | None = None  # of what was loaded since all ranks have last agreed
        for place, own in self._ranks.items():
            for other in place.homes:
                if other._ranks[place] != own:
                    self._others.add(other)
                    other._others.add(self)
            place.homes.add(self)

    def note_training(self) -> None:
        """From now on only the values here are current."""
        if not self._is_paused and self._sole_since != _changes.number:  # else nothing has happened since the last step
            self._take_over()
            self._outdate_others()
            self._sole_since = _changes.number

    def note_loaded(self, *, changed: bool, whole: bool) -> None:
        """The values here are new.

        Args:
            changed: they were old, and of those that are current on this rank all the same, for another Pipeline has
                them there, some have changed. If not, they may be those that the other one has: both are current.
            whole: all of this rank's were loaded.
        """
        if not self._is_behind:
            self.note_training()
            return
        self._loaded = _Loaded(changed, whole)
        if self not in _unsettled:
            _unsettled.append(self)
        self._is_behind = not whole
        _changes.number += 1
        if whole:
            self._take_over()
        if changed:
            self._outdate_others()

    def _settle(self, mesh: Mesh) -> None:
        """What each rank has seen for itself where values were loaded, all ranks see from now on (collective over the
        mesh; nothing is sent where nothing was loaded).
        """
        for home in [one for one in _unsettled if one is self or one in self._others]:
            assert home._loaded is not None
            body = json.dumps([home._loaded.changed, home._loaded.whole]).encode()
            told = mesh.control.exchange(range(mesh.size), ControlChannel.BUFFERS, body, mesh.timeout)
            changed, whole = zip(*map(json.loads, told), strict=True)
            home._loaded = None
            _unsettled.remove(home)
            home._is_behind = not all(whole)
            if any(changed):
                home._outdate_others()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Steps inside are no training."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def current_here(self, module: torch.nn.Module, rank: int) -> list[torch.Tensor]:
        """Where the values here are old: what of ``module`` is current on ``rank``, for another Pipeline has it."""
        if not self._is_behind:
            return []
        return [
            tensor
            for part in module.modules()
            for name, place in _places_of(part).items()
            if rank in place.ranks and (tensor := _tensors(part).get(name)) is not None
        ]

    def require_current(self, what: str, mesh: Mesh | None = None) -> None:
        """Raises InvalidArgument where another Pipeline has changed these layers since, on other ranks; with a mesh on
        all of its ranks (collective).
        """
        if mesh is not None:
            self._settle(mesh)
        if self._is_behind:
            raise InvalidArgument(
                f"{what}: another Pipeline of the same model, which places its layers or what they share on other "
                "ranks, has trained or loaded them since: the values here are old. Load them here too, or make a new "
                "Pipeline, which fetches them"
            )

    def _take_over(self) -> None:
        for place, ranks in self._ranks.items():
            place.ranks = ranks

    def _outdate_others(self) -> None:
        for other in self._others:
            other._is_behind = True


@dataclass(frozen=True)
class _Loaded:
    changed: bool
    whole: bool


@dataclass
class _Changes:
    number: int = 0  # of changes to what is current where, but by training


_changes = _Changes()
# In the order of the loads, which is the same on all ranks; also those whose Pipelines are gone on some by now.
_unsettled: list[Home] = []


@dataclass
class _Unit:
    """What has one place: a tensor, with all modules that share it, or what else a module has."""

    name: str
    tensor: torch.Tensor | None
    ranks: frozenset[int] = frozenset()  # of the job, where the new Pipeline has it
    holders: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    place: _Place | None = None

    @property
    def is_everywhere(self) -> bool:
        """On all ranks. A buffer may be a cache that only who has computed has, and none as long as it is empty."""
        return self.tensor is None or isinstance(self.tensor, torch.nn.Parameter)

    @property
    def is_apart(self) -> bool:
        return self.place is not None and not self.ranks <= self.place.ranks


def move_in(mesh: Mesh, calls: Sequence[Sequence[Call]], placement: Sequence[int]) -> Home:
    """What another Pipeline has trained on other ranks gets its values from there (collective over the mesh).

    Args:
        calls: the layers of every stage; those of this rank are on the mesh's device.
        placement: the pipeline rank of every stage.

    Raises:
        InvalidArgument: the values are on ranks that this mesh does not have, or among them is extra state.
        SchemaMismatch: on some ranks the model is one that was not in a Pipeline, say.
    """
    units = _units_of(mesh, calls, placement)
    # Of what a module has beside its tensors, extra state alone is known, and asked for.
    apart = [
        unit for unit in units if unit.is_apart and (unit.tensor is not None or _has_extra_state(unit.holders[0][0]))
    ]
    everywhere = [unit for unit in apart if unit.is_everywhere]
    lines = [f"{one.name} from ranks {sorted(_current(one))} to {sorted(one.ranks)}" for one in everywhere]
    agree(mesh.control, "layers that another Pipeline has elsewhere", lines, timeout=mesh.timeout)
    for one in everywhere:
        if one.tensor is None:
            raise InvalidArgument(
                f"Pipeline: {one.name} has extra state (get_extra_state()), which another Pipeline of the model "
                "may have changed on other ranks, and which is not fetched; take that one's state_dict() there"
            )
        if max(_current(one)) >= mesh.size:
            raise InvalidArgument(
                f"Pipeline: another one has trained {one.name} on ranks {sorted(_current(one))}, and this mesh has "
                f"{mesh.size}; take its full_state_dict() there, and load it into the model"
            )
    _fetch(mesh, [unit for unit in apart if max(_current(unit)) < mesh.size])
    taken: dict[_Place, frozenset[int]] = {}
    for unit in units:
        place = unit.place
        if place is None or place in taken:  # in use: of a tensor that two modules have shared, and share no more
            place = _Place(unit.ranks if place is None else place.ranks)
        place.tensor = id(unit.tensor)
        if unit.is_apart:
            place.ranks |= unit.ranks
        taken[place] = unit.ranks
        for module, name in unit.holders:
            places = _places_of(module)
            places[name] = place
            module.__dict__[_KEY] = places
            _known.add(module)
    _changes.number += 1
    return Home(taken)


def _units_of(mesh: Mesh, calls: Sequence[Sequence[Call]], placement: Sequence[int]) -> list[_Unit]:
    units: dict[tuple[int, str], _Unit] = {}
    for stage, stage_calls in enumerate(calls):
        replicas = range(placement[stage] * mesh.dp.size, (placement[stage] + 1) * mesh.dp.size)
        for call in stage_calls:
            for inner, module in call.layer.named_modules():
                label = f"{call.name}.{inner}".rstrip(".")
                for name, tensor in _slots(module):
                    key = (id(module), name) if tensor is None else (id(tensor), "tensor")
                    unit = units.setdefault(key, _Unit(f"{label}.{name}".rstrip("."), tensor))
                    unit.ranks |= set(replicas)
                    if not any(module is holder and name == its for holder, its in unit.holders):
                        unit.holders.append((module, name))
    by_tensor = {
        id(tensor): place
        for module in list(_known)
        for name, place in _places_of(module).items()
        if (tensor := _tensors(module).get(name)) is not None and place.tensor == id(tensor)
    }
    for unit in units.values():
        by_name = [place for module, name in unit.holders if (place := _places_of(module).get(name)) is not None]
        if unit.tensor is not None and id(unit.tensor) in by_tensor:
            unit.place = by_tensor[id(unit.tensor)]
        elif by_name:
            # Another tensor than it was: made of that one's values, which are where they were.
            if unit.is_everywhere and len({place.ranks for place in by_name}) > 1:
                raise InvalidArgument(
                    f"Pipeline: {unit.name} is a new tensor that several modules share, which another Pipeline has on "
                    "different ranks: whose values it was made of is not known; load them by load_state_dict() into "
                    "that Pipeline, and share the tensor that it has"
                )
            unit.place = by_name[0]
        else:
            found = [_places_of(module).get(_ALL_ELSE) for module, _ in unit.holders]
            unit.place = next((place for place in found if place is not None), None)
    return list(units.values())


def _slots(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names of its own parameters and buffers, not those of modules in it, and "" for all else that it has."""
    own = _tensors(module)
    if own or _has_extra_state(module):
        yield from own.items()
        yield _ALL_ELSE, None


def _current(unit: _Unit) -> frozenset[int]:
    return unit.place.ranks if unit.place is not None else frozenset()


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _fetch(mesh: Mesh, apart: Sequence[_Unit]) -> None:
    """From the first of the ranks that have current values to those that need them (collective over the mesh). Each
    rank tells what it would take part in: a cache may be missing on some, or have another size.
    """
    mine = {unit.name: kind for unit in apart if unit.tensor is not None and (kind := _kind(unit)) is not None}
    body = json.dumps(mine).encode()
    told = [*map(json.loads, mesh.control.exchange(range(mesh.size), ControlChannel.BUFFERS, body, mesh.timeout))]
    with torch.no_grad():
        for unit in apart:
            kind, here, root = mine.get(unit.name), sorted(_current(unit) | unit.ranks), min(_current(unit))
            if mesh.rank in here and kind is not None and all(told[rank].get(unit.name) == kind for rank in here):
                assert unit.tensor is not None
                broadcast(mesh.lane(here, "gradient"), unit.tensor, here.index(root))


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its own, not those of modules in it."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _kind(unit: _Unit) -> list[Any] | None:
    """What must be the same on the ranks that send and receive it; None where it is not sent."""
    tensor, (module, name) = unit.tensor, unit.holders[0]
    assert tensor is not None
    unsaved = name in module._non_persistent_buffers_set
    if unsaved and (tensor.layout is not torch.strided or 0 in tensor.stride()):  # as unsaved_buffers()
        return None
    return [sorted(_current(unit)), sorted(unit.ranks), str(tensor.dtype), *tensor.shape]
