"""The state of a divided optimizer as a whole: what a checkpoint holds, whatever the number of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []

State = dict[str, Any]

_PIECES = "hpcomm_pieces"  # in the optimizer's own state dict: of which pieces it is
_DIVIDED = "divided"  # of a state: each rank has a number for each element of its piece


class Member(NamedTuple):
    """A parameter of an optimizer, the memory of whose bucket the ranks divide into equal parts."""

    name: str | None  # where the optimizer was given names
    parameter: torch.nn.Parameter
    bucket: int
    numbers: int  # of its dtype, in the bucket
    place: int  # of its first number in the bucket
    piece: torch.nn.Parameter | None  # what this rank steps of it
    first: int  # of the piece in the bucket


def mark(lane: Communicator, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Member]]) -> None:
    """From now on the optimizer's own ``state_dict()`` says of which pieces it is, and ``load_state_dict()`` refuses
    those of other pieces: torch compares neither shapes nor names.
    """
    rank, size = lane.rank, lane.size

    def pieces() -> State:
        places = [[(m.bucket, m.place, m.first, m.piece is not None and m.piece.numel()) for m in g] for g in groups]
        return {"rank": rank, "ranks": size, "layout": hashlib.sha256(repr(places).encode()).hexdigest()[:16]}

    def write(_: torch.optim.Optimizer, state: State) -> None:
        state[_PIECES] = pieces()

    def compare(_: torch.optim.Optimizer, state: State) -> None:
        found, own = state.get(_PIECES), pieces()
        if found == own:
            return
        if not isinstance(found, dict):
            what = "no sharded optimizer's"
        elif (found.get("rank"), found.get("ranks")) != (rank, size):
            what = f"of rank {found.get('rank')} of {found.get('ranks')}, and this is rank {rank} of {size}"
        else:
            what = "of other parameters, or of buckets of other sizes"
        raise InvalidArgument(
            f"load_state_dict() of a sharded optimizer: the state is {what}. Its own state_dict() is of this rank's "
            "pieces and fits nothing else; use gather_optimizer_state() and load_optimizer_state() of the wrapper, "
            "which hold the whole state, for any number of ranks"
        )

    optimizer.register_state_dict_post_hook(write)
    optimizer.register_load_state_dict_pre_hook(compare)


def gather(lane: Communicator, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Member]]) -> State:
    """What ``state_dict()`` of an optimizer over the whole parameters would be, on the CPU (collective).

    Raises:
        InvalidArgument: on all ranks, where one has a state that is neither a number nor one for each element.
    """
    members = [member for group in groups for member in group]
    mine: list[State] = [{} if m.piece is None else dict(optimizer.state.get(m.piece, {})) for m in members]
    known = _told_by_all(lane, members, mine)
    state: dict[int, State] = {}
    for index, its in enumerate(known):
        for key, (kind, value) in its.items():
            if kind != _DIVIDED:
                state.setdefault(index, {})[key] = _undescribed(kind, value)
    # Every rank has the same of them, in the same order.
    rows = sorted(
        {
            (m.bucket, m.numbers, key, value)
            for m, its in zip(members, known, strict=True)
            for key, (kind, value) in its.items()
            if kind == _DIVIDED
        }
    )
    for bucket, numbers, key, name in rows:
        here = [i for i, m in enumerate(members) if (m.bucket, m.numbers) == (bucket, numbers)]
        flat = torch.zeros(numbers, dtype=getattr(torch, name), device=lane.device)
        for index in here:
            member, held = members[index], mine[index]
            if member.piece is not None and _is_divided(member, held.get(key)):
                flat[member.first : member.first + member.piece.numel()] = held[key]
        _gather_parts(lane, flat)
        for index in here:
            if list(known[index].get(key, ())) == [_DIVIDED, name]:
                parameter, place = members[index].parameter, members[index].place
                whole = flat.as_strided(parameter.shape, parameter.stride(), place)
                state.setdefault(index, {})[key] = whole.to("cpu", copy=True)
    places = iter(range(len(members)))
    return {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {**_options(options), **_names(group), "params": [next(places) for _ in group]}
            for options, group in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def _told_by_all(
    lane: Communicator, members: Sequence[Member], mine: Sequence[State]
) -> list[dict[str, tuple[str, Any]]]:
    """By member, what any rank has of it, as :func:`_described` says it (collective)."""
    try:
        told: Any = [{k: _described(m, k, v) for k, v in its.items()} for m, its in zip(members, mine, strict=True)]
    except InvalidArgument as error:
        told = str(error)  # to all, as nobody else may see it
    everybody = [
        json.loads(body)
        for body in lane.control.exchange(lane.ranks, ControlChannel.OPTIMIZER, json.dumps(told).encode(), lane.timeout)
    ]
    known: list[dict[str, tuple[str, Any]]] = [{} for _ in members]
    for rank, theirs in zip(lane.ranks, everybody, strict=True):
        if isinstance(theirs, str):
            lane.control.let_all_find_out(lane.ranks, ControlChannel.FOUND_OUT)
            raise InvalidArgument(f"rank {rank}: {theirs}")
        for all_of_it, its in zip(known, theirs, strict=True):
            all_of_it.update(its)
    return known


def _gather_parts(lane: Communicator, flat: torch.Tensor) -> None:
    """Every rank's part of the memory, on all of them (collective); as bytes, whatever it holds."""
    raw = flat.view(torch.uint8)
    each = raw.numel() // lane.size
    lane.all_gather(raw, raw[lane.rank * each : (lane.rank + 1) * each].clone())


def scatter(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Member]], whole: State) -> None:
    """Loads this rank's part of what :func:`gather` or an optimizer over whole parameters gave (local).

    Raises:
        InvalidArgument: other groups, or parameters of another shape.
    """
    # Names of whole parameters would not be those of the pieces, which the optimizer has already.
    given = [{key: value for key, value in group.items() if key != "param_names"} for group in whole["param_groups"]]
    if [len(group["params"]) for group in given] != [len(group) for group in groups]:
        raise InvalidArgument(
            f"the state is of groups of {[len(group['params']) for group in given]} parameters, "
            f"the optimizer has {[len(group) for group in groups]}"
        )
    packed = optimizer.state_dict()
    numbers = {
        id(piece): number
        for theirs, packs in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for piece, number in zip(theirs["params"], packs["params"], strict=True)
    }
    state: dict[int, State] = {}
    for group, theirs in zip(groups, given, strict=True):
        for member, number in zip(group, theirs["params"], strict=True):
            its = whole["state"].get(number)
            if member.piece is not None and its is not None:
                state[numbers[id(member.piece)]] = {key: _part(member, key, value) for key, value in its.items()}
    optimizer.load_state_dict(
        {
            _PIECES: packed[_PIECES],
            "state": state,
            "param_groups": [
                {**_options(theirs), "params": packs["params"]}
                for theirs, packs in zip(given, packed["param_groups"], strict=True)
            ],
        }
    )


def copied(state: State) -> State:
    """On the CPU: what torch's ``state_dict()`` gives, and ``load_state_dict()`` takes, is the optimizer's own."""
    return {
        "state": {
            number: {key: _copy(value, "cpu") for key, value in its.items()} for number, its in state["state"].items()
        },
        "param_groups": [{**_options(group), "params": list(group["params"])} for group in state["param_groups"]],
    }


def _copy(value: Any, device: str | None = None) -> Any:
    """An optimizer goes on with the tensors that it loads, such as the number of steps, and changes them."""
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _options(group: State) -> State:
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _names(group: Sequence[Member]) -> State:
    """What torch's optimizers have in a group besides its options, where they were given names."""
    names = [member.name for member in group if member.name is not None]
    return {"param_names": names} if names else {}


def _is_divided(member: Member, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and member.piece is not None and value.shape == member.piece.shape


def _described(member: Member, key: str, value: Any) -> tuple[str, Any]:
    if _is_divided(member, value):
        return _DIVIDED, str(value.dtype).removeprefix("torch.")
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # such as the number of steps
        return str(value.dtype).removeprefix("torch."), value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return "plain", value
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise InvalidArgument(
        f"{key!r} in the optimizer's state is {what}: it has to be a number, or a number for each of the "
        f"{0 if member.piece is None else member.piece.numel()} elements that the rank has of the parameter"
    )


def _undescribed(kind: str, value: Any) -> Any:
    return value if kind == "plain" else torch.tensor(value, dtype=getattr(torch, kind), device="cpu")


def _part(member: Member, key: str, value: Any) -> Any:
    parameter, piece = member.parameter, member.piece
    if not isinstance(value, torch.Tensor) or key == "step" or piece is None:  # a parameter may have no axes either
        return _copy(value)
    if value.shape != parameter.shape:
        if value.dim() == 0:
            return _copy(value)
        raise InvalidArgument(f"{key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}")
    flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
    begin = member.first - member.place
    return flat[begin : begin + piece.numel()].clone()
