"""An optimizer's state by the names of parameters, as checkpoints need it that another mesh shall load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__: list[str] = []


def by_name(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Of each parameter its state, and the options of its group.

    Args:
        optimizer: of parameters of ``module``. One that has taken no step yet gets its first state: torch has it take
            one with a learning rate of 0.
        names: of parameters, by ``id``.

    Raises:
        InvalidArgument: the optimizer has a parameter without a name.
    """
    _require_known(optimizer, names)
    if not optimizer.state:
        _take_first_state(optimizer, module)
    found = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            found[names[id(parameter)]] = {"state": state, "options": dict(options)}
    return found


def load(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes what :func:`by_name` gave, of these parameters or more.

    Raises:
        InvalidArgument: a parameter is missing in ``state``, or one group's had different options there.
    """
    _require_known(optimizer, names)
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group in optimizer.param_groups:
        mine = [names[id(parameter)] for parameter in group["params"]]
        if missing := [name for name in mine if name not in state]:
            raise InvalidArgument(f"load_optimizer_state_dict(): no state of parameter {missing[0]}")
        options = state[mine[0]]["options"] if mine else {k: v for k, v in group.items() if k != "params"}
        for name in mine:
            if state[name]["options"] != options:
                raise InvalidArgument(
                    f"load_optimizer_state_dict(): {mine[0]} and {name} are in one group of this optimizer, and were "
                    f"in two with {options} and {state[name]['options']}"
                )
        places = range(number, number + len(mine))
        number += len(mine)
        packed["param_groups"].append({**options, "params": list(places)})
        packed["state"].update({i: state[n]["state"] for i, n in zip(places, mine, strict=True) if state[n]["state"]})
    optimizer.load_state_dict(packed)


def _take_first_state(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    kept = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, _ in kept:
        parameter.grad = None  # where there is one, torch makes no state
    try:
        get_optimizer_state_dict(module, optimizer)
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _require_known(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidArgument(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of this rank's "
                    "stages; make it of pipe.parameters()"
                )
