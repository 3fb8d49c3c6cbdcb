"""An optimizer whose state is divided by the ranks (ZeRO stage 1): each steps its slice of every bucket.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.ddp.sharded_state import Member, copied, gather, mark, scatter
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.ddp.native import NativeReducer

__all__: list[str] = []

_LINE = 64  # bytes
_GIVE = "_hpcomm_give_gradients"  # of an optimizer that make() made
_TAKE = "_hpcomm_take_gradients"
_MEMBERS = "_hpcomm_members"  # of the same: its whole parameters, by group

# Of torch's: they look at a parameter's shape or norm, or at all of them. Others may as well, which nobody can tell.
_WHOLE = tuple(getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, name))


@dataclass
class _Shard:
    """Where a parameter lies, this rank's piece of it, and how far it was stepped."""

    name: str
    index: int  # of the parameter, in the reducer
    bucket: int
    place: int  # of its first element, in the bucket
    piece: torch.nn.Parameter | None  # a leaf of one dimension; None where this rank owns nothing of it
    first: int  # element of the piece, in the bucket
    # What the parameter was made: a view of its place, where that lies, and its strides.
    view: torch.Tensor
    address: int
    strides: tuple[int, ...]
    # How many reductions of the bucket were stepped or dropped. Each parameter counts by itself: optimizers over
    # different ones need not step equally often, and a new one goes on where another ended.
    taken: int = 0
    stepped_by: weakref.ref[torch.optim.Optimizer] | None = None  # since the last reduction

    def take(self, reduced: int, stepped_by: torch.optim.Optimizer | None) -> None:
        """The gradient of reduction number ``reduced``, and of those before it, is stepped, or never will be."""
        self.taken = reduced
        self.stepped_by = None if stepped_by is None else weakref.ref(stepped_by)
        if self.piece is not None:
            self.piece.grad = None  # so that nobody holds the bucket in the next step


def give_gradients(optimizer: torch.optim.Optimizer) -> None:
    """What looks at gradients before ``step()``, as a loss scaler does, finds them in an optimizer that
    :meth:`ShardedParameters.make` made; nothing for any other optimizer.

    Raises:
        InvalidArgument: several backwards were reduced since the last step.
    """
    give = getattr(optimizer, _GIVE, None)
    if give is not None:
        give()


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :meth:`ShardedParameters.make` made it, for several ranks."""
    return hasattr(optimizer, _TAKE)


def take_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The gradients that such an optimizer has will not be stepped: a loss scaler has found infinities in them."""
    getattr(optimizer, _TAKE)()


class ShardedParameters:
    """The parameters of a wrapper, moved into memory with the places of their gradient buckets.

    Rank r owns part r of each bucket. Where a parameter crosses the border of two parts, each rank has a piece of it.
    """

    def __init__(self, lane: Communicator, reducer: NativeReducer) -> None:
        self._lane = lane
        self._reducer = reducer
        self._parameters = [parameter for _, parameter in reducer.parameters]
        self._names = {id(parameter): name for name, parameter in reducer.parameters}
        self._flats: list[torch.Tensor] = []
        self._shards: dict[int, _Shard] = {}  # by id of the parameter; none where nothing is divided
        self._steps = False  # an optimizer was made
        if lane.size == 1:  # nothing is reduced, either
            return
        self._require_own_memory()
        for bucket, indices in enumerate(reducer.plan.buckets):
            self._move(bucket, indices)

    def _require_own_memory(self) -> None:
        """Parameters that share memory would be moved apart, and trained apart. Columns of one tensor may alternate."""
        entangled: list[list[torch.nn.Parameter]] = []
        end = 0
        for parameter in sorted((p for p in self._parameters if p.numel() > 0), key=torch.Tensor.data_ptr):
            if parameter.data_ptr() >= end:
                entangled.append([])
            entangled[-1].append(parameter)
            end = max(end, parameter.data_ptr() + _extent(parameter))
        for group in entangled:
            if len(group) > 1 and (pair := _overlapping(group)) is not None:
                first, second = (self._names[id(parameter)] for parameter in pair)
                raise InvalidArgument(
                    f"parameters {first} and {second} lie in the same memory, which shard_optimizer would move apart: "
                    "use one torch.nn.Parameter in both places"
                )

    def _move(self, bucket: int, indices: Sequence[int]) -> None:
        """Moves the parameters of a bucket."""
        members = [self._parameters[index] for index in indices]
        dtype = members[0].dtype.to_real()  # complex numbers lie in it as pairs, as in the bucket of gradients
        # As the reducer pads: to equal parts on cache lines.
        grain = _LINE * self._lane.size
        count = -(-self._reducer.plan.bytes[bucket] // grain) * grain // dtype.itemsize
        flat = self._lane.allocate([count], dtype).zero_()
        self._flats.append(flat)
        for index, parameter, offset in zip(indices, members, _C.Layout(members).offsets, strict=True):
            whole = flat.view(parameter.dtype)  # in which its places count; cache lines hold whole ones
            each = whole.numel() // self._lane.size
            begin, end = self._lane.rank * each, (self._lane.rank + 1) * each
            place = offset // parameter.dtype.itemsize
            view = whole.as_strided(parameter.shape, _dense_strides(parameter), place)
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view
            first, last = max(place, begin), min(place + parameter.numel(), end)
            piece = torch.nn.Parameter(whole[first:last]) if first < last else None
            name = self._names[id(parameter)]
            self._shards[id(parameter)] = _Shard(
                name, index, bucket, place, piece, first, view, view.data_ptr(), view.stride()
            )

    def make(
        self, optimizer: type[torch.optim.Optimizer], parameters: Iterable[Any], **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer over this rank's pieces of ``parameters``, which may be groups as torch's optimizers take them.

        Its ``step()`` is collective: it takes the reduced gradients, and gathers the parameters afterwards.
        """
        if issubclass(optimizer, _WHOLE):
            raise InvalidArgument(
                f"a sharded optimizer steps pieces of parameters, and {optimizer.__name__} needs whole ones; one that "
                "treats each number by itself, such as SGD, Adam, AdamW or RMSprop, works"
            )
        self._steps = True
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        whole = [_listed(group) for group in groups]
        stepped: list[torch.nn.Parameter] = []
        for group in whole:
            its = self._members_of(group)
            _require_once(stepped, its)
            stepped += its
        if self._lane.size == 1:
            return self._undivided(optimizer(whole, **options))
        made = optimizer([self._divided(group) for group in whole], **options)
        alive = weakref.ref(made)  # a circle would keep a deleted optimizer, and its state, until a collection
        members = [self._described(group) for group in whole]

        def drop(set_to_none: bool = True) -> None:
            if (myself := alive()) is not None:
                type(myself).zero_grad(myself, set_to_none)
            self._take(stepped)
            for parameter in stepped:
                parameter.grad = None  # what no_sync() accumulated, and nobody has reduced yet

        def add(param_group: dict[str, Any]) -> None:
            group = _listed(param_group)
            its = self._members_of(group)
            _require_once(stepped, its)
            if (myself := alive()) is not None:
                type(myself).add_param_group(myself, self._divided(group))
            stepped.extend(its)
            members.append(self._described(group))

        def refuse(_: object) -> None:
            raise InvalidArgument(
                "a copy of a sharded optimizer would step nothing: make another one by make_optimizer(), and give it "
                "the state by gather_optimizer_state() and load_optimizer_state()"
            )

        # To torch's type these are methods.
        setattr(made, "zero_grad", drop)  # noqa: B010
        setattr(made, "add_param_group", add)  # noqa: B010
        setattr(made, "__deepcopy__", refuse)  # noqa: B010
        setattr(made, _GIVE, lambda: self._give_gradients(stepped))
        setattr(made, _TAKE, lambda: self._take(stepped))
        setattr(made, _MEMBERS, members)
        mark(self._lane, made, members)
        made.register_step_pre_hook(lambda own, args, kwargs: self._before_step(own, stepped, args, kwargs))
        made.register_step_post_hook(lambda own, *_: self._after_step(own, stepped))
        return made

    def _members_of(self, group: dict[str, Any]) -> list[torch.nn.Parameter]:
        """The whole parameters of a group."""
        members = [parameter for _, parameter in _named(group)]
        for parameter in members:
            if id(parameter) not in self._names and getattr(parameter, "requires_grad", True):
                raise InvalidArgument(
                    "a sharded optimizer steps parameters of its wrapper that required a gradient in the first forward "
                    f"or make_optimizer(); this one is none of them: {_description(parameter)}"
                )
        return members

    def _divided(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's pieces in the place of the parameters."""
        named = _named(group)
        shards = [(name, self._shards[id(p)]) for name, p in named if id(p) in self._shards]
        pieces = [(name, shard.piece) for name, shard in shards if shard.piece is not None]
        # A rank may own nothing of a group; what schedules its options finds all groups everywhere.
        pieces = pieces or [(named[0][0] if named else None, torch.nn.Parameter(torch.zeros(0, device="cpu")))]
        return {**group, "params": [piece if name is None else (name, piece) for name, piece in pieces]}

    @staticmethod
    def _undivided(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Alone, backwards leave ``.grad``; after a step it is None as on many ranks."""
        setattr(made, _MEMBERS, [])
        made.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())
        return made

    def _described(self, group: dict[str, Any]) -> list[Member]:
        return [self._member(name, parameter) for name, parameter in _named(group)]

    def _member(self, name: str | None, parameter: torch.nn.Parameter) -> Member:
        shard = self._shards.get(id(parameter))
        if shard is None:  # frozen: nobody has a piece, and a checkpoint has its number
            return Member(name, parameter, -1, 0, 0, None, 0)
        numbers = self._flats[shard.bucket].nbytes // parameter.dtype.itemsize
        first = 0 if shard.piece is None else shard.first
        return Member(name, parameter, shard.bucket, numbers, shard.place, shard.piece, first)

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What ``state_dict()`` of an optimizer over the whole parameters would be (collective)."""
        members = self._members(optimizer)
        if self._lane.size == 1:
            return copied(optimizer.state_dict())
        return gather(self._lane, optimizer, members)

    def load_whole_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's part of that."""
        members = self._members(optimizer)
        if self._lane.size == 1:
            optimizer.load_state_dict(copied(state))
        else:
            scatter(optimizer, members, state)

    def norms(self, norm_type: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The norm of each parameter's gradient, with the same bits on all ranks, 0 where there is none, in float32, or
        float64 where there are parameters of it or of pairs of it; and this rank's parts of the gradients (collective).
        """
        wide = any(parameter.dtype.to_real() == torch.float64 for parameter in self._parameters)
        dtype = torch.float64 if wide else torch.float32
        if self._lane.size == 1:
            norms = torch.zeros(len(self._parameters), dtype=dtype, device=self._lane.device)
            for place, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    norms[place] = torch.linalg.vector_norm(parameter.grad, norm_type)
            return norms, [p.grad for p in self._parameters if p.grad is not None]
        self._give_gradients(self._parameters)
        powers = torch.zeros(len(self._parameters), dtype=torch.float64, device=self._lane.device)
        gradients = []
        for shard in self._divided_of(self._parameters):
            if shard.piece is not None and shard.piece.grad is not None:
                gradients.append(shard.piece.grad)
                norm = torch.linalg.vector_norm(shard.piece.grad, norm_type).double()
                powers[shard.index] = norm if math.isinf(norm_type) else norm**norm_type
        self._lane.all_reduce(powers, "max" if math.isinf(norm_type) else "sum")
        return (powers if math.isinf(norm_type) else powers ** (1 / norm_type)).to(dtype), gradients

    @staticmethod
    def _members(optimizer: torch.optim.Optimizer) -> list[list[Member]]:
        members: list[list[Member]] | None = getattr(optimizer, _MEMBERS, None)
        if members is None:
            raise InvalidArgument("the optimizer was not made by make_optimizer()")
        return members

    def require_optimizer(self) -> None:
        """Raises InvalidArgument where backwards were reduced and nobody can step their gradients."""
        if not self._steps and self._reducer.backwards > 0 and self._lane.size > 1:
            raise InvalidArgument(
                "DistributedDataParallel: with shard_optimizer=True gradients are scattered and .grad stays None, so "
                "another optimizer would train nothing: make one by make_optimizer()"
            )

    def drop(self) -> None:
        """The gradients that were reduced so far count no more."""
        self._take(self._parameters)

    def _reduced(self) -> Callable[[int], int]:
        """Tells how often a bucket has been reduced so far, by backwards or by hand."""
        backwards, by_hand = self._reducer.backwards, self._reducer.reductions_by_hand
        return lambda bucket: backwards + by_hand.get(bucket, 0)

    def _take(self, mine: Iterable[torch.nn.Parameter], stepped_by: torch.optim.Optimizer | None = None) -> None:
        """The gradients of these parameters that were reduced so far are stepped, or never will be."""
        reduced = self._reduced()
        for shard in self._divided_of(mine):
            shard.take(reduced(shard.bucket), stepped_by)

    def _divided_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[_Shard]:
        """Those of ``parameters``, without the frozen ones; none where this rank is alone."""
        return [self._shards[id(parameter)] for parameter in parameters if id(parameter) in self._shards]

    def _before_step(
        self,
        optimizer: torch.optim.Optimizer,
        mine: list[torch.nn.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._require_steppable(mine, None if closure is not None else optimizer)
        if closure is None:
            self._give_gradients(mine)
            return args, kwargs
        # Its backward makes the gradients of this step.
        closure = self._giving(closure, mine)
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _require_steppable(self, mine: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        """Takes back what a program has given other memory, and raises InvalidArgument where a step would be lost.

        Args:
            optimizer: that steps the gradients which are there; None where a closure makes them first.
        """
        reduced = self._reduced()
        for parameter in mine:
            shard = self._shards.get(id(parameter))
            if shard is None:
                if parameter.grad is not None:
                    raise InvalidArgument(
                        f"a parameter that was frozen when it was wrapped has a gradient, which nobody reduces "
                        f"({_description(parameter)}): wrap the model after its layers are unfrozen"
                    )
                continue
            _take_back(parameter, shard)
            other = None if shard.stepped_by is None else shard.stepped_by()
            if optimizer is not None and other not in (None, optimizer) and reduced(shard.bucket) == shard.taken:
                raise InvalidArgument(
                    f"the gradient of {shard.name} was stepped by another optimizer of this wrapper, which "
                    "has taken it: give each parameter to one of them"
                )

    def _giving(self, closure: Callable[[], Any], mine: list[torch.nn.Parameter]) -> Callable[[], Any]:
        def closed() -> Any:
            loss = closure()
            self._give_gradients(mine)
            return loss

        return closed

    def _give_gradients(self, mine: Iterable[torch.nn.Parameter]) -> None:
        reduced = self._reduced()
        shards = self._divided_of(mine)
        most = max((reduced(shard.bucket) - shard.taken for shard in shards), default=0)
        if most > 1:  # a bucket holds the last one's; all ranks count alike, also where they own no piece
            raise InvalidArgument(
                f"{most} backwards were reduced since the last step or zero_grad() of these parameters, and "
                "with shard_optimizer=True only the last one's gradients are left: accumulate in no_sync() and reduce "
                "once, or add up the losses. (zero_grad() of the wrapper or of its optimizer counts; that of the "
                "module inside is not seen)"
            )
        used = self._reducer.used_by()
        for shard in shards:
            if shard.piece is None:
                continue
            # A bucket keeps what was stepped or dropped: that is no gradient any more. Nor is what no rank has used: a
            # step with zeros would decay it, and go on with its momentum.
            is_fresh = reduced(shard.bucket) > shard.taken
            is_used = used is None or used[shard.index] > 0
            gradients = self._reducer.gradients_of(shard.bucket) if is_fresh and is_used else None
            last = shard.first + shard.piece.numel()
            shard.piece.grad = None if gradients is None else gradients.view(shard.piece.dtype)[shard.first : last]

    def _after_step(self, optimizer: torch.optim.Optimizer, mine: list[torch.nn.Parameter]) -> None:
        """Gathers what the ranks have stepped."""
        self._take(mine, stepped_by=optimizer)
        for flat in self._flats:
            each = flat.numel() // self._lane.size
            begin = self._lane.rank * each
            self._lane.all_gather(flat, flat[begin : begin + each])


def _take_back(parameter: torch.nn.Parameter, shard: _Shard) -> None:
    """Where a program has set ``.data`` its numbers count, as torch's optimizers would go on with them."""
    view = shard.view
    if parameter.data_ptr() == shard.address and parameter.stride() == shard.strides:
        return
    kind = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    if kind != (view.shape, shard.strides, view.dtype, view.device):
        raise InvalidArgument(
            f"{shard.name} is {_description(parameter)}, and was {_description(view)} in the "
            "first forward: convert the model before it is wrapped"
        )
    with torch.no_grad():
        view.copy_(parameter)
    parameter.data = view


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first number to its last one, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _overlapping(tensors: list[torch.nn.Parameter]) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Two of them that have a number in the same place; None where they only alternate."""
    begin = tensors[0].data_ptr()
    taken = torch.zeros(max(t.data_ptr() + _extent(t) for t in tensors) - begin, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        each = tensor.dtype.itemsize
        strides = [stride * each for stride in tensor.stride()]
        return taken.as_strided((*tensor.shape, each), (*strides, 1), tensor.data_ptr() - begin)

    for number, tensor in enumerate(tensors):
        if bool(bytes_of(tensor).any()):
            taken.zero_()
            bytes_of(tensor).fill_(True)
            return next((other, tensor) for other in tensors[:number] if bool(bytes_of(other).any()))
        bytes_of(tensor).fill_(True)
    return None


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own, or those of a contiguous tensor where it has holes: as torch lays out gradients."""
    step = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s != 1):
        if stride != step:
            return torch.empty(tensor.shape, device="meta").stride()
        step *= size
    return tensor.stride()


def _description(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """A group as torch's optimizers take it, of one or several parameters or pairs of names and them, with a list."""
    given = group["params"]
    return {**group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}


def _named(group: dict[str, Any]) -> list[tuple[str | None, torch.nn.Parameter]]:
    """The parameters of a group that is :func:`_listed`, with the names that came with them."""
    return [each if isinstance(each, tuple) else (None, each) for each in group["params"]]


def _require_once(known: list[torch.nn.Parameter], more: list[torch.nn.Parameter]) -> None:
    """In torch's words, and on every rank: those that own no piece of the parameter would not see it."""
    if not {id(parameter) for parameter in known}.isdisjoint(map(id, more)):
        raise ValueError("some parameters appear in more than one parameter group")
