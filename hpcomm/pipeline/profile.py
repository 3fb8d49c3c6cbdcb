"""What each layer of a chain takes on a sample microbatch: seconds, bytes kept for the backward, bytes handed on."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import Call, calls_of, require_taken, run, skips_of
from hpcomm.pipeline.meta import InitFn, is_on_meta, materialize
from hpcomm.tree import mapped, tensors_of

__all__: list[str] = []


@dataclass(frozen=True)
class LayerProfile:
    """One layer and one microbatch. Times in seconds, sizes in bytes."""

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int  # kept from the forward to the backward, parameters not counted
    output_bytes: int  # of what it returns
    parameter_bytes: int
    trainable_bytes: int  # of these, those that get gradients
    trainable_elements: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


def profile(
    model: torch.nn.Module,
    sample: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    repeats: int = 3,
    seed: int = 0,
    init_fn: InitFn | None = None,
) -> list[LayerProfile]:
    """Runs the layers one after the other on ``sample``, each ``repeats`` times after one run to warm up.

    The layers run as copies, one at a time: the model is not changed, and of a model on "meta" there is never more
    than one layer in memory. The shortest time counts, since all that disturbs a measurement makes it longer.

    Args:
        model: a chain.
        sample: positional arguments of the model, of the size of one microbatch.
        keywords: keyword arguments for it.

    Raises:
        InvalidArgument: ``sample`` does not go through the model; the layer is named.
    """
    device = torch.device(device)
    skips = skips_of(model)
    calls = calls_of(model, 0, skips)
    keywords = _placed(dict(keywords or {}), device)
    require_taken(calls, keywords)
    wanted = frozenset(name for sources in skips.values() for name in sources)
    value: Any = _placed(sample, device)
    known: dict[str, Any] = {}
    found = []
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), torch.enable_grad():
        for call in calls:
            layer = copy.deepcopy(call.layer)
            if is_on_meta(layer):
                layer.__dict__.setdefault("initialise", getattr(model, "initialise", None))
                materialize(layer, device=device, seed=seed, init_fn=_under(call.name, init_fn))
            layer.to(device)
            try:
                row, value = _measured(call._replace(layer=layer), value, known, wanted, keywords, device, repeats)
            except Exception as error:
                raise InvalidArgument(
                    f"Balance: the sample does not go through layer {call.name!r}: {type(error).__name__}: {error}"
                ) from error
            found.append(row)
    return found


def _measured(
    call: Call,
    value: Any,
    known: dict[str, Any],
    wanted: frozenset[str],
    keywords: Mapping[str, Any],
    device: torch.device,
    repeats: int,
) -> tuple[LayerProfile, Any]:
    parameters = {id(p): p for p in call.layer.parameters()}
    weights = {p.untyped_storage().data_ptr() for p in parameters.values()}
    forwards, backwards, kept = [], [], 0
    output: Any = None
    for attempt in range(repeats + 1):
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        # Copies: a layer may work in place, which a leaf does not allow. The model's inputs get no gradient.
        leaves = mapped(value if call.is_first else _leaves(value), lambda t: t.clone())
        mine = {name: _leaves(known[name]) for name in call.skips}
        begin = _now(device)
        if attempt == 0:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                output = run([call], leaves, dict(mine), frozenset(), keywords, None, 0)
            kept = sum(saved.values())
        else:
            output = run([call], leaves, dict(mine), frozenset(), keywords, None, 0)
        middle = _now(device)
        roots = [t for t in tensors_of(output) if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        end = _now(device)
        if attempt or repeats == 0:
            forwards.append(middle - begin)
            backwards.append(end - middle)
        for parameter in parameters.values():
            parameter.grad = None
    output = _leaves(output)
    if call.name in wanted:
        known[call.name] = output
    trainable = [p for p in parameters.values() if p.requires_grad]
    row = LayerProfile(
        call.name,
        min(forwards),
        min(backwards),
        kept,
        _bytes(tensors_of(output)),
        _bytes(list(parameters.values())),
        _bytes(trainable),
        sum(p.numel() for p in trainable),
    )
    return row, output


def _under(prefix: str, init_fn: InitFn | None) -> InitFn | None:
    if init_fn is None:
        return None
    return lambda name, module: init_fn(f"{prefix}.{name}" if name else prefix, module)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _placed(tree: Any, device: torch.device) -> Any:
    return mapped(tree, lambda t: t.detach().to(device))


def _leaves(tree: Any) -> Any:
    """The same values as leaves of a new graph; what may carry a gradient does."""
    return mapped(tree, lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()))
