"""The methods of a wrapper whose optimizer is divided by the ranks (``shard_optimizer=True``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from hpcomm._C import Communicator
    from hpcomm.ddp.choice import Choice, NativeOptions
    from hpcomm.ddp.sharded import ShardedParameters

__all__: list[str] = []


class DividesOptimizer:
    """A part of :class:`hpcomm.DistributedDataParallel`, which has what is named here."""

    if TYPE_CHECKING:
        _hpcomm_choice: Choice | None
        _hpcomm_lane: Communicator | None
        _hpcomm_options: NativeOptions
        _hpcomm_sharded: ShardedParameters | None

        def _choose(self) -> None: ...
        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]: ...

    def make_optimizer(
        self, optimizer: type[torch.optim.Optimizer], parameters: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer whose state is divided by the ranks, for a wrapper with ``shard_optimizer=True`` (collective).

        It is of the given class, over this rank's pieces of the parameters, one-dimensional and with the options of
        their groups. So the class must treat each number by itself: SGD, Adam, AdamW, RMSprop, not those that look at
        a parameter's shape or norm. ``step()`` is collective: it ends with equal parameters everywhere.
        ``state_dict()`` is this rank's part; ``gather_optimizer_state()`` has all of it.

        Args:
            parameters: of this wrapper, or groups of them, also with their names, as torch's optimizers take them; all
                that require a gradient by default. Frozen ones keep their places in checkpoints.

        Raises:
            InvalidArgument: made without ``shard_optimizer``; parameters that are not this wrapper's; an optimizer of
                torch's that needs whole parameters (Adafactor, LBFGS, Muon); in ``step()``: a parameter whose memory
                became another kind, one that was frozen and has a gradient, or gradients that another optimizer of
                this wrapper has stepped already.
        """
        sharded = self._sharded("make_optimizer()")
        chosen = [p for p in self.parameters() if p.requires_grad] if parameters is None else parameters
        return sharded.make(optimizer, chosen, **options)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What ``state_dict()`` of an optimizer over the whole parameters would be, on the CPU, on all ranks
        (collective): for a checkpoint that any number of ranks may go on from, also without ``shard_optimizer``.

        Args:
            optimizer: made by ``make_optimizer()``.

        Raises:
            InvalidArgument: it was not, or has a state that is neither a number nor one for each element.
        """
        return self._sharded("gather_optimizer_state()").whole_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's part of what ``gather_optimizer_state()``, or ``state_dict()`` of an optimizer over whole
        parameters, has given.

        Args:
            optimizer: made by ``make_optimizer()``, with the same groups.

        Raises:
            InvalidArgument: it was not; other groups; parameters of another shape.
        """
        self._sharded("load_optimizer_state()").load_whole_state(optimizer, state)

    def _gradient_norms(self, norm_type: float) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        """For ``hpcomm.clip_grad_norm_``: the norm of each gradient, this rank's parts of them, and this rank."""
        sharded = self._sharded("clip_grad_norm_()")
        return *sharded.norms(norm_type), 0 if self._hpcomm_lane is None else self._hpcomm_lane.control.rank

    def _sharded(self, what: str) -> ShardedParameters:
        self._choose()
        if self._hpcomm_options.shard_optimizer and self._hpcomm_choice is None:
            raise InvalidArgument(f"{what}: no parameter requires a gradient")
        if self._hpcomm_sharded is None:
            raise InvalidArgument(f"{what} needs shard_optimizer=True")
        return self._hpcomm_sharded
