"""Any model that is a chain of layers, as one: Sequential, list of stages, traced forward, decoder of known shape.

A forward is never guessed from the order in which modules were registered: torch.fx proves it, or the decoder's type is
one whose forward is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import Chain, Section
from hpcomm.pipeline.decoder import decoder_section, is_decoder
from hpcomm.pipeline.traced import traced_section

__all__: list[str] = []

Model = torch.nn.Module | Sequence[torch.nn.Module]

_IN_ORDER = (torch.nn.Sequential.forward, Chain.forward)


def as_chain(model: Model) -> torch.nn.Module:
    """``model`` itself where it is an ``nn.Sequential``, a :class:`Section` that shares its modules otherwise.

    Raises:
        InvalidArgument: it is no chain; the message says where that shows. Or it has hooks of its own.
    """
    if isinstance(model, torch.nn.Module):
        _require_no_hooks(model)
    runs_in_order = isinstance(model, torch.nn.Sequential) and type(model).forward in _IN_ORDER
    if isinstance(model, torch.nn.Module) and (runs_in_order or isinstance(model, Section)):
        return model
    if type(model).__module__.startswith("torch._dynamo"):  # not imported for a look: that takes a second
        raise InvalidArgument(
            "Pipeline: the model is what torch.compile() made of a whole one, which cannot be cut; compile its layers, "
            "by layer.compile() or torch.compile(layer)"
        )
    if not isinstance(model, torch.nn.Module):
        stages = list(model)
        if not stages or not all(isinstance(stage, torch.nn.Module) for stage in stages):
            raise InvalidArgument("Pipeline: a list of stages holds one nn.Module per stage, all of them on every rank")
        return torch.nn.Sequential(*stages)
    if is_decoder(model):
        return decoder_section(model)
    return traced_section(model)


def _require_no_hooks(model: torch.nn.Module) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(model, kind, None) for kind in kinds):
        raise InvalidArgument(
            f"Pipeline: there is a hook on the {type(model).__name__} itself, which is never called: its layers are, "
            "one by one; register the hook on a layer"
        )


def split_of(model: Model, split_at: Sequence[str | int] | None) -> Sequence[str | int] | None:
    """Where the model is cut by hand: a list of stages says so itself."""
    if isinstance(model, torch.nn.Module):
        return split_at
    if split_at is not None:
        raise InvalidArgument("Pipeline: a list of stages is cut between its entries; leave split_at out")
    return range(1, len(model))
