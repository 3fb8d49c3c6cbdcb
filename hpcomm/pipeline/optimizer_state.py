"""An optimizer's state by the names of parameters, as checkpoints need it that another mesh shall load."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__: list[str] = []

# What a group has of its parameters, as many as there are; with names where they were given by named_parameters().
_OF_GROUPS = ("params", "param_names")


def by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Of each parameter its state, the options of its group, and whether it has a state at all. One that has had no
    gradient yet has none; there is a state of its kind all the same, without a meaning: what a checkpoint is loaded
    into must have all that is in it.

    Args:
        optimizer: of parameters of this rank's stages. It is left as it is.
        names: of parameters, by ``id``.

    Raises:
        InvalidArgument: the optimizer has a parameter without a name.
    """
    _require_known(optimizer, names)
    found = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in _OF_GROUPS}
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter) or {})
            has_state = bool(state)
            if not has_state and parameter.requires_grad:
                state = _some_state(optimizer, parameter, options)
            found[names[id(parameter)]] = {"state": state, "options": dict(options), "has_state": has_state}
    return found


def load(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes what :func:`by_name` gave, of these parameters or more, or torch's ``get_optimizer_state_dict()`` of the
    plain model.

    Raises:
        InvalidArgument: a parameter is missing in ``state``, or one group's had different options there.
    """
    _require_known(optimizer, names)
    if state.keys() == {"state", "param_groups"}:
        state = _of_torch(state)
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group in optimizer.param_groups:
        mine = [names[id(parameter)] for parameter in group["params"]]
        if missing := [name for name in mine if name not in state]:
            raise InvalidArgument(f"load_optimizer_state_dict(): no state of parameter {missing[0]}")
        # A state of an older version has the names.
        of_each = [{k: v for k, v in state[name]["options"].items() if k not in _OF_GROUPS} for name in mine]
        options = of_each[0] if mine else {k: v for k, v in group.items() if k not in _OF_GROUPS}
        for name, own in zip(mine, of_each, strict=True):
            if own != options:
                raise InvalidArgument(
                    f"load_optimizer_state_dict(): {mine[0]} and {name} are in one group of this optimizer, and were "
                    f"in two with {options} and {own}"
                )
        places = range(number, number + len(mine))
        number += len(mine)
        packed["param_groups"].append({**options, "params": list(places)})
        had = {i: state[n] for i, n in zip(places, mine, strict=True) if state[n]["has_state"]}
        packed["state"].update({i: entry["state"] for i, entry in had.items()})
    optimizer.load_state_dict(packed)


def _of_torch(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What :func:`by_name` would have given of the optimizer of a plain model whose parameters have names."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in state["param_groups"]:
        options = {key: value for key, value in group.items() if key not in _OF_GROUPS}
        for name in group["params"]:
            if not isinstance(name, str):
                raise InvalidArgument(
                    "load_optimizer_state_dict(): the state has numbers for its parameters, as optimizer.state_dict() "
                    "gives it; save torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
                )
            own = state["state"].get(name) or {}
            found[name] = {"state": own, "options": options, "has_state": bool(own)}
    return found


def _some_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a first gradient leaves, here of a stand-in for ``parameter``, by a copy of the optimizer for it alone."""
    stand_in = torch.zeros_like(parameter, requires_grad=True)
    stand_in.grad = torch.zeros_like(parameter)
    alone = object.__new__(type(optimizer))
    alone.__dict__.update(optimizer.__dict__)
    alone.state = defaultdict(dict)
    alone.param_groups = [{**options, "params": [stand_in]}]
    alone._optimizer_step_pre_hooks = OrderedDict()
    alone._optimizer_step_post_hooks = OrderedDict()
    step: Any = type(optimizer).step
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(alone)  # hooks of all optimizers are in between
    except Exception:  # noqa: BLE001 - one that needs a closure, say: its state is not by parameter
        return {}
    return dict(alone.state.get(stand_in, {}))


def _require_known(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidArgument(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of this rank's "
                    "stages; make it of pipe.parameters()"
                )
