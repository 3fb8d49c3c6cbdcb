"""The Pipeline that users hold: construction, steps, parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.channel import require_schema
from hpcomm.communicator import agree
from hpcomm.ddp import describe_parameters
from hpcomm.errors import InvalidArgument, SchemaMismatch
from hpcomm.mesh import describe
from hpcomm.pipeline.partition import cut
from hpcomm.pipeline.runner import Runner
from hpcomm.pipeline.stage import Loss, LossFn, evaluate
from hpcomm.plan import compile as compile_plan
from hpcomm.plan.schedules import SCHEDULES
from hpcomm.plan.serialize import from_json, to_json

if TYPE_CHECKING:
    from hpcomm._C import BucketPlan, StepPlan
    from hpcomm.mesh import Mesh

__all__: list[str] = []

PLAN_CHANNEL = 2  # of Control, see hpcomm.communicator
_MIB = 1 << 20
# One stage per rank, undivided backwards: what the runner executes of what can be planned.
RUNNABLE = ("gpipe", "1f1b")


class Pipeline:
    """A model cut into ``mesh.pp`` stages, each replicated ``mesh.dp`` times, trained by one verified plan.

    Args:
        model: an ``nn.Sequential``, the same on every rank, on the CPU or on ``mesh.device``. Each rank keeps its own
            stage, moved to ``mesh.device``, with the values of the first replica. Build the optimizer from
            :meth:`parameters` afterwards.
        mesh: from :func:`hpcomm.init`; ``tp`` must be 1 in this version.
        schedule: "1f1b" or "gpipe".
        num_microbatches: parts of a replica's batch along dimension 0.
        loss_fn: ``loss_fn(output, target)``: the mean loss of a microbatch, weighted by its number of samples; or a
            pair ``(sum, weight)``.
        split_at: layers (name or index) that begin stages 1, 2, ...; balanced by parameter counts if None.
        schema: "per_message", or "frozen" where every microbatch of every step has the same shapes.
        bucket_cap_mb: largest gradient bucket in MiB; the first one is at most 1 MiB.

    Making a Pipeline is collective over the mesh.

    Raises:
        InvalidArgument: the model cannot be cut as asked, an unknown schedule, too few microbatches.
        SchemaMismatch: ranks hold different models or arguments; the first difference is named, on every rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        mesh: Mesh,
        num_microbatches: int,
        loss_fn: LossFn,
        schedule: str = "1f1b",
        split_at: Sequence[str | int] | None = None,
        schema: str = "per_message",
        bucket_cap_mb: float = 25.0,
    ) -> None:
        self.mesh = mesh
        options = f"{schedule=} {num_microbatches=} split_at={split_at and list(split_at)} {schema=} {bucket_cap_mb=}"
        # A rank that cannot go on says so in the agreement: the others must not wait for it in a later one.
        problem: InvalidArgument | None = None
        stages: list[torch.nn.Module] = []
        try:
            _check(model, mesh, schedule, num_microbatches, bucket_cap_mb)
            require_schema(schema)
            stages = cut(model, mesh.shape["pp"], split_at)
        except InvalidArgument as error:
            problem = error
        agree(
            mesh.control,
            "model or the arguments of Pipeline",
            [options, f"problem: {problem}", *_describe(model, stages)],
            timeout=mesh.timeout,
        )
        if problem is not None:
            raise problem

        self._names = [[name for name, _ in stage.named_parameters()] for stage in stages]
        self._shapes = [{k: (v.shape, v.dtype) for k, v in stage.state_dict().items()} for stage in stages]
        bucket_plans = [_bucket_plan(stage, bucket_cap_mb) for stage in stages]
        self.plan = self._agree_on_plan(schedule, num_microbatches, bucket_plans, schema)
        self.stage_index = mesh.coordinate["pp"]
        self.module = stages[self.stage_index].to(mesh.device)
        self.bucket_plan = bucket_plans[self.stage_index]
        self._start_equal()
        self._runner = Runner(self.plan, mesh, self.module, self.bucket_plan, loss_fn, schema=schema)
        self._loss_fn = loss_fn
        self._accumulating = False

    def step(self, *inputs: Any, target: Any = None, reduce: bool = True, return_outputs: bool = False) -> Any:
        """One training step on this replica's batch (collective over the mesh).

        Args:
            inputs: one tensor, or a tuple, list or dict of tensors, for the first stage: this replica's shard. All pp
                ranks of a replica pass equal arguments, or None for what their stages do not use.
            target: for ``loss_fn``, on the last stage; cut like the input.
            reduce: False accumulates; the next reducing step reduces the sum once.
            return_outputs: return ``(loss, outputs)``: the model's outputs for this replica's batch on last-stage
                ranks, None elsewhere.

        Returns:
            The loss: sum of weight x loss over all microbatches and replicas / sum of weights. A 0-dim float64 tensor,
            the same on every rank. Gradients of that loss are in ``.grad`` (added to what was there).

        Raises:
            InvalidArgument: no input where one is needed, or fewer samples than microbatches.
            PeerError, RankFailed, TimedOut: another rank raised, died, or did not come.
            Any exception of the model or of ``loss_fn``; the other ranks then raise PeerError. The pipeline cannot
            be used after an error.
        """
        if len(inputs) != 1:
            raise InvalidArgument(f"step() takes one input (a tensor or a tree of tensors), got {len(inputs)}")
        try:
            if self.stage_index == 0 and inputs[0] is None:
                raise InvalidArgument("step(): the first stage needs an input, got None")
            if self._accumulating and all(p.grad is None for p in self.module.parameters()):
                self._drop_accumulated()  # by the optimizer's zero_grad()
            with _FreshGradients(self.module, keep=self._accumulating):
                result = self._runner.step(inputs[0], target, reduce=reduce, keep_outputs=return_outputs)
        except BaseException as error:
            # The peers are in the middle of the same plan: they learn why it ends.
            self.mesh.control.abort(f"stage {self.stage_index}: {describe(error)}")
            self._runner.stage.clear()
            raise
        self._accumulating = not reduce
        if not return_outputs:
            return result.loss
        return result.loss, _join(result.outputs)

    def loss_of(self, output: Any, target: Any) -> Loss:
        """The weighted loss of any output, as the last stage computes it for a microbatch."""
        return evaluate(self._loss_fn, output, target)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The local stage's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The local stage's parameters under the plain model's names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The local stage's state under the plain model's names; the union over ``mesh.pp`` is the plain model's."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the local stage's part of ``state``, which may be the whole model's.

        Raises:
            RuntimeError: an entry of the local stage is missing or has another shape (torch's own error).
        """
        mine = self.module.state_dict().keys()
        self.module.load_state_dict({name: value for name, value in state.items() if name in mine})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the local gradients; also drops what steps with ``reduce=False`` have accumulated."""
        self.module.zero_grad(set_to_none)
        self._drop_accumulated()

    def train(self, mode: bool = True) -> Pipeline:
        """Training or evaluation mode of the local stage."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Evaluation mode of the local stage."""
        return self.train(False)

    @property
    def parameter_names(self) -> list[str]:
        """All parameters of the model in its order, those of other stages included."""
        return [name for names in self._names for name in names]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state on every rank, copied from its stages (collective over ``mesh.pp``)."""
        mine = self.module.state_dict()
        whole: dict[str, torch.Tensor] = {}
        for stage, shapes in enumerate(self._shapes):
            for name, (shape, dtype) in shapes.items():
                local = stage == self.stage_index
                value = (
                    mine[name].detach().clone().contiguous()
                    if local
                    else torch.empty(shape, dtype=dtype, device=self.mesh.device)
                )
                self.mesh.pp.broadcast(value, stage)
                whole[name] = value
        return whole

    def _agree_on_plan(
        self, schedule: str, num_microbatches: int, bucket_plans: list[BucketPlan], schema: str
    ) -> StepPlan:
        """Rank 0 compiles; everybody else takes its plan and checks it."""
        control, world = self.mesh.control, self.mesh.size
        if control.rank == 0:
            plan = compile_plan(
                schedule,
                pp=self.mesh.shape["pp"],
                dp=self.mesh.shape["dp"],
                num_microbatches=num_microbatches,
                bucket_bytes=[buckets.bytes for buckets in bucket_plans],
                schema=schema,
            )
            text = to_json(plan).encode()
            for peer in range(1, world):
                control.send(peer, PLAN_CHANNEL, text)
        else:
            plan = from_json(control.receive(0, PLAN_CHANNEL, self.mesh.timeout).decode())
        if plan.world != world:
            raise SchemaMismatch(f"rank 0 sent a plan for {plan.world} ranks; the mesh has {world}", rank=control.rank)
        plan.verify()
        agree(control, "plan", [f"{plan.hash:016x}"], timeout=self.mesh.timeout)
        return plan

    def _drop_accumulated(self) -> None:
        self._accumulating = False
        self._runner.forget_accumulated()

    def _start_equal(self) -> None:
        """Replicas start with the first one's values."""
        if self.mesh.dp.size == 1:
            return
        with torch.no_grad():
            for value in self.module.state_dict().values():
                dense = value.detach().contiguous()
                self.mesh.dp.broadcast(dense, 0)
                value.copy_(dense)


class _FreshGradients:
    """Sets gradients aside that were reduced (or made) before this step, and adds them back after it: the sum of the
    microbatches is reduced alone. With ``keep``, what is there came from ``reduce=False`` and belongs to the sum.
    """

    def __init__(self, module: torch.nn.Module, *, keep: bool) -> None:
        self._before = (
            [] if keep else [(p, p.grad) for p in module.parameters() if p.requires_grad and p.grad is not None]
        )

    def __enter__(self) -> None:
        for parameter, _ in self._before:
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        for parameter, before in self._before:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def _describe(model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[str]:
    """What ranks must agree on: parameters first, since they say most, then buffers, layers and the cut."""
    state = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items() if hasattr(t, "shape")]
    layers = [line for name, child in model.named_children() for line in f"{name}: {child!r}".split("\n")]
    cuts = [f"stage {i}: {', '.join(name for name, _ in s.named_children())}" for i, s in enumerate(stages)]
    return [*describe_parameters(model), *state, *layers, *cuts]


def _check(model: torch.nn.Module, mesh: Mesh, schedule: str, num_microbatches: int, bucket_cap_mb: float) -> None:
    if mesh.shape["tp"] != 1:
        raise InvalidArgument(f"Pipeline: tp={mesh.shape['tp']} is not supported in this version; use dp and pp")
    if tuple(mesh.shape) != ("pp", "dp", "tp"):
        raise InvalidArgument(f"Pipeline: the axes must be ordered pp, dp, tp in this version, got {tuple(mesh.shape)}")
    if num_microbatches < 1:
        raise InvalidArgument(f"Pipeline: num_microbatches={num_microbatches}; at least 1")
    if bucket_cap_mb <= 0:
        raise InvalidArgument(f"Pipeline: bucket_cap_mb={bucket_cap_mb}; a positive size")
    if schedule not in RUNNABLE:
        known = "is planned, but not run in this version" if schedule in SCHEDULES else "is unknown"
        raise InvalidArgument(f"Pipeline: schedule {schedule!r} {known}; use one of {', '.join(RUNNABLE)}")
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.device not in {torch.device("cpu"), mesh.device}:
            raise InvalidArgument(
                f"Pipeline: {name} is on {tensor.device}, the mesh on {mesh.device}; build the model there "
                "or on the CPU"
            )


def _bucket_plan(stage: torch.nn.Module, cap_mb: float) -> BucketPlan:
    cap = max(1, int(cap_mb * _MIB))
    parameters = [p for p in stage.parameters() if p.requires_grad]
    return _C.BucketPlan(parameters, min(_MIB, cap), cap)


def _join(outputs: list[Any]) -> Any:
    """Microbatch outputs as one batch; a list of microbatches where they are not plain tensors."""
    if not outputs:
        return None
    if all(isinstance(output, torch.Tensor) and output.dim() > 0 for output in outputs):
        return torch.cat(outputs)
    return outputs
