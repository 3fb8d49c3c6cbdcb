"""The wrapper: torch's class, with hpcomm's reducer in the place of torch's wherever the configuration allows."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType

from hpcomm.ddp.attached import install
from hpcomm.ddp.choice import Choice, NativeOptions, Under, choose_lane, choose_reducer, has_sparse
from hpcomm.ddp.countdown import Countdown
from hpcomm.ddp.divided import DividesOptimizer
from hpcomm.ddp.lane import agree_among, backend_name, group_of, lane_of_copy, lane_over, next_wrapper_channel
from hpcomm.ddp.meeting import Attendance, Meeting
from hpcomm.ddp.module import describe_parameters, ignoring, require_initialized, require_on, to_ignore
from hpcomm.ddp.native import NativeReducer
from hpcomm.ddp.parameters import for_reducer, require_nothing_left_out, trained
from hpcomm.ddp.sharded import ShardedParameters
from hpcomm.ddp.sizes import require_cap, sizes_for
from hpcomm.ddp.states import begin_equal, broadcast_all
from hpcomm.ddp.told import Told, told_by
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_StockDDP = torch.nn.parallel.DistributedDataParallel
_STOCK_FORWARD = _StockDDP.forward
_STOCK_SIGNATURE = inspect.signature(_StockDDP.__init__)


class DistributedDataParallel(_StockDDP, DividesOptimizer):
    """``torch.nn.parallel.DistributedDataParallel`` with gradients reduced by hpcomm.

    All arguments of torch's class are accepted, and it is a subclass of it. Buckets are averaged on a lane of their
    own while the backward goes on, without the GIL. What works under it is decided at the first forward outside of
    ``torch.no_grad()`` and printed by ``reduction``: hpcomm's reducer; torch's with hpcomm's communication hook, where
    the configuration needs something that only torch's has; or torch's alone (sparse gradients, hooks of the user,
    parameters on several devices).

    Gradients are views of their buckets. A bucket whose gradients somebody still holds in the next step is left to
    them, so ``.grad`` may be kept, also when the wrapper and its group are gone.

    Parameters that are DTensors, such as those under FSDP2's ``fully_shard``, are left alone: neither broadcast nor
    reduced. What they are averaged over is their mesh's business. But with a ``device_mesh`` that is a part of a larger
    one torch wraps the local tensors of a tensor-parallel module, which are reduced.

    Args:
        module: the same on every rank.
        mesh: replicas are the ranks of ``mesh.dp``. Exclusive with ``process_group``; without either, the default
            process group is used.
        bucket_cap_mb: as torch's, or "auto": from the latency and the bandwidth of the lane, measured once. Without it,
            and with "auto", the gradients that are ready last have a bucket of about 1 MiB where it can be.
        grad_dtype: dtype in which gradients travel, torch.bfloat16 or torch.float16. They are scaled in float32 and
            cast while they are packed. CPU transports sum them in float32 and round once; NCCL sums in ``grad_dtype``
            and rounds at each hop.
        check_finite: an infinity or a NaN in the gradient of a rank raises InvalidArgument on all ranks at the end of
            the backward, with the names of parameter and rank.
        shard_optimizer: gradients are scattered instead of reduced everywhere, ``.grad`` stays None, and the optimizer
            is made by ``make_optimizer``, with state for 1/ranks of the parameters on each rank (ZeRO stage 1).

    Raises:
        SchemaMismatch: replicas differ; the first differing parameter is named, on every rank. Where they became
            different later, before the first step, its backward raises it.
        InvalidArgument: both ``mesh`` and ``process_group``; a module that is not on the mesh's device; ``grad_dtype``
            together with ``shard_optimizer``; one of them or ``check_finite`` in a configuration that needs torch's
            reducer (here, or at the first forward).
    """

    _hpcomm_choice: Choice | None = None
    _hpcomm_log_rate: int | None = None
    # Without a place in the buckets, though they required a gradient when the wrapper was made.
    _hpcomm_frozen: Sequence[tuple[str, torch.nn.Parameter]] = ()
    _hpcomm_lane: Communicator | None = None
    _hpcomm_attendance: Attendance | None = None  # of torch's reducer
    _hpcomm_join: weakref.ref[Any] | None = None  # its hook lives as long as join(), whose configuration torch leaves

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        mesh: Mesh | None = None,
        grad_dtype: torch.dtype | None = None,
        check_finite: bool = False,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs = _STOCK_SIGNATURE.bind_partial(self, module, *args, **kwargs).arguments
        kwargs = {name: value for name, value in kwargs.items() if name not in ("self", "module")}
        process_group: dist.ProcessGroup | None = kwargs.get("process_group")
        bucket_cap_mb: float | str | None = kwargs.get("bucket_cap_mb")
        if mesh is not None and (process_group is not None or kwargs.get("device_mesh") is not None):
            raise InvalidArgument("DistributedDataParallel: pass mesh= or process_group=, not both")
        require_cap(bucket_cap_mb)
        options = NativeOptions(grad_dtype, check_finite, shard_optimizer)
        options.require_possible()
        if mesh is not None:
            require_on(mesh, module)
        group = mesh.group("dp") if mesh is not None else group_of(process_group, kwargs.get("device_mesh"))
        require_initialized(module)
        ignored = to_ignore(module, kwargs.get("device_mesh"))
        delayed = {name for name, _ in kwargs.get("delay_all_reduce_named_params") or ()}
        managed = [
            (name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored | delayed
        ]
        without_lane = choose_lane(managed, has_sparse(module))
        lane = None
        if without_lane is None and managed:
            lane = (
                mesh.lane(mesh.ranks("dp"), "gradient") if mesh is not None else lane_over(group, managed[0][1].device)
            )
            if kwargs.get("init_sync", True):
                agree_among(lane, "model", describe_parameters(module, ignored | delayed))
                if begin_equal(lane, module, ignored, kwargs):
                    kwargs["init_sync"] = False
        if kwargs.get("device_mesh") is None:
            kwargs["process_group"] = group
        if bucket_cap_mb == "auto":
            del kwargs["bucket_cap_mb"]
        with ignoring(module, ignored), told_by(lane, "DistributedDataParallel()"):
            super().__init__(module, **kwargs)
        self._hpcomm_own = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        self._hpcomm_trained = [(name, p) for name, p in self._hpcomm_own if p.requires_grad and name not in delayed]
        self._hpcomm_sizes = sizes_for(bucket_cap_mb, kwargs.get("bucket_cap_mb_list"), lane)
        self._hpcomm_options = options
        self._hpcomm_sharded: ShardedParameters | None = None
        self._hpcomm_lane = lane
        self._hpcomm_channel = 0 if lane is None else next_wrapper_channel(lane)
        self._hpcomm_on_mesh = mesh is not None
        # Of its copies. They are over the default group, so the name says nothing of this one's ranks.
        made_over = "mesh" if mesh is not None or lane is None else lane.name.partition(":")[0]
        self._hpcomm_family = f"/copies of {made_over}.{self._hpcomm_channel}"
        self._hpcomm_last: Countdown | None = None
        if without_lane is not None:
            self._hpcomm_choice = without_lane
        elif not hasattr(self, "reducer"):
            self._hpcomm_choice = Choice(Under.TORCH, "the reduction of all parameters is delayed")
        elif self.__dict__.get("_comm_hooks"):  # mixed_precision registers one
            self._hpcomm_choice = Choice(Under.TORCH, "a communication hook is registered")
        if self._hpcomm_choice is not None:
            options.require_none(self._hpcomm_choice)

    # --- What reduces -------------------------------------------------------------------------------------------------

    @property
    def reduction(self) -> Choice | None:
        """What reduces the gradients and why, for printing; None before the first forward with gradients."""
        return self._hpcomm_choice

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _choose(self) -> None:
        if self._hpcomm_choice is not None:
            return
        parameters = self._named_for_reducer()
        if not parameters and any(self._hpcomm_options):
            return  # in this forward; all are frozen, as a discriminator's may be
        if not parameters:
            self._leave(Choice(Under.TORCH, "no parameter requires a gradient"))
            return
        if self._hpcomm_lane is None:  # a copy, or unpickled
            without_lane = choose_lane(parameters, has_sparse(self.module))
            if without_lane is not None:
                self._leave(without_lane)
                return
            self._hpcomm_lane = lane_of_copy(self.process_group, parameters[0][1].device, self._hpcomm_family)
            self._hpcomm_channel = next_wrapper_channel(self._hpcomm_lane)
        choice = choose_reducer(self)
        if choice.under is Under.NATIVE:
            self.reducer: Any = NativeReducer(
                self.reducer,
                self.logger,
                self._hpcomm_lane,
                self._hpcomm_channel,
                parameters,
                self._hpcomm_sizes,
                self._hpcomm_options,
                find_unused=self.find_unused_parameters,
                bucket_views=self.gradient_as_bucket_view,
                events=self._events(),
            )
            has_place = {id(parameter) for _, parameter in parameters}
            self._hpcomm_frozen = [
                each for each in self._hpcomm_trained if id(each[1]) not in has_place and not each[1].requires_grad
            ]
            if self._hpcomm_log_rate is not None:
                self.reducer._set_ddp_runtime_logging_sample_rate(self._hpcomm_log_rate)
            if self._hpcomm_options.shard_optimizer:
                self._hpcomm_sharded = ShardedParameters(self._hpcomm_lane, self.reducer)
        else:
            self._hpcomm_options.require_none(choice)
            install(self, self._hpcomm_lane, self._events())
            self._tell(choice)
        self._hpcomm_choice = choice

    def _tell(self, choice: Choice) -> None:
        """Ranks that have hpcomm's reducer, and would wait for this one's part."""
        lane = self._hpcomm_lane
        if lane is not None and lane.size > 1:
            meeting = Meeting(lane, self._hpcomm_channel, [str(choice)], lacks_core=False)
            self._hpcomm_attendance = Attendance(meeting, [p for _, p in self._named_for_reducer()], lane.timeout)

    def _named_for_reducer(self) -> list[tuple[str, torch.nn.Parameter]]:
        return for_reducer(self, self._hpcomm_own, self._hpcomm_trained)

    def _events(self) -> str:
        """What the profiler's events are called after: the backend of the group that the caller gave."""
        if self._hpcomm_on_mesh:
            return "hpcomm"
        return backend_name(self.process_group, next(p.device for p in self._module_parameters))

    def _leave(self, choice: Choice) -> None:
        """Torch's reducer from now on, made anew as when a wrapper is unpickled (local)."""
        self._hpcomm_options.require_none(choice)
        before, before_reducer = self._hpcomm_choice, self.__dict__.get("reducer")
        if before is not None and before.under is Under.HOOK and choice.under is Under.HOOK:
            return  # one join() after another: the reducer knows what it has seen
        if before is not None and before.under is not Under.TORCH:
            if isinstance(self.reducer, NativeReducer):
                self.reducer.reset()
            with trained(self._hpcomm_trained if self.find_unused_parameters else ()):  # it has a place for all of them
                parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
                names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
                self._ddp_init_helper(parameters, sparse, names, self.static_graph)  # type: ignore[no-untyped-call]
            # What torch's forward remembers of the reducer before.
            self._has_rebuilt_buckets = False
            self._static_graph_delay_allreduce_enqueued = False
            if self.static_graph:
                self.reducer._set_static_graph()
        if before is None or before.under is not Under.TORCH:
            if choice.under is Under.HOOK and self._hpcomm_lane is not None:
                install(self, self._hpcomm_lane, self._events())
            reduced = isinstance(before_reducer, NativeReducer) and before_reducer.backwards > 0
            if before is None or (before.under is Under.NATIVE and not reduced):
                self._tell(choice)
            self._hpcomm_choice = choice

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's; the given hook replaces hpcomm's reduction. One that torch refuses changes nothing."""
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._leave_for_hook()
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if isinstance(comm_hook_type, BuiltinCommHookType):  # else torch refuses it
            self._leave_for_hook()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]

    def _leave_for_hook(self) -> None:
        if "_hpcomm_last" in self.__dict__:  # else torch's constructor registers one
            self._leave(Choice(Under.TORCH, "a communication hook is registered"))

    def _set_static_graph(self) -> None:
        reducer = self.__dict__.get("reducer")
        if isinstance(reducer, NativeReducer):
            if reducer.backwards > 0:  # in torch's words
                words = "set_static_graph() should be called before training loop starts"
                self._log_and_throw(RuntimeError, words)  # type: ignore[no-untyped-call]
            self._leave(Choice(Under.HOOK, "static_graph was set after the first forward"))
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def _remove_autograd_hooks(self) -> None:
        self._leave(Choice(Under.HOOK, "the hooks of the reducer were removed"))
        super()._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self._leave(Choice(Under.TORCH, "the process group was replaced, and the gradient lane is the old one's"))
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]
        self._hpcomm_lane = None

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        with told_by(self._hpcomm_lane, "broadcast of buffers"):
            if not broadcast_all(self._hpcomm_lane, tensors, authoritative_rank):
                super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, for uneven inputs. A rank that is gone is named; one that is stopped, at the group's time-out."""
        return Told(super().join(*args, **kwargs), self._hpcomm_lane)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        with told_by(self._hpcomm_lane, "join()"):
            return super()._find_common_rank(input_rank, rank_cond)  # type: ignore[no-any-return, no-untyped-call]

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        with told_by(self._hpcomm_lane, "join()"):
            return super()._check_global_requires_backward_grad_sync(is_joined_rank)  # type: ignore[no-untyped-call]

    def join_hook(self, **kwargs: Any) -> Any:
        """As torch's, for uneven inputs; a rank without any input takes part in hpcomm's reductions as well."""
        if self._hpcomm_choice is None or self._hpcomm_choice.under is not Under.TORCH:
            if kwargs.get("divide_by_initial_world_size", True):
                self._leave(Choice(Under.HOOK, "join(): uneven inputs are matched bucket by bucket of torch's reducer"))
            else:
                self._leave(Choice(Under.TORCH, "join() divides by the number of ranks that have inputs left"))
        hook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        self._hpcomm_join = weakref.ref(hook)
        return hook

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in (
            "_hpcomm_lane",
            "_hpcomm_choice",
            "_hpcomm_last",
            "_hpcomm_frozen",
            "_hpcomm_sharded",
            "_hpcomm_attendance",
            "_hpcomm_join",
        ):
            state.pop(name, None)
        return state  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._hpcomm_last = None
        self._hpcomm_sharded = None
        self._hpcomm_on_mesh = False
        self._static_graph_delay_allreduce_enqueued = False  # torch leaves it True, and a copy's first step unreduced
        # A copy has what was hung into the module since, as torch's reducer of it.
        known = {name for name, _ in self._hpcomm_own}
        added = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if name not in known and name not in self.parameters_to_ignore
        ]
        self._hpcomm_own = [*self._hpcomm_own, *added]
        # Copies of one wrapper find each other in the order of their first forwards, not in that of the copying: a rank
        # may have some of its own that it never trains. Copies of two wrappers never take each other's place.
        self._hpcomm_family += "'"

    # --- A step -------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; the first call outside of ``torch.no_grad()`` decides what reduces, see ``reduction``.

        Raises:
            InvalidArgument: made with ``shard_optimizer``, a backward was reduced, and nobody made an optimizer.
        """
        if torch.is_grad_enabled():
            if self._hpcomm_choice is None:  # the call alone takes a microsecond or two
                self._choose()
            if self._hpcomm_frozen:
                require_nothing_left_out(self._hpcomm_frozen)
            if self._hpcomm_sharded is not None:
                self._hpcomm_sharded.require_optimizer()
            if self._hpcomm_attendance is not None:
                self._hpcomm_attendance.look(self.require_backward_grad_sync)
        # An event of the profiler takes longer than the rest of the wrapper.
        seen = torch.autograd._profiler_enabled() or self._delay_all_reduce_all_params  # type: ignore[attr-defined]
        is_stock = _StockDDP.forward is _STOCK_FORWARD  # else somebody has put in his own
        run: Callable[..., Any] = self._forward_unseen if is_stock and not seen else super().forward
        if self._hpcomm_last is None:
            return run(*args, **kwargs)
        self._hpcomm_last.refuse_join(self, self._hpcomm_join)
        with self.no_sync():
            output = run(*args, **kwargs)
        self._hpcomm_last.watch(self, output)
        return output

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _forward_unseen(self, *args: Any, **kwargs: Any) -> Any:
        """What torch's does, without its event "DistributedDataParallel.forward"."""
        args, kwargs = self._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._post_forward(self._run_ddp_forward(*args, **kwargs))  # type: ignore[no-untyped-call]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; with ``shard_optimizer`` reduced gradients that no step took are dropped as well."""
        super().zero_grad(set_to_none)
        if self._hpcomm_sharded is not None:
            self._hpcomm_sharded.drop()

    @contextmanager
    def reduce_on_last(self, backwards: int) -> Iterator[None]:
        """Accumulates in all backwards but the last one of ``backwards``, which reduces.

        Forwards and backwards may come in any order, as in a pipeline; each forward has one backward.

            with model.reduce_on_last(4):
                outputs = [model(x) for x in microbatches]
                for output in reversed(outputs):
                    loss_of(output).backward()

        Raises:
            InvalidArgument: fewer than one; used inside itself; left before the last backward without another error; in
                a forward inside join(); in a backward that is one more.
            RuntimeError: the last backward did not reach all parameters (torch's own error).
        """
        if backwards < 1:
            raise InvalidArgument(f"reduce_on_last({backwards}): at least one backward")
        if self._hpcomm_last is not None:
            raise InvalidArgument("reduce_on_last() inside itself")
        countdown = self._hpcomm_last = Countdown(backwards)
        try:
            yield
        finally:
            self._hpcomm_last = None
            countdown.close()
        countdown.require_all()
        if isinstance(self.reducer, NativeReducer):
            self.reducer.require_finished(expected=True)
        else:
            self.reducer._check_reducer_finalized()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)  # type: ignore[no-untyped-call]
        self._hpcomm_log_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        data = super()._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        reducer = self.__dict__.get("reducer")
        return {**data, **reducer.logged()} if isinstance(reducer, NativeReducer) else data

    # --- Buckets ------------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> int:
        """Number of gradient buckets.

        Raises:
            InvalidArgument: torch's reducer works under this wrapper.
        """
        return len(self._native("buckets").plan.buckets)

    def describe_buckets(self) -> str:
        """One line per bucket in the order in which they are reduced: size and names. Raises as ``buckets``."""
        return self._native("describe_buckets()").describe()

    def start_reduction(self, bucket: int) -> None:
        """Starts to average the gradients of ``bucket`` as they are, after backwards in ``no_sync()``.

        All ranks start the same buckets in the same order. Until ``finish_reduction`` its gradients are the lane's: a
        backward that reaches one of them raises InvalidArgument, and has spoilt it; so does a forward whose backward
        would reduce, which spoils nothing. Raises as ``buckets``, and InvalidArgument for a bucket that does not exist
        or was started and not finished.
        """
        self._native("start_reduction()").start(bucket)

    def finish_reduction(self, bucket: int) -> None:
        """Waits until the gradients of ``bucket`` are averages. Raises as ``start_reduction`` and what went wrong.

        After Ctrl-C the next call waits on.
        """
        self._native("finish_reduction()").finish(bucket)

    def _native(self, what: str) -> NativeReducer:
        self._choose()
        if not isinstance(self.reducer, NativeReducer):
            raise InvalidArgument(f"{what} needs hpcomm's reducer; here works {self._hpcomm_choice}")
        return self.reducer
