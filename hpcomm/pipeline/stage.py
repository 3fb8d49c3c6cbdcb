"""Stage: one stage of the model on this rank, its forwards and backwards by microbatch."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import RemovableHandle

from hpcomm import _C
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline import chain, deferred
from hpcomm.pipeline.microbatch import samples
from hpcomm.pipeline.randomness import may_draw
from hpcomm.tree import tensors_of

if TYPE_CHECKING:
    from hpcomm.pipeline.links import Link
    from hpcomm.pipeline.randomness import Draws

__all__: list[str] = []

LossFn = Callable[..., Any]
# Per tensor of a message; None where it needs no gradient.
MessageGradients = list["torch.Tensor | None"]


@dataclass
class Loss:
    """The weighted loss of one microbatch: what a backward starts from on the last stage."""

    weighted: torch.Tensor  # scalar with a graph: weight x loss, or the sum that loss_fn returned
    weight: float
    borrowed: bool = False  # the tensor is loss_fn's own, which may write it again
    is_mean: bool = True  # over samples, as loss_fn returned no weight of its own


def evaluate(loss_fn: LossFn, output: Any, target: Any) -> Loss:
    """``loss_fn(output, target)`` (or ``loss_fn(output)`` without a target) with its weight.

    Raises:
        InvalidArgument: ``loss_fn`` did not return a scalar, or a pair of a scalar and a weight; it takes a target and
            there is none, or the other way round.
    """
    arguments = (output,) if target is None else (output, target)
    try:
        result = loss_fn(*arguments)
    except TypeError as error:
        if (problem := chain.misfit(loss_fn, arguments)) is None:
            raise
        has = "no target" if target is None else "a target"
        raise InvalidArgument(
            f"loss_fn does not fit to a step with {has}: {problem}. The target is passed by keyword, "
            'step(x, target=y), on the ranks of the last stage, with inputs="first" on those of the first one'
        ) from error
    total, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise InvalidArgument(
            f"loss_fn must return a scalar tensor (mean loss), or a pair (sum, weight); it returned {result!r:.200}"
        )
    if total.is_complex():
        raise InvalidArgument(f"loss_fn returned a complex number ({total.dtype}); a loss is real")
    if weight is not None:
        if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":
            _warn_of_weight(weight.device)
        number = float(weight)
        if not 0 <= number < math.inf:
            raise InvalidArgument(f"loss_fn returned the weight {number}: the loss is (sum of sums) / (sum of weights)")
        return Loss(total, number, borrowed=True, is_mean=False)
    weight = samples(target) or samples(output)
    # 65,504 is all that float16 holds.
    wide = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
    return Loss(wide * weight, float(weight))


@functools.cache  # once is enough, and no text for every microbatch
def _warn_of_weight(device: torch.device) -> None:
    warnings.warn(
        f"the weight that loss_fn returned is a tensor on {device}: in every microbatch the host waits for that device "
        "to read it, and messages are sent late; count on the CPU, from targets that are there",
        stacklevel=3,
    )


@dataclass
class _Tape:
    """What one microbatch's backward needs."""

    arrived: dict[int, list[torch.Tensor]]  # source stage -> leaves that a gradient goes back to, or not
    left: dict[int, list[torch.Tensor]]  # target stage -> tensors that a gradient comes back for, or not
    pending: _C.Deferred | None  # a divided backward's second half
    root: torch.Tensor | None = None  # the loss


class Stage:
    """Runs the layers of one stage; keeps each microbatch's graph from its forward to its backward.

    Args:
        index: of the stage.
        module: its layers.
        calls: how they are called.
        incoming, outgoing: its links.
        divided: microbatches whose backward is run in two halves.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        calls: Sequence[chain.Call],
        incoming: Sequence[Link],
        outgoing: Sequence[Link],
        divided: Collection[int],
    ) -> None:
        self.index = index
        self.module = module
        self.incoming = list(incoming)
        self.outgoing = list(outgoing)
        self._calls = list(calls)
        self._wanted = frozenset(name for link in outgoing for name in link.skips) | frozenset(
            name for call in calls for name in call.skips
        )
        self._divided = frozenset(divided)
        self._deferral = deferred.Deferral(module) if divided else None
        self._parameters = list(module.parameters())
        self._tapes: dict[int, _Tape] = {}
        self._looked = False  # at the leaves of a graph
        self._hooks = RemovableHandle.next_id  # of all modules and tensors, that had been registered by then
        self._pending: dict[int, _C.Deferred] = {}

    @property
    def draws(self) -> bool:
        """Whether a layer may draw random numbers, as things stand."""
        return any(call.draws and chain.trains(call.layer) for call in self._calls)

    def refresh(self) -> None:
        """Takes up layers that were added to the stage, or taken from it, and hooks on them, since the last step."""
        if [layer for _, layer in chain.layers_of(self.module)] != [call.layer for call in self._calls]:
            first = self._calls[0].place if self._calls else 0
            skips = {call.name: call.skips for call in self._calls}
            self._calls = chain.calls_of(self.module, first, skips)
            self._parameters = list(self.module.parameters())
        elif self._hooks != RemovableHandle.next_id:
            self._calls = [call._replace(draws=may_draw(call.layer)) for call in self._calls]
        self._hooks = RemovableHandle.next_id

    def forward(
        self,
        microbatch: int,
        inputs: tuple[Any, ...],
        messages: Mapping[int, Any],
        keywords: Mapping[str, Any],
        loaded: Mapping[int, Any],
        draws: Draws | None,
        rows: int,
    ) -> tuple[Any, dict[int, Any]]:
        """The stage's output for one microbatch, and its messages by target stage; its graph is kept.

        Args:
            inputs: positional arguments of the model, for its first stage.
            messages: by source stage.
            keywords: of the step; those that came with a message are added.
            loaded: by target stage, what the first stage hands to it.
            rows: of the microbatch in the model's input; the messages tell it.
        """
        tape = _Tape({}, {}, _C.Deferred() if microbatch in self._divided else None)
        known: dict[str, Any] = {}
        value: Any = inputs
        for link in self.incoming:
            message = messages[link.source]
            output, came = link.open(message, known)
            tape.arrived[link.source] = tensors_of(message)
            if link.output is not None:
                value = output
            if came is not None:
                keywords = came[1]
        if self._calls and tape.pending is None:
            value = chain.run(self._calls, value, known, self._wanted, keywords, draws, microbatch)
        elif self._calls:
            with self._deferring(tape.pending):
                value = chain.run(self._calls, value, known, self._wanted, keywords, draws, microbatch)
        outgoing = {link.target: link.message(value, known, loaded.get(link.target), rows) for link in self.outgoing}
        if torch.is_grad_enabled():
            tape.left = {target: tensors_of(message) for target, message in outgoing.items()}
            self._tapes[microbatch] = tape
        return value, outgoing

    def start_from(
        self, microbatch: int, loss: Loss, output: Any, scale: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """The backward of this microbatch starts from ``scale(loss.weighted)``.

        Raises:
            InvalidArgument: the output has a graph, the loss has none.
        """
        if not torch.is_grad_enabled():
            return
        if not loss.weighted.requires_grad and any(tensor.requires_grad for tensor in tensors_of(output)):
            raise InvalidArgument("loss_fn returned a loss without a graph (detached?): nothing would be trained")
        self._tapes[microbatch].root = scale(loss.weighted)

    def backward(self, microbatch: int, gradients: Mapping[int, MessageGradients]) -> dict[int, MessageGradients]:
        """Accumulates the gradients of parameters and returns those of the messages, by source stage. Of a divided
        backward it is the first half, which leaves the weights' gradients to :meth:`weight_gradients`.

        Args:
            gradients: of the messages that were sent, by target stage.
        """
        tape = self._tapes.pop(microbatch)
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        if tape.root is not None and tape.root.requires_grad:
            roots.append(tape.root)
            seeds.append(torch.ones_like(tape.root))  # each its own: it may become a parameter's .grad
        for target, arrived in gradients.items():
            for output, gradient in zip(tape.left[target], arrived, strict=True):
                if gradient is not None and output.requires_grad:
                    roots.append(output)
                    seeds.append(gradient)
        if roots and not self._looked:
            self._require_own_leaves(roots, tape)
            self._looked = True
        if roots and tape.pending is None:
            run_backward(roots, seeds)
        elif roots:
            with self._deferring(tape.pending, taking=True):
                run_backward(roots, seeds)
        if tape.pending is not None:
            self._pending[microbatch] = tape.pending
        messages = {
            source: [tensor.grad if tensor.requires_grad else None for tensor in leaves]
            for source, leaves in tape.arrived.items()
        }
        # What travels on, and what came, in memory that others may use again: a parameter's .grad may be a view of it.
        passing = [*seeds, *(gradient for each in messages.values() for gradient in each if gradient is not None)]
        own = self._deferral.others if self._deferral is not None and tape.pending is not None else self._parameters
        if _C.are_held_elsewhere(passing):
            _C.own_gradients(own, passing)
        _C.part_gradients(own)
        return messages

    def weight_gradients(self, microbatch: int, done: Callable[[torch.Tensor], None] | None) -> None:
        """The second half of a divided backward; ``done`` is told each parameter that it has finished."""
        self._pending.pop(microbatch).compute(done)

    def clear(self) -> None:
        """Forgets what a failed step left behind."""
        self._tapes.clear()
        self._pending.clear()
        if self._deferral is not None:
            self._deferral.open(None)

    def _require_own_leaves(self, roots: Sequence[torch.Tensor], tape: _Tape) -> None:
        """Raises InvalidArgument for a gradient that nobody would divide or reduce: that of ``loss_fn``'s, say."""
        own = {id(p) for p in self.module.parameters()}
        own |= {id(leaf) for leaves in tape.arrived.values() for leaf in leaves}
        for leaf in leaves_of(roots):
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in own:
                raise InvalidArgument(
                    f"stage {self.index}: a parameter of shape {tuple(leaf.shape)} requires a gradient and is none of "
                    "the stage's layers; is it one of loss_fn? Make it one of a layer, which a "
                    "keyword argument of step() brings the target, or freeze it"
                )

    def _deferring(self, pending: _C.Deferred | None, *, taking: bool = False) -> _Deferring:
        assert self._deferral is not None
        assert pending is not None
        return _Deferring(self._deferral, pending, taking=taking)


def leaves_of(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of the graphs behind ``roots`` that gradients are accumulated for."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        fresh = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= fresh
        nodes.extend(fresh)


def run_backward(roots: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
    """``torch.autograd.backward`` without its preparations in Python, which cost as much as an empty graph; the engine
    itself checks shapes and dtypes of the seeds.
    """
    _engine_run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Deferring:
    """Opens a list for deferred work. In the backward, which is ``taking``, as well: a checkpointed layer runs its
    forward again there.
    """

    __slots__ = ("_deferral", "_pending", "_taking")

    def __init__(self, deferral: deferred.Deferral, pending: _C.Deferred, *, taking: bool) -> None:
        self._deferral = deferral
        self._pending = pending
        self._taking = taking

    def __enter__(self) -> None:
        if self._taking:
            self._pending.taking = True
        self._deferral.open(self._pending)

    def __exit__(self, *_: object) -> None:
        self._deferral.open(None)
        if self._taking:
            self._pending.taking = False
            self._pending.protect(self._deferral.others)
