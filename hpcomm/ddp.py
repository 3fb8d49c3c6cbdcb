"""DistributedDataParallel: torch's wrapper with hpcomm's reduction under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hpcomm import _C
from hpcomm.communicator import agree, default_timeout, first_communicator, start_control
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_StockDDP = torch.nn.parallel.DistributedDataParallel


def describe_parameters(module: torch.nn.Module) -> list[str]:
    """One line per parameter: what all replicas must agree on."""
    return [f"{name} {tuple(p.shape)} {p.dtype} grad={p.requires_grad}" for name, p in module.named_parameters()]


class DistributedDataParallel(_StockDDP):
    """``torch.nn.parallel.DistributedDataParallel`` with gradients reduced by hpcomm's communicator.

    All arguments of torch's class are accepted, and it is a subclass of it. Buckets are averaged on a lane of their
    own while the backward goes on, without the GIL. A hook that the user registers takes precedence.

    Args:
        module: the same on every rank, all of it on one device (that of the mesh, when there is one).
        mesh: replicas are the ranks of ``mesh.dp``. Exclusive with ``process_group``; without either, the default
            process group is used.

    Raises:
        SchemaMismatch: replicas differ; the first differing parameter is named, on every rank.
        InvalidArgument: both ``mesh`` and ``process_group``, or parameters on several devices or on another than the
            mesh's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        mesh: Mesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if mesh is not None and process_group is not None:
            raise InvalidArgument("DistributedDataParallel: pass mesh= or process_group=, not both")
        device = device_of(module)
        if mesh is not None and device != mesh.device:
            raise InvalidArgument(
                f"DistributedDataParallel: the module is on {device}, the mesh on {mesh.device}; "
                "move it with module.to(mesh.device)"
            )
        group = mesh.group("dp") if mesh is not None else process_group or dist.group.WORLD
        if group is None:
            raise InvalidArgument("DistributedDataParallel: call hpcomm.init() first and pass mesh=")
        lane = mesh.lane(mesh.ranks("dp"), "gradient") if mesh is not None else _lane_over(group, device)
        agree_among(lane, "model", describe_parameters(module))
        super().__init__(module, *args, process_group=group, **kwargs)  # type: ignore[misc]
        self._hpcomm_lane: Communicator | None = lane

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; the first call puts hpcomm's reduction in place unless the user registered a hook."""
        self._install_reduction()
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, for uneven inputs; a rank without any input takes part in hpcomm's reductions as well."""
        self._install_reduction()
        return super().join(*args, **kwargs)

    def _install_reduction(self) -> None:
        if self._hpcomm_lane is not None:
            _install(self, self._hpcomm_lane)
            self._hpcomm_lane = None

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's; the given hook replaces hpcomm's reduction."""
        super().register_comm_hook(state, hook)
        self._hpcomm_lane = None


def attach(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Puts hpcomm's reduction under an existing stock DDP object (collective over its group).

    Raises:
        InvalidArgument: not a DDP object, or its parameters are on several devices.
        RuntimeError: it has a communication hook already (torch's own error).
    """
    if not isinstance(ddp, _StockDDP):
        raise InvalidArgument(f"attach() takes a DistributedDataParallel, got {type(ddp).__name__}")
    _install(ddp, _lane_over(ddp.process_group, device_of(ddp)))


def agree_among(lane: Communicator, topic: str, lines: list[str]) -> None:
    """:func:`hpcomm.communicator.agree` over the ranks of a communicator (collective)."""
    agree(lane.control, topic, lines, ranks=lane.ranks, timeout=lane.timeout)


def _install(ddp: torch.nn.parallel.DistributedDataParallel, lane: Communicator) -> None:
    if lane.size > 1:
        _C.register_ddp_hook(ddp.reducer, lane)


def device_of(module: torch.nn.Module) -> torch.device:
    """Where all parameters of ``module`` are; the CPU for a module without any.

    Raises:
        InvalidArgument: they are on several devices, or on one that is neither a CPU nor a GPU of CUDA.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters():
        if parameter.device.type not in {"cpu", "cuda"}:
            raise InvalidArgument(f"parameter {name} is on {parameter.device}: hpcomm reduces CPU and CUDA gradients")
        if first is None:
            first = (name, parameter.device)
        elif parameter.device != first[1]:
            raise InvalidArgument(
                f"parameter {first[0]} is on {first[1]}, parameter {name} on {parameter.device}: "
                "hpcomm reduces the gradients of one device; wrap the parts of the model one by one"
            )
    return torch.device("cpu") if first is None else first[1]


def _lane_over(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """A gradient lane for any ProcessGroup: a Control and a communicator of its own, found through its store."""
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    generation = PrefixStore("hpcomm/ddp", group.get_group_store()).add(f"{rank}", 1)
    store = PrefixStore(f"hpcomm/ddp/{generation}", group.get_group_store())
    timeout = default_timeout()
    control = start_control(store, rank, size, timeout=timeout)
    return first_communicator(
        store,
        control,
        range(size),
        name=f"ddp{generation}:{ranks}",
        lane="gradient",
        timeout=timeout,
        device=device,
    )
