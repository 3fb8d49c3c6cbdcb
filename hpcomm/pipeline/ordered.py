"""Sums in one order whatever the mesh: a binary tree over the microbatches of the global batch.

Terms number i * 2**k to (i + 1) * 2**k - 1 are summed among themselves before anything else is added to them. So
replicas with 2**k microbatches each have partial sums that occur in the tree of one process, and the tree goes on over
the replicas. Additions are all that an order can change: a microbatch's own gradients do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from hpcomm.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator, Work
    from hpcomm.pipeline.stage import Loss

__all__: list[str] = []

Terms = list["torch.Tensor | None"]  # a tensor for each parameter; None adds nothing


class Tree:
    """Sums ``leaves`` terms, which come in any order. It keeps few of them: with terms in order, one for each level."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._waiting: dict[tuple[int, int], Terms] = {}  # by level and place: for the neighbour
        self._total: Terms | None = None

    def put(self, leaf: int, terms: Terms) -> None:
        """Term number ``leaf``. Its tensors are the tree's from now on."""
        level, place = 0, leaf
        while 1 << level < self._leaves:
            if (place ^ 1) << level < self._leaves:  # else the neighbour is beyond the end
                other = self._waiting.pop((level, place ^ 1), None)
                if other is None:
                    self._waiting[level, place] = terms
                    return
                terms = added(other, terms) if place & 1 else added(terms, other)
            level, place = level + 1, place >> 1
        self._total = terms

    def take(self) -> Terms:
        """The sum; the tree is empty again."""
        total, self._total = self._total, None
        if total is None or self._waiting:
            raise InternalError(f"the sum of {self._leaves} terms was asked for before all had come")
        return total


def added(left: Terms, right: Terms) -> Terms:
    """``left`` + ``right``, in the memory of one of them."""
    with torch.no_grad():
        return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def total_of(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors, which are left as they are."""
    tree = Tree(len(terms))
    for leaf, term in enumerate(terms):
        tree.put(leaf, [term.clone()])
    (total,) = tree.take()
    assert total is not None
    return total


class ReplicaSum:
    """Sums the gradients of some parameters of one dtype over the replicas.

    Every rank gets one slice of all replicas' gradients, sums it, and all gather the sums: as many bytes travel as in
    an all-reduce, and the additions are ours on every transport.
    """

    def __init__(self, lane: Communicator, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._lane = lane
        self._parameters = list(parameters)
        self._slice = -(-sum(p.numel() for p in parameters) // lane.size)
        self._flat: torch.Tensor
        self._received: torch.Tensor
        self._work: Work

    def start(self) -> None:
        """Issues the exchange of slices. A parameter without a gradient counts as zeros."""
        first = self._parameters[0]
        self._flat = torch.zeros(self._lane.size * self._slice, dtype=first.dtype, device=first.device)
        for gradient, place in self._places():
            place.copy_(gradient.reshape(-1))
        self._received = torch.empty_like(self._flat)
        self._work = self._lane.all_to_all(self._received, self._flat, async_op=True)

    def add(self) -> None:
        """Sums this rank's slice and issues the gathering."""
        self._work.wait()
        own = total_of(self._received.view(self._lane.size, self._slice).unbind())
        self._work = self._lane.all_gather(self._flat, own, async_op=True)

    def finish(self, missing: Collection[int]) -> None:
        """Writes the sums into the gradients that there are, and into new ones of the parameters with these ids."""
        self._work.wait()
        for parameter in self._parameters:
            if id(parameter) in missing:
                parameter.grad = torch.empty_like(parameter)
        for gradient, place in self._places():
            gradient.copy_(place.view(gradient.shape))
        del self._flat, self._received, self._work

    def _places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places, begin = [], 0
        for parameter in self._parameters:
            if parameter.grad is not None:
                places.append((parameter.grad, self._flat[begin : begin + parameter.numel()]))
            begin += parameter.numel()
        return places


class OrderedLoss:
    """The loss of the global batch, summed like the gradients.

    Args:
        lane: of all ranks, replica by replica within each stage's.
        replicas: how many.
    """

    def __init__(self, lane: Communicator, replicas: int) -> None:
        self._lane = lane
        self._replicas = replicas
        self._mine: torch.Tensor

    def issue(self, losses: Sequence[Loss], unit: float) -> tuple[torch.Tensor, float]:
        """Sums weighted losses, and weights, of this rank's microbatches.

        Raises:
            InvalidArgument: a weight that is no whole number, whose sums would depend on their order.
        """
        weight = 0.0
        for loss in losses:
            if not (loss.weight * unit).is_integer():
                raise InvalidArgument(
                    f"deterministic=True: loss_fn returned the weight {loss.weight * unit!r}; only whole numbers (of "
                    "samples, of tokens) have the same sum in any order"
                )
            weight += loss.weight
        self._mine = torch.zeros(2, dtype=torch.float64, device=self._lane.device)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device="cpu"), weight
        total = total_of([loss.weighted.double() for loss in losses])
        self._mine[0].copy_(total.reshape(()))
        self._mine[1].fill_(weight)
        return total, weight

    def wait(self) -> torch.Tensor:
        """The loss, as ``StepLoss.wait()`` returns it."""
        everybody = torch.empty(self._lane.size, 2, dtype=torch.float64, device=self._mine.device)
        self._lane.all_gather(everybody, self._mine)
        # All stages but the last have zeros: this sum is exact.
        by_replica = everybody.view(-1, self._replicas, 2).sum(0)
        total, weight = total_of(by_replica.unbind()).unbind()
        return total / weight


def require_ordered(replicas: int, microbatches: int, shared: Sequence[str]) -> None:
    """Raises InvalidArgument where ``deterministic=True`` cannot keep its promise.

    Args:
        shared: parameters that several stages own.
    """
    if replicas > 1 and microbatches & (microbatches - 1):
        raise InvalidArgument(
            f"Pipeline: deterministic=True with dp={replicas} needs a power of two as num_microbatches, not "
            f"{microbatches}: only then do replicas have sums that one process also forms"
        )
    if shared:
        raise InvalidArgument(
            f"Pipeline: deterministic=True, but {shared[0]!r} belongs to several stages, so that its gradients are "
            "summed in an order that depends on the cut; keep its owners in one stage (split_at=)"
        )
