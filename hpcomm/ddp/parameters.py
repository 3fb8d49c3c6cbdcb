"""Which parameters have a place in the gradient buckets of a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hpcomm.ddp.module import in_functional_call
from hpcomm.errors import InvalidArgument

__all__: list[str] = []

Named = tuple[str, torch.nn.Parameter]


def for_reducer(
    wrapper: torch.nn.parallel.DistributedDataParallel, own: Sequence[Named], trained: Sequence[Named]
) -> list[Named]:
    """Those that torch's reducer would have, in the order of the module: not what was hung into it after the wrapping.

    Args:
        own: the wrapper's when it was made.
        trained: of these, those that required a gradient then.
    """
    names_then, then = {name for name, _ in own}, {id(parameter) for _, parameter in own}
    now = [
        (name, parameter)
        for name, parameter in wrapper.module.named_parameters()
        if name in names_then or id(parameter) in then
    ]
    # In a forward of torch.func.functional_call the module has other tensors for a while; its own are reduced.
    if in_functional_call() or not all(isinstance(parameter, torch.nn.Parameter) for _, parameter in now):
        return [(name, parameter) for name, parameter in own if parameter.requires_grad]
    names = {id(parameter): name for name, parameter in now}
    parameters, _ = wrapper._build_params_for_reducer()  # type: ignore[no-untyped-call]
    chosen = {id(parameter): names[id(parameter)] for parameter in parameters if id(parameter) in names}
    # Torch's reducer has what required a gradient when the wrapper was made: what is frozen now may not stay so, and
    # what a tensor-parallel module hands out as DTensors, after its first forward, is no parameter of it any more.
    for name, parameter in trained:
        is_frozen = id(parameter) in names and not parameter.requires_grad
        if (is_frozen and wrapper.find_unused_parameters) or hasattr(parameter, "_st_info"):
            chosen[id(parameter)] = name
    known = {id(parameter): parameter for _, parameter in (*own, *now)}
    return [(chosen[key], parameter) for key, parameter in known.items() if key in chosen]


def require_nothing_left_out(frozen: Sequence[Named]) -> None:
    """Raises InvalidArgument for a parameter that torch's reducer would average and ours has no place for.

    Args:
        frozen: those that required a gradient when the wrapper was made, and none when the buckets were laid out.
    """
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise InvalidArgument(
                f"parameter {name} was frozen in the first forward with gradients, which laid out the buckets, and "
                "requires a gradient now: nobody would average it. Wrap the model again, or make the wrapper with "
                "find_unused_parameters=True, which keeps a place for what is frozen"
            )


@contextmanager
def trained(parameters: Iterable[Named]) -> Iterator[None]:
    """Inside, all of them require a gradient: torch's reducer, made there, has a place for each."""
    frozen = [parameter for _, parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
