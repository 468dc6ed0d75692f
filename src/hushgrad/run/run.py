"""A run: the batches of a plan, one private step for each, and what the run guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.pieces import pieces_for
from hushgrad.gradients import RecordValues, check_optimizer, observe
from hushgrad.iterates import set_values
from hushgrad.ledger import Entry
from hushgrad.noise import NoiseBuffer
from hushgrad.parallel.single import require_one_process
from hushgrad.run.admission import require_same_parameters, require_watched, trainable
from hushgrad.run.checkpoint import pack_tags, unpack_tags
from hushgrad.run.drawn import DrawnBatch
from hushgrad.run.execution import Execution
from hushgrad.run.guarantee import Guarantee
from hushgrad.run.metrics import NAME, Reading, pack_readings, smoothed, unpack_readings
from hushgrad.run.penalties import Constants
from hushgrad.run.plan import Plan
from hushgrad.run.query import BatchPass
from hushgrad.run.randomness import own_randomness
from hushgrad.run.resuming import RunStore
from hushgrad.run.snapshot import Snapshot
from hushgrad.run.step import StepContext, gradient_of
from hushgrad.types import Batch, Loss, Params, Refused

_MOST_UNUSED = 1  # batches in a row: an exception may skip a step, a loop without steps must not
_NOTHING: Mapping[str, Any] = {}


class Run:
    """A private training run: draws the batches of its plan, and takes one step for each.

    Made by `train`. Loop over it, and call `step` once for each batch.

    Guarantees: what is drawn is what the plan accounts for; noise is added once to each step, also
    to an empty batch; the gradient is divided by a public number; only released values reach the
    optimizer. Between the first batch and the end of the run only the run's own steps may change
    the model: the bits of its parameters, its buffers and the optimizer's state are compared. The
    run ends with its plan.

    Args:
        model: the model that is trained.
        optimizer: what moves its parameters.
        batches: maps a range of steps to their batches.
        plan: what each step may release.
        memory: the run's keys, its entry in a ledger, and its checkpoints.
        execution: how per-sample gradients are computed.
        constants: the tensors that a penalty may read.

    Example:
        >>> from hushgrad import Rng, plan, train
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> p = plan(records=64, batch=16, epochs=1, delta=1e-3, noise_multiplier=1.0)
        >>> run = train(model, optimizer, torch.randn(64, 3), plan=p, rng=Rng.fixed(0))
        >>> isinstance(run, Run), len(run)
        (True, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[range], Iterator[Batch]],
        *,
        plan: Plan,
        memory: RunStore,
        execution: Execution,
        constants: Constants,
    ) -> None:
        self.plan = plan
        self.readings: list[Reading] = []
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._memory, self._execution = memory, execution
        self._params: Params = trainable(model)
        # A fixed rule returns itself, an adaptive one its first rule.
        self._clip = plan.clip.at(plan.clip.clip_norm)
        self._remembered: dict[str, Any] = {}
        self._output = plan.parts.output.begin(plan.steps, memory.rng)
        self._spent = 0.0  # of the algorithm's limit
        self._tags: list[bytes] = []  # of past releases, from which correlated noise is redrawn
        self._noise_buffer = NoiseBuffer()
        self._position = self.steps_taken = 0
        self._drawn: DrawnBatch | None = None
        self._unused = 0
        self._ended_at: int | None = None
        self._finished = False
        self._left: Snapshot | None = None  # the model after the last step or checkpoint
        self._constants = constants
        memory.restore(self, self._load)

    def __len__(self) -> int:
        return self.plan.parts.output.length(self._output, self.plan.steps)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the steps that are left; each is used by one step.

        A batch that was drawn counts as a step, whether it is used or not. Under Poisson sampling
        it may be empty, and its step is then noise alone.

        Raises:
            Refused: if two batches in a row were not used by a step, if anything but the run's
                steps has changed the model, or if another iterator advanced this run. An iterator
                that was left behind ends without an error once the run is over.
        """
        steps = range(self._position, len(self))
        for step, batch in enumerate(self._batches(steps), steps.start):
            if self._finished or self._position == len(self):
                return
            if self._remembered.get("over"):
                break
            if self._position != step:
                raise Refused(
                    "expected one loop over the run at a time, got another that advanced it; draw "
                    "the batches in one loop: a batch that comes twice is not accounted for"
                )
            self._draw(batch)
            yield batch
        if not self._finished:
            self.finish()

    def _draw(self, batch: Batch) -> None:
        self._require_own_model()
        if self._left is None:  # the model may be changed freely until the first batch is drawn
            self._left = Snapshot.of(self._model, self._optimizer)
        self._unused = 0 if self._drawn is None else self._unused + 1
        # Correlated noise takes back that of earlier steps, so none of them may be missing.
        if self._unused > (0 if self.plan.correlated else _MOST_UNUSED):
            raise Refused(
                f"expected run.step for each batch that is drawn, got {self._unused} without it; "
                "call run.step(loss, batch) in the place of loss.backward() and optimizer.step(), "
                "also for an empty batch, whose step is noise alone"
            )
        self._memory.drawn(self._position)
        self._position += 1
        self._drawn = DrawnBatch(batch)

    def step(
        self,
        loss: Loss,
        batch: Batch,
        *,
        penalty: Callable[[], Tensor] | None = None,
        watch: Mapping[str, RecordValues] = _NOTHING,
    ) -> None:
        """Take one private step on the batch that was just drawn.

        It replaces `loss.backward()` and `optimizer.step()`: do not call the latter yourself.
        Afterwards `p.grad` holds the released gradient, for you to read; changing it has no effect.

        Args:
            loss: maps a batch to one value for each record. Random numbers that it draws from torch
                follow from the run's key, so that a resumed run draws the same ones.
            batch: the batch that was drawn; its tensors may be on another device, or of another
                dtype.
            penalty: a function of the parameters alone, such as a weight decay. Its gradient is
                added after the noise.
            watch: a function for each of the plan's watched metrics, which maps a batch to a value
                from 0 to 1 for each record.

        Raises:
            Refused: if the step would not be private as planned: another batch, a changed model, a
                loss that mixes records, or a penalty that reads them.
            ValueError: if `watch` does not match the plan's metrics.
        """
        require_one_process()
        # All checks come before the first release: a refusal then costs nothing.
        drawn = self._require_drawn(batch)
        require_same_parameters(self._model, self._params)
        check_optimizer(self._optimizer, self._params)
        self._require_own_model()
        require_watched(watch, self.plan.metrics)
        if penalty is not None:
            self._constants.require(penalty, self._params, drawn.batch, batch)
        self._drawn = None
        for p in self._params.values():
            p.grad = None  # the previous step's gradient, which would only take memory
        plan, step = self.plan, self._position - 1
        context = self._context(loss, batch, watch, step, penalty)
        with own_randomness(self._memory.rng.derive("model", step)):
            estimate, remembered = plan.parts.step(context, self._remembered)
        if not remembered.get("over"):
            context.permit.require_release()
        # Entered durably before anything uses it: after a crash here the release is still known.
        self._memory.released(step, context.permit.digest)
        self._remembered, self._spent = remembered, context.permit.spent
        if plan.correlated:
            self._tags.append(context.permit.digest)
        self._read(context)
        if penalty is not None and not plan.parts.owns_penalty:
            context.penalty.update(gradient_of(penalty, self._params))
        for name, p in self._params.items():
            # Estimates are in float64 or float32; the optimizer expects the parameter's dtype.
            grad = estimate[name].to(p.dtype)
            p.grad = grad + context.penalty[name] if name in context.penalty else grad
        output = plan.parts.output
        # Before the update: the gradient belongs to this iterate.
        self._output = output.before(self._output, context)
        plan.parts.update(self._params, self._optimizer)
        self.steps_taken += 1
        self._output = output.after(self._output, self._params, self.steps_taken)
        self._left = Snapshot.of(self._model, self._optimizer)

    @property
    def metrics(self) -> dict[str, float]:
        """The plan's released metrics, averaged over the last 50 steps; {} without any."""
        return smoothed(self.readings)

    @property
    def guarantee(self) -> Guarantee:
        """What the run guarantees, whenever it ends.

        Raises:
            Refused: if anything but the run's steps has changed the model.
        """
        if not self._finished:
            self._require_own_model()
        return Guarantee(
            self.plan,
            self.steps_taken,
            self._memory.rng.reproducible,
            self._memory.charges,
            steps_unused=self.steps_drawn - self.steps_taken - (self._drawn is not None),
        )

    @property
    def steps_drawn(self) -> int:
        """The number of steps whose batches were drawn, which is what the run is charged for."""
        return self._position if self._ended_at is None else self._ended_at

    @property
    def entry(self) -> Entry | None:
        """The run's entry in a ledger; None without a budget and a folder."""
        return self._memory.entry

    def save(self) -> None:
        """Write a checkpoint to the run's folder; it never contains the key.

        Raises:
            ValueError: if the run has no folder.
            Refused: if another process has resumed the run, or if anything but the run's steps has
                changed the model.
        """
        self._require_own_model()
        self._memory.save(self)

    def finish(self) -> None:
        """End the run: choose its output, settle its budget and destroy its key.

        Called at the end of the loop; call it yourself to end a run early. Afterwards you may
        change the model freely: it is released, and the run no longer checks it.
        """
        if self._finished:
            return
        self._require_own_model()
        self._drawn = None
        # The chosen iterate may be an earlier one, or an average.
        found = self.plan.parts.output.result(self._output)
        if found is not None:
            set_values(self._params, found)
        self._ended_at = self.steps_drawn  # kept by a retry, as after a full disk
        self._position = len(self)  # so that the last checkpoint has no steps left
        self._memory.finish(self)
        self._finished = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself."""
        return {
            "step": self._position - (self._drawn is not None),  # that batch is drawn again
            "taken": self.steps_taken,
            "drawn": self.steps_drawn,
            "clip_norm": self._clip.clip_norm,
            "readings": pack_readings(self.readings),
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "algorithm": self._remembered,
            "output": self._output,
            "spent": self._spent,
            "tags": pack_tags(self._tags),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in another process.

        Private: steps that are taken again must be charged, as a resumed run's are.
        """
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._clip = self.plan.clip.at(state["clip_norm"])
        self._remembered, self._output = state["algorithm"], state["output"]
        self._position, self.steps_taken = state["step"], state["taken"]
        self._spent, self._tags = state["spent"], unpack_tags(state["tags"])
        self._ended_at = state["drawn"] if state["drawn"] < state["step"] else None
        names = self.plan.metrics.names if self.plan.metrics else ()
        self.readings = unpack_readings(state["readings"], names)
        self._left = Snapshot.of(self._model, self._optimizer)

    def _observed(
        self, watch: Mapping[str, RecordValues], part: Batch, step: int
    ) -> dict[str, Tensor]:
        test = step & (step - 1) == 0  # at steps 0, 1, 2, 4, …, as independence in the model is
        return {
            name: observe(values, part, modules=(self._model,), test=test)
            for name, values in watch.items()
        }

    def _context(
        self,
        loss: Loss,
        batch: Batch,
        watch: Mapping[str, RecordValues],
        step: int,
        penalty: Callable[[], Tensor] | None,
    ) -> StepContext:
        plan = self.plan
        work = BatchPass(
            self._execution.objective(loss, self._params, (self._model,)),
            batch,
            groups=plan.groups,
            execution=self._execution,
            metrics=plan.metrics,
            observed=lambda part: self._observed(watch, part, step),
            expected=self._clip,
            # Each record draws its piece, so that it affects the rounding of one sum only.
            pieces=pieces_for(plan.divisor_at(step), self._memory.sampling.derive("pieces", step)),
            batch_size=plan.largest_batch,
        )
        return StepContext(
            self._memory.rng,
            plan.permit(step, batch, spent=self._spent, past=self._tags, buffer=self._noise_buffer),
            work,
            self._clip,
            plan.divisor_at(step),
            plan.relation,
            penalty,
        )

    def _read(self, context: StepContext) -> None:
        metrics = self.plan.metrics
        if metrics is not None:
            released = context.releases[0]
            found = released.values[NAME]
            values = metrics.read(found, l2=released.l2, expected=context.divisor)
            self.readings.append(Reading(context.step, values))
            self._clip = self.plan.clip.next_rule(self._clip, values["clipped"])

    def _require_drawn(self, batch: Batch) -> DrawnBatch:
        if self._drawn is None:
            raise Refused(
                "expected a batch that the run has drawn and that no step has used, got another; "
                "call run.step once for each batch of `for batch in run`"
            )
        self._drawn.require(batch)
        return self._drawn

    def _require_own_model(self) -> None:
        if self._left is not None:
            self._left.require_same(self._model, self._optimizer)
