"""NativeReducer: hpcomm's reducer in the place of torch's, under the names that torch's wrapper calls it by."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.control_channels import ControlChannel
from hpcomm.ddp.choice import NativeOptions, Under
from hpcomm.ddp.lane import order_channel, said_by_first
from hpcomm.ddp.meeting import Meeting
from hpcomm.ddp.sizes import MIB
from hpcomm.ddp.steplog import StepLog
from hpcomm.errors import HpcommError, InvalidArgument

if TYPE_CHECKING:
    from torch._C import _distributed_c10d as c10d

    from hpcomm._C import BucketPlan, Communicator
    from hpcomm.ddp.sizes import BucketSizes

__all__: list[str] = []

# In torch's words, for who searches for them; by find_unused_parameters.
_ADVICE = {
    False: "This error indicates that your module has parameters that were not used in producing loss. You can enable "
    "unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
    "`torch.nn.parallel.DistributedDataParallel`, and by making sure all `forward` function outputs participate in "
    "calculating loss.",
    True: "Since `find_unused_parameters=True` is enabled, this likely means that not all `forward` outputs "
    "participate in computing loss. You can fix this by making sure all `forward` function outputs participate in "
    "calculating loss.",
}
_DEBUG = (
    "Torch's own reducer (HPCOMM_DDP_REDUCER=torch) can tell more when you set the environment variable "
    "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
)


class NativeReducer:
    """Reduces gradients bucket by bucket; what torch's Reducer does besides is left to torch's object.

    That object keeps the log and its description of the first buckets; its hooks are off and its buckets have no
    memory. All ranks make one for a wrapper, each when it comes to it.

    Args:
        stock, logger: torch's Reducer of the wrapper, and its log.
        lane: the gradient lane.
        channel: of Control, see ``next_wrapper_channel``.
        events: the profiler's events are called ``events:all_reduce`` and the like.
        named_parameters: in the order of torch's Reducer.
    """

    def __init__(
        self,
        stock: c10d.Reducer,
        logger: c10d.Logger | None,
        lane: Communicator,
        channel: int,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sizes: BucketSizes,
        options: NativeOptions,
        *,
        find_unused: bool,
        bucket_views: bool,
        events: str,
    ) -> None:
        shard = options.shard_optimizer and lane.size > 1
        self._stock = stock
        self._logger = logger
        self._find_unused = find_unused
        self._lane = lane
        self._order_channel = order_channel(channel)
        self._order: dict[int, bytes] = {}  # that rank 0 told
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        modules: dict[str, int] = {}
        self._modules = [modules.setdefault(name.rpartition(".")[0], len(modules)) for name in self._names]
        self._wire = options.grad_dtype
        self._events = events
        # The order in which a backward makes gradients ready, as long as nobody has seen one: the model's, reversed.
        order = list(range(len(self._parameters)))[::-1]
        self._limits = sizes.limits(self._parameters)
        self._last_bytes = sizes.last_bytes
        stock._remove_autograd_hooks()
        _C.release_bucket_memory(stock, self._parameters)
        self._native = _C.DdpReducer(
            lane,
            self._parameters,
            self._names,
            order,
            self._limits,
            last_bytes=self._last_bytes,
            wire=self._wire,
            modules=self._modules,
            find_unused=find_unused,
            bucket_views=bucket_views,
            shard=shard,
            check_finite=options.check_finite,
            number=channel - ControlChannel.WRAPPER,
            events=events,
            logger=logger,
        )
        # With unused parameters the order differs from step to step, and torch does not learn it either.
        # A sharded optimizer has pieces of the buckets as they are.
        self._learns = not find_unused and not shard and lane.size > 1
        self._log = StepLog(self._native)
        self._buckets = len(self._native.plan.buckets)
        self._rebuilt: dict[str, int | str] = {}
        self._by_hand: collections.Counter[int] = collections.Counter()  # of a bucket, in start() and finish()
        if lane.size > 1:
            alike = [
                Under.NATIVE.value,
                f"find_unused_parameters={find_unused} shard_optimizer={shard} check_finite={options.check_finite}",
                *self._described(),
            ]
            # Casts are packed on the lane, which had better begin early.
            lacks_core = self._wire is None and self._native.lacks_core
            self._native.meet(Meeting(lane, channel, alike, lacks_core).hear)

    def _described(self) -> list[str]:
        """The buckets and what lies in them: the same on all ranks."""
        return [
            f"bucket_cap_mb={[limit / MIB for limit in self._limits]}",
            f"last bucket of {self._last_bytes} bytes",
            f"grad_dtype={self._wire}",
            *(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.parameters),
            f"no more parameters, and buckets of hash {self._native.plan.hash}",
        ]

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: torch's log, and what debuggers ask.
        return getattr(self._stock, name)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """The next backward reduces."""
        try:
            self._native.prepare(outputs)
        except HpcommError:  # not of a reduction that is unfinished
            raise
        except RuntimeError as error:
            raise self._advised(error) from error

    def require_finished(self, expected: bool = False) -> None:
        """Raises RuntimeError, in torch's words, where a reduction has begun and parameters are missing.

        Args:
            expected: the last backward was to reduce, and it is an error that it reached no parameter at all.
        """
        try:
            self._native.require_finished(expected)
        except RuntimeError as error:
            raise self._advised(error) from error

    def _advised(self, error: RuntimeError) -> RuntimeError:
        message = f"{error}\n{_ADVICE[self._find_unused]}\n{_DEBUG}"
        if self._logger is not None:
            self._logger.set_error_and_log(message)
        return RuntimeError(message)

    def prepare_for_forward(self) -> None:
        """A forward that will be reduced begins."""
        self._log.begin()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._log.rate = rate

    def logged(self) -> dict[str, int | str]:
        """What torch's log has of a step (times in nanoseconds) and of the buckets that were rebuilt."""
        return {**self._log.data, **self._rebuilt, "num_buckets_reduced": self._native.counts["issued"]}

    def _ddp_graph_static(self) -> bool:
        return self._native.graph_static()

    @property
    def backwards(self) -> int:
        """That reduced."""
        return self._native.stats[0]

    def _get_local_used_map(self) -> torch.Tensor:
        return self._native.used_by()

    def _rebuild_buckets(self) -> bool:
        """Once, after the first whole backward: buckets in the order that rank 0 saw.

        Rank 0 waits for nobody: the forwards of several wrappers may run in another order on another rank.

        Called in each forward with gradients, and as torch's it looks there whether the last reduction has ended: in
        no_sync() nobody else does, and the backward of that forward would complete it.
        """
        self.require_finished()
        self._native.renew_hooks()
        return self._learns and bool(self._learn_order())

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _learn_order(self) -> bool:
        if not self._native.ready_order():
            return False
        seen = self._native.ready_order()
        body = json.dumps(seen).encode()
        # As torch's reducer does, though it goes through Control: a rank that dies is named.
        with torch.profiler.record_function(f"{self._events}:broadcast"):
            order = json.loads(said_by_first(self._lane, self._order_channel, body, self._order))
        plan = _C.ddp_bucket_plan(self._parameters, order, self._limits, self._last_bytes, self._wire, self._modules)
        if plan.hash != self._native.plan.hash:  # alike on all ranks: both are functions of what rank 0 saw
            self._native.replan(plan)
            self._buckets = len(plan.buckets)
        self._rebuilt = self._log_of(plan, seen)
        self._learns = False
        return True

    def _log_of(self, plan: BucketPlan, seen: list[int]) -> dict[str, int | str]:
        """Rebuilt buckets, and the order that this rank saw, as torch's log writes them."""
        sizes = [p.numel() * p.element_size() for p in self._parameters]
        return {
            "has_rebuilt_buckets": 1,
            "rebuilt_bucket_sizes": ", ".join(str(sum(sizes[i] for i in params)) for params in plan.buckets),
            "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, params)) for params in plan.buckets),
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, seen)),
        }

    def _check_reducer_finalized(self) -> None:
        self.require_finished()

    def start(self, bucket: int) -> None:
        """Reduces one bucket of the gradients as they are, without a backward."""
        self._native.start(self._require_bucket("start_reduction", bucket))

    def finish(self, bucket: int) -> None:
        """Waits for a bucket that was started."""
        self._native.finish(self._require_bucket("finish_reduction", bucket))
        self._by_hand[bucket] += 1

    def _require_bucket(self, what: str, bucket: int) -> int:
        if isinstance(bucket, bool) or not isinstance(bucket, int) or not 0 <= bucket < self._buckets:
            raise InvalidArgument(f"{what}({bucket!r}): buckets are the integers from 0 to {self._buckets - 1}")
        return bucket

    def reset(self) -> None:
        """Drops what was begun.

        Raises:
            InvalidArgument: with ``find_unused_parameters``: it knows which parameters backwards in no_sync() have
                reached, and the reducer that comes after it would take these for unused.
        """
        if self._native.has_accumulated():
            raise InvalidArgument(
                "DistributedDataParallel: a hook, join() or static_graph would change the reducer between a backward "
                "in no_sync() and the one that reduces; with find_unused_parameters=True call it before both"
            )
        self._native.reset()

    @property
    def counts(self) -> dict[str, int]:
        """Buckets issued in the last backward; gradients packed, copied back, reduced in place; buckets allocated."""
        return self._native.counts

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in the order in which they are reduced."""
        return self._native.plan

    @property
    def reductions_by_hand(self) -> Mapping[int, int]:
        """How often buckets were reduced by start() and finish(); the others never were."""
        return self._by_hand

    @property
    def parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Those that it reduces, with their names, in the order of the buckets' numbers."""
        return list(zip(self._names, self._parameters, strict=True))

    def used_by(self) -> list[int] | None:
        """How many ranks had a gradient for each parameter when it was reduced last, with a sharded optimizer by hand
        as well; None without ``find_unused_parameters``, where a missing gradient counts as zeros.
        """
        return self._native.used_by().tolist() if self._find_unused else None

    def gradients_of(self, bucket: int) -> torch.Tensor | None:
        """The memory of a bucket, padding included; None before the first step."""
        return self._native.memory(bucket)

    def describe(self) -> str:
        """One line per bucket, with the names of its parameters."""
        plan = self._native.plan
        lines = []
        for index, (params, size) in enumerate(zip(plan.buckets, plan.bytes, strict=True)):
            names = ", ".join(self._names[param] for param in params)
            lines.append(f"bucket {index} | {size / 2**20:.2f} MiB | {len(params)} gradients | {names}")
        return "\n".join(lines)
