"""The Pipeline that users hold: construction, steps, parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.channel import whole_number
from hpcomm.communicator import agree
from hpcomm.ddp import require_mesh
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline import chain, sharing
from hpcomm.pipeline.adapt import as_chain
from hpcomm.pipeline.checks import listed, require_no_gradient, require_scaler
from hpcomm.pipeline.draft import Arguments, agreed, draft
from hpcomm.pipeline.failure import TellPeers
from hpcomm.pipeline.homes import move_in
from hpcomm.pipeline.links import Messages, links_of, loaders_of
from hpcomm.pipeline.local import LocalModel
from hpcomm.pipeline.meta import materialize, materialize_together
from hpcomm.pipeline.microbatch import join, require_equal_rows, require_rows, rows_of, samples, split, split_keywords
from hpcomm.pipeline.ordered import OrderedLoss, require_ordered
from hpcomm.pipeline.parameters import Sums, buffers_kept, gradients_kept, identity, start_equal
from hpcomm.pipeline.partition import Balance, decide, described, stages_at
from hpcomm.pipeline.planning import ScheduleLike, Wishes, plan_together, scalar_lane
from hpcomm.pipeline.randomness import Draws, generators_of, kept, loss_may_draw
from hpcomm.pipeline.recorder import Recorder, Times, gathered_costs, recorder_for
from hpcomm.pipeline.reductions import Reductions
from hpcomm.pipeline.runner import Batch, Runner
from hpcomm.pipeline.stage import Loss, LossFn, Stage, evaluate
from hpcomm.pipeline.unit import Unit

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hpcomm._C import BucketPlan, CostModel, StepLoss, StepPlan
    from hpcomm.amp import GradScaler
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.adapt import Model
    from hpcomm.pipeline.meta import InitFn
    from hpcomm.pipeline.profile import LayerProfile
    from hpcomm.pipeline.runner import StepResult

__all__: list[str] = []


class Pipeline(LocalModel):
    """A model cut into stages over ``mesh.pp``, each replicated ``mesh.dp`` times, trained by one verified plan.

    Args:
        model: a chain of layers: an ``nn.Sequential``, a :class:`hpcomm.Chain` where layers have skip connections, a
            module whose forward calls its children one after the other, a Hugging Face decoder of a Llama's form, or
            a list of stages; the same on every rank. On the CPU, on ``mesh.device``, or on "meta": then each rank
            makes its own stages only, as :func:`hpcomm.materialize` does with ``seed`` and ``init_fn``, and loads a
            checkpoint by :meth:`load_state_dict`. Each rank keeps its own stages, moved to ``mesh.device``, with the
            values of the first replica. Build the optimizer from :meth:`parameters` afterwards. Parameters that several
            stages share stay tied: their gradients are added up over all owners.
        mesh: from :func:`hpcomm.init`; ``tp`` must be 1 in this version.
        schedule: a name in ``hpcomm.plan.SCHEDULES``; a table, as ``hpcomm.plan.parse`` reads it; or the path of a CSV
            file of ``torch.distributed.pipelining``.
        num_microbatches: parts of a replica's batch along dimension 0.
        loss_fn: ``loss_fn(output, target)``: the mean loss of a microbatch, weighted by its number of samples; or a
            pair ``(sum, weight)``. None where only outputs are wanted, of :meth:`eval_step`.
        stages_per_rank: of a named schedule; its own number by default.
        split_at: layers (name or index) that begin stages 1, 2, ...; balanced by parameter counts if None.
        balance: a :class:`hpcomm.Balance`: cut by measured times and memory instead. ``print(pipe.cut)`` shows the cut.
        reduce: where gradients are reduced: "slack" (in bubbles), "eager" (inside the last backward), "end".
        schema: "per_message", or "frozen" where every microbatch of every step has the same shapes.
        bucket_cap_mb: largest gradient bucket in MiB; the first one, and where it can be the last, of 1 MiB.
        inputs: "all": every rank of a replica passes the arguments that its stages use. "first": only the rank of the
            first stage does, and sends on what later stages need.
        keywords: with ``inputs="first"``, names of the keyword arguments that steps will be given.
        whole: names of keyword arguments that are not cut: every microbatch gets all of them.
        init_fn: ``init_fn(name, submodule)``, for a model on "meta", see :func:`hpcomm.materialize`.
        seed: of the random numbers that layers draw in training. They depend on it, on the number of the step, on the
            microbatch's place in the global batch and on the layer, not on the mesh or the schedule.
        wire_dtype: what activations and their gradients are cast to between ranks, and back on arrival, as
            :class:`hpcomm.Channel` casts: ``torch.bfloat16`` halves the messages of a float32 model over a slow link.
            Not what the first stage loads for others. Each boundary then rounds to that dtype, twice a step.
        deterministic: losses and gradients have the same bits for every mesh and schedule that cuts the global batch
            into the same microbatches; docs/explanation/numerics.md says of what, and what it costs. With several
            replicas ``num_microbatches`` must be a power of two.
        costs: what the plan's order and the place of reductions are decided by, see :func:`hpcomm.plan.compile`; rank
            0's counts.

    Making a Pipeline is collective over the mesh.

    Raises:
        InvalidArgument: the model cannot be cut as asked, an unknown schedule, too few microbatches.
        SchemaMismatch: ranks hold different models or arguments; the first difference is named, on every rank.
    """

    def __init__(
        self,
        model: Model,
        *,
        mesh: Mesh,
        num_microbatches: int,
        loss_fn: LossFn | None,
        schedule: ScheduleLike = "1f1b",
        stages_per_rank: int | None = None,
        split_at: Sequence[str | int] | None = None,
        balance: Balance | None = None,
        reduce: str = "slack",
        schema: str = "per_message",
        bucket_cap_mb: float = 25.0,
        inputs: str = "all",
        keywords: Sequence[str] = (),
        whole: Sequence[str] = (),
        init_fn: InitFn | None = None,
        seed: int = 0,
        deterministic: bool = False,
        wire_dtype: torch.dtype | None = None,
        costs: CostModel | None = None,
    ) -> None:
        require_mesh("Pipeline", mesh)
        split_at, keywords, whole = (listed(names) for names in (split_at, keywords, whole))
        num_microbatches = num_microbatches if (count := whole_number(num_microbatches)) is None else count
        asked = Arguments(
            num_microbatches=num_microbatches,
            loss_fn=loss_fn,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            split_at=split_at,
            balance=balance,
            reduce=reduce,
            schema=schema,
            bucket_cap_mb=bucket_cap_mb,
            inputs=inputs,
            keywords=keywords,
            whole=whole,
            init_fn=init_fn,
            seed=seed,
            deterministic=deterministic,
            wire_dtype=wire_dtype,
        )
        layers: list[LayerProfile] = []
        whole_model, plain, starts, modules, _ = agreed(mesh, lambda: draft(model, mesh, asked))
        if balance is not None:
            starts, layers = decide(whole_model, mesh, plain.placement, plain.table, balance, init_fn, seed)
            modules = stages_at(whole_model, starts)
        self.cut = described(whole_model, starts, plain.placement, plain.table, balance or Balance(), layers)
        here = [stage for stage, rank in enumerate(plain.placement) if rank == mesh.coordinate["pp"]]
        materialize_together(mesh, modules, here, seed, init_fn)
        owned = sharing.owners_of(modules)
        super().__init__(mesh, modules, owned, plain.placement)
        calls = chain.calls_by_stage(modules, chain.skips_of(whole_model))
        self._home = move_in(mesh, calls, plain.placement)
        self._asked = asked._replace(balance=None)  # whose sample may be large
        self._schedule = plain
        self._whole = frozenset(whole)
        self._promised = frozenset(keywords) if inputs == "first" else None
        self._calls = [call for stage in calls for call in stage]
        self._links = links_of(calls, loaders_of(calls, keywords) if inputs == "first" else ())
        ties = sharing.ties_of(owned)
        if deterministic:
            shared = [entry.name for entry in owned if len(entry.stages) > 1 and entry.parameter.requires_grad]
            require_ordered(mesh.dp.size, num_microbatches, shared)
        alone = [sharing.reduced_alone(owned, stage) for stage in range(plain.stages)]
        buckets = [sharing.bucket_plan(parameters, bucket_cap_mb) for parameters in alone]
        self._wishes = Wishes(
            links=self._links,
            bucket_bytes=[plan.bytes for plan in buckets],
            ties=[(tie.stages, sum(tie.buckets.bytes)) for tie in ties],
            reduce=reduce,
            schema=schema,
            costs=costs,
        )
        self.plan = plan_together(mesh, plain, self._wishes)

        self.bucket_plans = {stage: buckets[stage] for stage in here}
        self._local_stages = {stage: self._made(stage, calls[stage]) for stage in here}
        # Of this rank alone: whoever keeps the others' parameters keeps the whole model.
        self._reduced = ({s: alone[s] for s in here}, {i: t for i, t in enumerate(ties) if set(t.stages) & set(here)})
        self._loss = _C.StepLoss(scalar_lane(self.plan, mesh))
        self._runner = self._new_runner()
        if plain.trains:  # what evaluation takes is another plan's
            self._runner.recorder = recorder_for(mesh.rank, on_cpu=mesh.device.type == "cpu")
        self._evaluation: Runner | None = None if plain.trains else self._runner
        start_equal(mesh, self.module, [e for e in owned if set(e.stages) & set(here)], plain.placement)
        self._identity = identity(self.parameters())
        self._generators = generators_of(mesh.device)
        # Of its random numbers, behind those of all layers; None where it draws none.
        self.loss_place = len(self._calls) if loss_may_draw(loss_fn) else None
        self._unit = Unit(mesh, plain.placement[-1], of_two=deterministic)
        self._sums, self.step_number = Sums(), 0

    def __getstate__(self) -> Any:
        # What copy and pickle ask for; they would end at the first native object, and name that.
        raise InvalidArgument(
            "a Pipeline belongs to the mesh that it was made on: it is neither copied nor pickled. For averages of "
            "weights copy.deepcopy(pipe.module), which holds this rank's stages; for checkpoints pipe.state_dict()"
        )

    # --- Steps ---

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        reduce: bool = True,
        return_outputs: bool = False,
        scaler: GradScaler | None = None,
        **keywords: Any,
    ) -> Any:
        """One training step on this replica's batch (collective over the mesh). Under ``torch.no_grad()`` it is
        :meth:`eval_step`.

        Args:
            inputs: for the first layer of the model: this replica's shard. Tensors, or trees of them, are cut into
                microbatches along dimension 0; numbers and None are the same for all. All pp ranks of a replica pass
                equal arguments, or None for what their stages do not use.
            target: for ``loss_fn``, on the last stage; cut like the inputs.
            reduce: False accumulates; the next reducing step reduces the sum once.
            return_outputs: return ``(loss, outputs)``: the model's outputs for this replica's batch on the last stage's
                ranks (those of microbatches, in a list, where one has no row per sample), None elsewhere.
            scaler: for training in float16; see :class:`hpcomm.GradScaler`.
            keywords: for every layer whose ``forward`` has an argument of that name; cut like the inputs.

        Returns:
            The loss: sum of weight x loss over all microbatches and replicas / sum of weights. A 0-dim float64 tensor,
            the same on every rank. Gradients of that loss are in ``.grad`` (added to what was there).

        Raises:
            InvalidArgument: no input or target where one is needed, fewer samples than microbatches, a target of
                another number of samples, ranks of a replica with batches of different sizes, arguments no layer takes;
                parameters were replaced, frozen, unfrozen or converted, or trained by another Pipeline on other ranks.
            PeerError, RankFailed, TimedOut: another rank raised, died, or did not come.
            Exception: of the model or of ``loss_fn``; the other ranks then raise PeerError. After any of these errors
                the mesh and what is on it cannot be used; but on one rank after an InvalidArgument for its arguments.
        """
        if not torch.is_grad_enabled():
            return self.eval_step(*inputs, target=target, return_outputs=return_outputs, **keywords)
        self._home.require_current("step()", self.mesh)
        runner = self._runner
        with TellPeers(self.mesh, runner):
            if not self._schedule.trains:
                raise InvalidArgument("step(): the schedule has no backwards; use eval_step()")
            if self._asked.loss_fn is None:
                raise InvalidArgument("step(): the Pipeline was made with loss_fn=None: there is nothing to train on")
            require_scaler(scaler)
            parameters = list(self.parameters())  # once a step: a model has thousands
            if identity(parameters) != self._identity:
                raise InvalidArgument(
                    "the stage's parameters changed since the Pipeline was made (replaced, frozen, unfrozen, converted "
                    "or given a hook behind the accumulation); make a new Pipeline of the changed model"
                )
            require_no_gradient([("inputs", inputs), ("target", target), *keywords.items()])
            batch = self._batch(inputs, target, keywords, self._asked.loss_fn)
            batch.reduce, batch.keep_outputs = reduce, return_outputs
            if self._asked.deterministic and not reduce:
                raise InvalidArgument("step(): deterministic=True sums one step's gradients; use more microbatches")
            if not self._sums.is_open:  # else it stays: all of a sum is counted in one unit
                self._unit.value = 1.0
                if scaler is not None and self._schedule.stages - 1 in self.stages:
                    batch.agreed = self._unit
            batch.unit = self._unit.value
            if scaler is not None:
                batch.scale = scaler.scale
            batch.keeps = self._sums.keeps(parameters)
            self._home.note_training()
            with self._random_numbers(batch), self._sums.step(parameters, reduce=reduce):
                result = runner.step(batch)
        self.step_number += 1
        return self._answer(result, return_outputs)

    def eval_step(self, *inputs: Any, target: Any = None, return_outputs: bool = False, **keywords: Any) -> Any:
        """The forwards of a step, without gradients (collective over the mesh). Call :meth:`eval` first where layers
        behave differently in training.

        Arguments, return value and errors as of :meth:`step`. Without a target the loss is computed only if
        ``return_outputs`` is False: to get outputs alone, no loss is needed. It is NaN then.
        """
        self._home.require_current("eval_step()", self.mesh)
        with torch.no_grad():
            self._evaluation = self._evaluation or self._evaluator()
            with TellPeers(self.mesh, self._evaluation):
                wants_loss = target is not None or not return_outputs
                if wants_loss and self._asked.loss_fn is None:
                    raise InvalidArgument(
                        "eval_step(): made with loss_fn=None: pass return_outputs=True, and no target"
                    )
                batch = self._batch(inputs, target, keywords, self._asked.loss_fn)
                # Who has the target knows: with inputs="first" the last stage hears of it with the first message.
                batch.needs_target = batch.keep_outputs = return_outputs
                with self._random_numbers(batch):
                    result = self._evaluation.step(batch)
        return self._answer(result, return_outputs)

    def loss_of(self, output: Any, target: Any) -> Loss:
        """The weighted loss of any output, as the last stage computes it for a microbatch."""
        if self._asked.loss_fn is None:
            raise InvalidArgument("loss_of(): the Pipeline was made with loss_fn=None")
        return evaluate(self._asked.loss_fn, output, target)

    # --- Plans ---

    def measure(self, *inputs: Any, target: Any = None, steps: int = 3, **keywords: Any) -> CostModel:
        """What each stage's computations take, from ``steps`` steps that leave no trace: gradients and buffers are
        afterwards what they were (collective). Of several steps the first one does not count: it warms up.

        Returns:
            A cost model, the same on every rank, for :meth:`replan` and ``plan.simulate``, with the bytes of the
            messages. Computations of a host's ranks share its cores where there are fewer. Messages and reductions
            take no time but that of issuing them and, where ranks of one thread each have fewer cores than there are
            of them, the CPU time that a rank has for them, receiving included: set ``link_latency_seconds``,
            ``link_bytes_per_second`` and those of collectives where they count.

        Raises:
            InvalidArgument: ``steps`` is no whole number above 0; ``no_grad()``; a sum (``reduce=False``) is open.
            SchemaMismatch: of ranks that do not call it alike. After either the pipeline goes on.
        """
        count = whole_number(steps)
        is_open = self._sums.keeps(self.parameters())
        given = f"steps={steps!r} grad={torch.is_grad_enabled()} open={is_open}"
        agree(self.mesh.control, "arguments of measure()", [given], timeout=self.mesh.timeout)
        if count is None or count < 1:
            raise InvalidArgument(f"measure(): steps={steps!r}; a whole number, at least 1")
        if not torch.is_grad_enabled():
            raise InvalidArgument("measure(): it times steps with their backwards: not under torch.no_grad()")
        if is_open:
            raise InvalidArgument("measure(): a sum begun with reduce=False is open; end it, or call zero_grad()")
        number, before = self.step_number, self._runner.recorder
        times = [Times(self.mesh.device) for _ in range(count)]
        with gradients_kept(self.parameters()), buffers_kept(self.module), self._home.paused():
            try:
                for each in times:
                    self._runner.recorder = each
                    _, begin = each.clocks()
                    self.step(*inputs, target=target, **keywords)
                    each.around = each.clocks()[1] - begin - each.inside
            finally:
                self._runner.recorder, self.step_number = before, number
        return gathered_costs(self.mesh, self.plan, times[1:] or times)

    @contextmanager
    def traced(self, folder: str | PathLike[str]) -> Iterator[None]:
        """The training steps inside are noted in ``folder``, action by action, as ``HPCOMM_TRACE`` does for all steps:
        ``python -m hpcomm trace report`` shows them beside the plan. All ranks name the same folder.
        """
        before = self._runner.recorder
        on_cpu = self.mesh.device.type == "cpu"
        self._runner.recorder = recorder = Recorder(Path(folder), self.mesh.rank, on_cpu=on_cpu)
        try:
            yield
        finally:
            self._runner.recorder = before
            recorder.close()

    def replan(self, *, costs: CostModel | None = None, reduce: str | None = None) -> StepPlan:
        """Compiles the plan anew, between two steps (collective): the same schedule, another order of independent
        operations and another place of reductions. Rank 0's arguments count.

        Args:
            costs: see :meth:`measure`; as before if None.
            reduce: "slack", "eager" or "end"; as before if None.

        Raises:
            InvalidArgument: on every rank, what cannot be compiled; the old plan stays.
        """
        wishes = self._wishes._replace(costs=costs or self._wishes.costs, reduce=reduce or self._wishes.reduce)
        self.plan = plan_together(self.mesh, self._schedule, wishes)
        self._wishes = wishes
        recorder = self._runner.recorder
        self._runner = self._new_runner()
        self._runner.recorder = recorder  # which goes on
        self._evaluation = None if self._schedule.trains else self._runner
        return self.plan

    def materialize(self, model: Model) -> torch.nn.Module:
        """The whole ``model`` as one chain on ``mesh.device``; from "meta" it gets this pipeline's initial values."""
        whole = as_chain(model)
        return materialize(whole, device=self.mesh.device, seed=self._asked.seed, init_fn=self._asked.init_fn)

    # --- The model ---

    def zero_grad(self) -> None:
        """Drops all gradients, accumulated ones included."""
        self.module.zero_grad()
        self._sums.forget()
        self._loss.forget()

    def train(self, mode: bool = True) -> Pipeline:
        """Training mode of the local stages (or evaluation mode)."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Evaluation mode of the local stages."""
        return self.train(False)

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch."""
        return self._asked.num_microbatches

    @property
    def bucket_plan(self) -> BucketPlan:
        """Of the first of this rank's stages."""
        return next(iter(self.bucket_plans.values()))

    # --- Inside ---

    def draws(self, step: int, replica: int) -> Draws:
        """The random numbers of a replica's microbatches in a step."""
        return Draws(self._generators, self._asked.seed, step, replica * self.num_microbatches)

    def split_keywords(self, keywords: Mapping[str, Any], inputs: Any) -> list[dict[str, Any]]:
        """Keyword arguments of a step by microbatch."""
        return split_keywords(keywords, self.num_microbatches, samples(inputs), self._whole)

    def _made(self, stage: int, calls: Sequence[chain.Call]) -> Stage:
        """One of this rank's stages, with its links."""
        return Stage(
            stage,
            self.stages[stage],
            calls,
            incoming=[link for link in self._links if link.target == stage],
            outgoing=[link for link in self._links if link.source == stage],
            divided=self._schedule.divided(stage),
        )

    def _batch(self, inputs: tuple[Any, ...], target: Any, keywords: dict[str, Any], loss_fn: LossFn | None) -> Batch:
        """The arguments' part for this rank, cut into microbatches."""
        for stage in self._local_stages.values():
            stage.refresh()
        parts, first, last = self.num_microbatches, 0 in self.stages, self._schedule.stages - 1 in self.stages
        if first and (not inputs or all(value is None for value in inputs)):
            raise InvalidArgument("step(): the first stage needs an input, got None")
        for name in keywords:
            if self._promised is not None and name not in self._promised:
                raise InvalidArgument(
                    f"step(): {name!r} is not among keywords={sorted(self._promised)} of the Pipeline"
                )
        chain.require_taken(self._calls, keywords)
        if first or self._promised is None:
            chain.require_given(self._calls, keywords)
        cut_inputs: list[tuple[Any, ...]] = [()] * parts
        if first:
            require_equal_rows(inputs, samples(inputs))
            cut_inputs = list(zip(*[split(value, parts, "input") for value in inputs], strict=True))
            if self._asked.deterministic and self.mesh.dp.size > 1 and any(samples(value) % parts for value in inputs):
                raise InvalidArgument(
                    f"step(): deterministic=True with several replicas needs equal microbatches; {parts} cannot be cut "
                    f"from a batch of {samples(inputs)} samples"
                )
        require_rows(target, samples(inputs), parts)
        loads = self._promised is not None
        wants_target = first if loads else last
        wants_keywords = first or not loads
        return Batch(
            cut_inputs,
            split(target if wants_target else None, parts, "target"),
            self.split_keywords(keywords if wants_keywords else {}, inputs),
            rows_of(inputs, keywords, parts, self._whole) if wants_keywords else [0] * parts,
            loss_fn,
            self.draws(self.step_number, self.mesh.coordinate["dp"]) if self._draws() else None,
            self.loss_place if torch.is_grad_enabled() else None,
        )

    def _new_runner(self) -> Runner:
        reductions = None
        if self._schedule.trains:
            parameters, ties = self._reduced
            plans, ordered = self.bucket_plans, self._asked.deterministic
            reductions = Reductions(self.plan, self.mesh, parameters, plans, ties, ordered=ordered)
        return self._runner_of(self.plan, reductions, self._loss)

    def _runner_of(self, plan: StepPlan, reductions: Reductions | None, loss: StepLoss) -> Runner:
        ordered = OrderedLoss(scalar_lane(plan, self.mesh), self.mesh.dp.size) if self._asked.deterministic else None
        stages, links = self._local_stages, self._links
        first = self.mesh.ranks("pp")[self._schedule.placement[0]]
        messages = Messages(self._asked.schema, self._asked.wire_dtype)
        return Runner(plan, self.mesh, stages, links, reductions, loss, ordered, first, messages)

    def _evaluator(self) -> Runner:
        plan = plan_together(self.mesh, self._schedule.forwards(), self._wishes)
        # A loss of its own: the training steps' one remembers the weights of accumulated gradients.
        loss = _C.StepLoss(scalar_lane(plan, self.mesh), evaluates=True)
        return self._runner_of(plan, None, loss)

    def _draws(self) -> bool:
        """Whether seeds are set in this step. Not in a captured one: its generator belongs to the graph."""
        has_loss = self.loss_place is not None and self._schedule.stages - 1 in self.stages and torch.is_grad_enabled()
        if not has_loss and not any(stage.draws for stage in self._local_stages.values()):
            return False
        return self.mesh.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _random_numbers(self, batch: Batch) -> AbstractContextManager[object]:
        return nullcontext() if batch.draws is None else kept(self._generators)

    @staticmethod
    def _answer(result: StepResult, return_outputs: bool) -> Any:
        return (result.loss, join(result.outputs)) if return_outputs else result.loss
