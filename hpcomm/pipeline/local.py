"""The part of the model that a rank holds: its stages and their parameters, under the whole model's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline import chain, optimizer_state
from hpcomm.pipeline.checks import is_extra
from hpcomm.pipeline.parameters import broadcast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.homes import Home
    from hpcomm.pipeline.sharing import Owned

__all__: list[str] = []


class LocalModel:
    """What :class:`hpcomm.Pipeline` offers of the model itself.

    Args:
        mesh: on whose device this rank's stages live.
        modules: all stages; those of this rank are moved, the others are only looked at.
        owned: all parameters of the model, in its order.
        placement: the pipeline rank of every stage.
    """

    _home: Home

    def __init__(
        self, mesh: Mesh, modules: Sequence[torch.nn.Module], owned: Sequence[Owned], placement: Sequence[int]
    ) -> None:
        here = [stage for stage, rank in enumerate(placement) if rank == mesh.coordinate["pp"]]
        self.mesh = mesh
        self._placement = list(placement)
        self._names = [entry.name for entry in owned]
        self._shapes = [
            {
                name: None if is_extra(name, value) else (value.shape, value.dtype)
                for name, value in stage.state_dict().items()
            }
            for stage in modules
        ]
        self.stages = {stage: modules[stage].to(mesh.device) for stage in here}
        self.module = next(iter(self.stages.values())) if len(here) == 1 else chain.joined(list(self.stages.values()))
        # Gradients in float64, of whatever stage: what is computed of all has that dtype on every rank.
        self.has_wide_gradients = any(
            e.parameter.requires_grad and e.parameter.dtype.to_real() == torch.float64 for e in owned
        )
        # Of the local parameters: the name in the model, and the first stage that owns it.
        self._canonical = {id(e.parameter): (e.name, e.stages[0]) for e in owned if set(e.stages) & set(here)}

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The local stages' parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The local stages' parameters under the plain model's names."""
        return self.module.named_parameters()

    def owned_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
        """The local stages' parameters under their first names in the model, and whether this rank holds the first of
        the stages that share it: over ``mesh.pp`` that is true once for every parameter of the model.
        """
        for parameter in self.module.parameters():
            name, first = self._canonical[id(parameter)]
            yield name, parameter, first in self.stages

    @property
    def parameter_names(self) -> list[str]:
        """All parameters of the model in its order, those of other stages included; a shared one once."""
        return list(self._names)

    def state_dict(self) -> dict[str, Any]:
        """The local stages' state under the plain model's names; the union over ``mesh.pp`` is the plain model's.

        Raises:
            InvalidArgument: another Pipeline of the model has trained it since, on other ranks.
        """
        self._home.require_current("state_dict()")
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads the local stages' part of ``state``, which may be the whole model's.

        Args:
            strict: False, as torch has it: what is missing stays as it is, and what belongs to no stage is ignored.

        Raises:
            RuntimeError: an entry of the local stages is missing or has another shape (torch's own error).
            InvalidArgument: an entry belongs to no stage of any rank: the checkpoint of a deeper model, say.
        """
        mine = self.module.state_dict().keys()
        known = mine | {name for stage in self._shapes for name in stage}
        strange = [name for name in state if name not in known and not name.endswith("_extra_state")]
        if strange and strict:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise InvalidArgument(
                f"load_state_dict(): no stage has {strange[0]!r}{more}; load a checkpoint of this model, or pass "
                "strict=False to load what fits"
            )
        current = self._home.current_here(self.module, self.mesh.rank)
        before = [tensor.detach().clone() for tensor in current]
        is_whole = False
        try:
            self.module.load_state_dict({name: value for name, value in state.items() if name in mine}, strict=strict)
            is_whole = all(name in state for name in mine)
        finally:
            changed = not all(map(torch.equal, current, before))
            self._home.note_loaded(changed=changed, whole=is_whole)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The state of this rank's ``optimizer`` by the plain model's names of parameters, for checkpoints that any
        other mesh may load (``torch.distributed.checkpoint``): ``optimizer.state_dict()`` numbers parameters from 0 on
        every rank.

        Args:
            optimizer: of this pipeline's :meth:`parameters`. It is left as it is.

        Returns:
            By name, of a parameter that stages share its first one: ``"state"``, the ``"options"`` of its group, and
            ``"has_state"``. A parameter that has had no gradient has no state (False), but one of the same kind is
            there, so that there is what a checkpoint can be loaded into.

        Raises:
            InvalidArgument: the optimizer has parameters of others.
        """
        return optimizer_state.by_name(optimizer, self._own_names())

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Loads the local stages' part of ``state``, which :meth:`optimizer_state_dict` has given on this or another
        mesh, or ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)`` of the plain
        model.

        Raises:
            InvalidArgument: the optimizer has parameters of others, ``state`` lacks one of its own, or parameters that
                are in one group here had different options there.
        """
        optimizer_state.load(optimizer, self._own_names(), state)

    def _own_names(self) -> dict[int, str]:
        return {key: name for key, (name, _) in self._canonical.items()}

    def unlike(self, model: torch.nn.Module) -> str:
        """The first entry of a state in which a chain differs from the model of the stages; empty where none does."""
        whole = {name: kind for stage in self._shapes for name, kind in stage.items()}
        theirs = model.state_dict()
        for name, kind in whole.items():
            if name not in theirs:
                return f"it has no {name}"
            if kind is not None and theirs[name].shape != kind[0]:
                return f"its {name} has the shape {tuple(theirs[name].shape)}, that of the Pipeline {tuple(kind[0])}"
        return next((f"it has {name}, which the Pipeline has not" for name in theirs if name not in whole), "")

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state on every rank, copied from its stages (collective over ``mesh.pp``).

        Raises:
            InvalidArgument: a layer has extra state (``get_extra_state()``); each rank's :meth:`state_dict` has its
                own. Or another Pipeline of the model has trained it since, on other ranks.
        """
        self._home.require_current("full_state_dict()", self.mesh)
        whole: dict[str, torch.Tensor] = {}
        for stage, kinds in enumerate(self._shapes):
            mine = self.stages[stage].state_dict() if stage in self.stages else {}
            for name, kind in kinds.items():
                if kind is None:
                    raise InvalidArgument(
                        f"full_state_dict(): {name} is extra state, which is not sent; use each rank's state_dict()"
                    )
                value = (
                    mine[name].detach().clone().contiguous()
                    if name in mine
                    else torch.empty(kind[0], dtype=kind[1], device=self.mesh.device)
                )
                broadcast(self.mesh.pp, value, self._placement[stage])
                whole[name] = value
        return whole
