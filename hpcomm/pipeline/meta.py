"""Modules built on the device "meta" get memory and values: one stage at a time, the same values on every mesh."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.randomness import seed_of

if TYPE_CHECKING:
    from hpcomm.mesh import Mesh

__all__ = ["materialize"]


InitFn = Callable[[str, torch.nn.Module], None]


def materialize(
    module: torch.nn.Module,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    init_fn: InitFn | None = None,
) -> torch.nn.Module:
    """Gives memory and values to what is on "meta" in ``module``, in place; parameters that are shared stay shared.

    Every submodule that has parameters or buffers of its own is initialised, children first, after the generators
    were seeded by ``seed`` and the submodule's name: values do not depend on what else is materialised, so a stage has
    those that it has in the whole model. A parameter with several names keeps the values of the first. The generators
    go on afterwards as if nothing had been drawn.

    Args:
        module: changed and returned; what is not on "meta" is left alone.
        device: of the new memory. Random values depend on its type.
        init_fn: ``init_fn(name, submodule)`` sets all parameters and buffers of ``submodule`` itself; its memory holds
            NaN before. Called under ``no_grad``. By default ``submodule.reset_parameters()`` is called.

    Raises:
        InvalidArgument: a submodule cannot be initialised, or was not in full; it is named.
    """
    require_initialisable(module, init_fn)
    _materialize(module, torch.device(device), seed, init_fn, [module])
    return module


def _materialize(
    module: torch.nn.Module,
    device: torch.device,
    seed: int,
    init_fn: InitFn | None,
    users: Sequence[torch.nn.Module],
) -> None:
    """``users``: all that may share tensors with ``module``."""
    todo = [(name, sub, list(_own(sub))) for name, sub in _children_first(module)]
    todo = [(name, sub, [t for t in own if t.is_meta]) for name, sub, own in todo if any(t.is_meta for t in own)]
    if not todo:
        return
    # The first owner in the model's order decides on a shared tensor.
    order = {id(sub): i for i, (_, sub) in enumerate(module.named_modules())}
    decides: dict[int, int] = {}
    for _, sub, tensors in sorted(todo, key=lambda entry: order[id(entry[1])]):
        for tensor in tensors:
            decides.setdefault(id(tensor), id(sub))
    fresh = {id(tensor): _allocate(tensor, device, users) for _, _, tensors in todo for tensor in tensors}
    todo = [(name, sub, [fresh[id(t)] for t in tensors]) for name, sub, tensors in todo]
    decides = {id(fresh[key]): owner for key, owner in decides.items()}
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), torch.no_grad(), torch.device(device):
        for name, sub, tensors in todo:
            mine = [t for t in tensors if decides[id(t)] == id(sub)]
            taken = {id(t) for t in mine}
            others = [t for t in _own(sub) if id(t) not in taken and not t.is_meta]
            kept = [t.clone() for t in others]
            _initialise(name, sub, mine, seed_of(seed, 0, 0, zlib.crc32(name.encode())), init_fn or _default_of(module))
            for tensor, before in zip(others, kept, strict=True):
                tensor.copy_(before)


def materialize_together(
    mesh: Mesh, stages: Sequence[torch.nn.Module], here: Sequence[int], seed: int, init_fn: InitFn | None
) -> None:
    """:func:`materialize` for the stages of this rank (``here``) among all.

    Collective over the mesh: when one rank cannot, all raise.
    """
    problem: Exception | None = None
    try:
        for stage in here:
            _materialize(stages[stage], mesh.device, seed, init_fn, stages)
    except Exception as error:  # of a module's own code as well: nobody may wait for this rank
        problem = error
    line = "" if problem is None else f"rank {mesh.rank}: {type(problem).__name__}: {problem}"
    told = mesh.control.exchange(range(mesh.size), ControlChannel.MATERIALIZE, line.encode(), mesh.timeout)
    if problem is not None:
        raise problem
    for text in told:
        if text:
            raise InvalidArgument(f"a stage could not be materialised: {text.decode()}")


def is_on_meta(module: torch.nn.Module) -> bool:
    """Whether anything of the module has no memory yet."""
    return any(t.is_meta for sub in module.modules() for t in _own(sub))


def require_initialisable(module: torch.nn.Module, init_fn: InitFn | None) -> None:
    """Raises InvalidArgument for a submodule on "meta" whose values nobody says."""
    if init_fn is not None:
        return
    convention = getattr(module, "initialise", None) is not None
    for name, sub in module.named_modules():
        if any(t.is_meta for t in _own(sub)) and not _can_reset(sub) and not (convention and sub._parameters):
            held = [key for key, t in [*sub._parameters.items(), *sub._buffers.items()] if t is not None]
            raise InvalidArgument(
                f"{name or 'the model'} ({type(sub).__name__}) was built on meta and has no reset_parameters() that "
                f"gives values to {', '.join(held)}; add that method, or pass init_fn=, called as "
                "init_fn(name, submodule) for every submodule with parameters or buffers of its own"
            )


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _children_first(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Submodules by name, parents after their children: a parent's reset_parameters may correct a child's."""
    return sorted(module.named_modules(), key=lambda entry: -len(entry[0].split(".")) if entry[0] else 1)


def _allocate(tensor: torch.Tensor, device: torch.device, users: Sequence[torch.nn.Module]) -> torch.Tensor:
    """The tensor with memory: itself wherever torch can do that, so that whoever holds it sees it, other stages too."""
    if not tensor.is_meta:
        return tensor  # under another name already
    fresh = torch.empty_like(tensor, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    if not weakref.getweakrefs(tensor):
        torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        return tensor
    # A recurrent layer watches its weights, which torch does not swap then: it is told of new ones.
    for user in users:
        for sub in user.modules():
            for key, held in [*sub._parameters.items(), *sub._buffers.items()]:
                if held is tensor:
                    setattr(sub, key, fresh)
    return fresh


def _initialise(name: str, module: torch.nn.Module, tensors: list[torch.Tensor], seed: int, init_fn: InitFn) -> None:
    """Calls ``init_fn`` and proves that it wrote everything: NaN stays where nothing is written, and what cannot hold
    NaN must come out equal over two different fillings.
    """
    exact = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    before: list[torch.Tensor] = []
    for filling in (0, 1) if exact else (0,):
        for tensor in tensors:
            tensor.fill_(filling if any(tensor is t for t in exact) else float("nan"))
        torch.manual_seed(seed)
        init_fn(name, module)
        before = before or [t.clone() for t in exact]
    names = {id(t): key for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    unset = [t for t in tensors if id(t) in names and not any(t is e for e in exact) and bool(t.isnan().any())]
    unset += [t for t, first in zip(exact, before, strict=True) if id(t) in names and not torch.equal(t, first)]
    if unset:
        raise InvalidArgument(
            f"{name or 'the model'} ({type(module).__name__}) was built on meta, and its initialisation left "
            f"{names[id(unset[0])]} without values; set all of it in reset_parameters() or in init_fn"
        )


def _can_reset(module: torch.nn.Module) -> bool:
    return _reset_of(module) is not None or _is_rebuilt(module)


def _reset_of(module: torch.nn.Module) -> Callable[[], None] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _is_rebuilt(module: torch.nn.Module) -> bool:
    """Buffers alone, computed from a config: transformers' rotary embeddings."""
    return not module._parameters and not module._modules and getattr(module, "config", None) is not None


def _default_of(module: torch.nn.Module) -> InitFn:
    convention: Any = getattr(module, "initialise", None)  # transformers' _init_weights(module)

    def init(name: str, sub: torch.nn.Module) -> None:
        if _is_rebuilt(sub):
            fresh: torch.nn.Module = type(sub)(sub.config)
            for key, buffer in fresh._buffers.items():
                mine = sub._buffers.get(key)
                if mine is not None and buffer is not None:
                    mine.copy_(buffer)
            own = {key: value for key, value in vars(fresh).items() if not key.startswith("_") and key != "training"}
            vars(sub).update(own)
        elif convention is not None and sub._parameters:
            convention(sub)
        else:
            reset = _reset_of(sub)
            if reset is not None:
                reset()

    return init
