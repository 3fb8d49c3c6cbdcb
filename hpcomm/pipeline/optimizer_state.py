"""An optimizer's state by the names of parameters, as checkpoints need it that another mesh shall load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    unreached = _first_states(optimizer)
    found = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter) or unreached.get(id(parameter), {}))
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


def _first_states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """By ``id`` of the parameters that have had no gradient yet, the state with which their first one finds them: a
    checkpoint that lacked it could not be loaded into an optimizer that has it. ``optimizer`` is left as it was.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    if not missing or len(missing) == len(parameters):
        return {}
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in parameters:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        type(optimizer).step(optimizer)  # not its own attribute: a schedule of learning rates counts the calls of that
    except Exception:  # noqa: BLE001 - one that needs a closure, say: its state is not by parameter
        return {}
    finally:
        states = {id(parameter): dict(optimizer.state.pop(parameter, {})) for parameter in missing}
        for group, rate in rates:
            group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient
    for state in states.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = torch.zeros_like(state["step"])
        elif "step" in state:
            state["step"] = 0
    return states


def _require_known(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidArgument(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of this rank's "
                    "stages; make it of pipe.parameters()"
                )
