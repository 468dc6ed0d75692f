"""Training: the user's loop, with a private gradient in the place of the ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.algorithms.algorithm import Scheduled
from hushgrad.execution import Execution
from hushgrad.guarantee import Guarantee
from hushgrad.ledger import Budget, Entry
from hushgrad.metrics import NAME, Reading, smoothed
from hushgrad.persample import check_optimizer, forget_structure
from hushgrad.persample.observed import Values, observe
from hushgrad.persample.records import count
from hushgrad.plan import Plan
from hushgrad.points import move
from hushgrad.resuming import Keep, Memory, none, remembered
from hushgrad.rng import Rng
from hushgrad.sampling import Draws, Loader, Stated
from hushgrad.step import Pass, Round, gradient_of
from hushgrad.types import Batch, Loss, Params, Refused

_REFUSED_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.SparseAdam)
_PLAIN = Execution()
_NOTHING: Mapping[str, Any] = {}


class Run:
    """A private training run: draws the batches of its plan, and takes one step for each.

    Guarantees: what is drawn is what the plan accounts for; noise is added once to each step, also
    to an empty batch; the gradient is divided by a public number; only released values reach the
    optimizer. The run ends with its plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[range], Iterator[Batch]],
        *,
        plan: Plan,
        memory: Memory,
        execution: Execution,
    ) -> None:
        self.plan = plan
        self.readings: list[Reading] = []
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._memory, self._execution = memory, execution
        self._params: Params = _trainable(model)
        self._clip = plan.clip.at(plan.clip.clip_norm)
        self._remembered: dict[str, Any] = {}
        self._output = plan.algorithm.output.begin(plan.steps, memory.rng)
        self._position = self.steps_taken = 0
        self._drawn: int | None = None
        self._finished = False
        memory.restore(self, self._load)

    def __len__(self) -> int:
        return self.plan.algorithm.output.length(self._output, self.plan.steps)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left; each is good for one step.

        A loop that others have overtaken ends at the plan's end, and is refused before it.
        """
        steps = range(self._position, len(self))
        for step, batch in enumerate(self._batches(steps), steps.start):
            if self._position == len(self):
                return
            if self._remembered.get("over"):
                break
            if self._position != step:
                raise Refused(
                    "expected one loop over the run at a time, got another that went on meanwhile; "
                    "draw the batches in one loop: a batch that comes twice is not accounted for"
                )
            self._position += 1
            self._drawn = count(batch)
            yield batch
        self._drawn = None
        if not self._finished:
            self.finish()

    def step(
        self,
        loss: Loss,
        batch: Batch,
        *,
        penalty: Callable[[], Tensor] | None = None,
        watch: Mapping[str, Values] = _NOTHING,
    ) -> None:
        """One private step on the batch that was just drawn.

        `loss(batch)` returns one value for each record; random numbers that it draws from torch
        follow from the run's key, so that a resumed run draws them again. `penalty()` reads no
        record (a weight decay, say), and its gradient is added after the noise. `watch` has a
        function for each of the plan's watched metrics: of a batch, to a value from 0 to 1 for
        each record.
        """
        self._require_drawn(batch)
        self._require_same_parameters()
        self._require_watched(watch)
        self._drawn = None
        for p in self._params.values():
            p.grad = None  # the last step's, which would only take memory
        plan, step = self.plan, self._position - 1
        round = self._round(loss, batch, watch, step, penalty)
        with _own_randomness(self._memory.rng.derive("model", step)):
            estimate, remembered = plan.algorithm.step(round, self._remembered)
        self._memory.released(step, round.digest)
        self._remembered = remembered
        self._read(round)
        for name, p in self._params.items():
            p.grad = estimate[name].to(p.dtype)
        if round.regulariser is not None:
            round.penalty = gradient_of(round.regulariser, self._params)
            _add(round.penalty, self._params)
        output = plan.algorithm.output
        self._output = output.before(self._output, round)
        plan.algorithm.update(self._params, self._optimizer)
        self.steps_taken += 1
        self._output = output.after(self._output, self._params, self.steps_taken)

    @property
    def metrics(self) -> dict[str, float]:
        """The plan's metrics over the last 50 steps, as they were released; {} without any."""
        return smoothed(self.readings)

    @property
    def guarantee(self) -> Guarantee:
        """What the run guarantees, whenever it ends."""
        return Guarantee(
            self.plan, self.steps_taken, self._memory.rng.reproducible, self._memory.charges
        )

    @property
    def entry(self) -> Entry | None:
        """The run's entry in a ledger; None without a budget and a folder."""
        return self._memory.entry

    def save(self) -> None:
        """Write a checkpoint to the run's folder; it never holds the key."""
        self._memory.save(self)

    def finish(self) -> None:
        """End the run: settle its budget and destroy its key. The end of its batches does so."""
        found = self.plan.algorithm.output.result(self._output)
        if found is not None:
            move(self._params, found)
        self._memory.finish(self)
        self._position, self._finished = len(self), True

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself."""
        return {
            "step": self._position - (self._drawn is not None),  # that batch is drawn again
            "taken": self.steps_taken,
            "clip_norm": self._clip.clip_norm,
            "readings": [[r.step, list(r.values.values())] for r in self.readings],
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "algorithm": self._remembered,
            "output": self._output,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned in another process.

        Private: steps that are taken again must be charged, as a resumed run's are.
        """
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._clip = self.plan.clip.at(state["clip_norm"])
        self._remembered, self._output = state["algorithm"], state["output"]
        self._position, self.steps_taken = state["step"], state["taken"]
        names = self.plan.metrics.names if self.plan.metrics else ()
        self.readings = [
            Reading(step, dict(zip(names, values, strict=True)))
            for step, values in state["readings"]
        ]

    def _observed(self, watch: Mapping[str, Values], part: Batch, step: int) -> dict[str, Tensor]:
        test = step & (step - 1) == 0  # as the model's independence is
        return {
            name: observe(values, part, modules=(self._model,), test=test)
            for name, values in watch.items()
        }

    def _round(
        self,
        loss: Loss,
        batch: Batch,
        watch: Mapping[str, Values],
        step: int,
        penalty: Callable[[], Tensor] | None,
    ) -> Round:
        plan = self.plan
        work = Pass(
            loss,
            self._params,
            batch,
            groups=plan.groups,
            modules=(self._model,),
            execution=self._execution,
            metrics=plan.metrics,
            observed=lambda part: self._observed(watch, part, step),
            expected=self._clip,
        )
        return Round(
            work,
            self._clip,
            plan.noise(step),
            plan.divisor_at(step),
            step=step,
            rng=self._memory.rng,
            relation=plan.relation,
            regulariser=penalty,
        )

    def _read(self, round: Round) -> None:
        metrics = self.plan.metrics
        if metrics is not None:
            (released,) = round.releases
            found = released.values[NAME]
            values = metrics.read(found, l2=released.l2, expected=round.divisor)
            self.readings.append(Reading(round.step, values))
            self._clip = self.plan.clip.moved(self._clip, values["clipped"])

    def _require_drawn(self, batch: Batch) -> None:
        if self._drawn is None:
            raise Refused(
                "expected a batch that the run has drawn and that no step has used, got another; "
                "call run.step once for each batch of `for batch in run`"
            )
        if count(batch) != self._drawn:
            raise Refused(
                "expected all the records of the batch that was drawn, got another number of them; "
                "pass the batch as it came, or each of its records transformed by itself"
            )

    def _require_same_parameters(self) -> None:
        now = _trainable(self._model)
        if {n: id(p) for n, p in now.items()} != {n: id(p) for n, p in self._params.items()}:
            changed = sorted(now.keys() ^ self._params.keys())
            raise Refused(
                f"expected the parameters that the run started with, got changes in "
                f"{', '.join(changed) or 'their tensors'}; start another run after freezing or "
                "unfreezing"
            )

    def _require_watched(self, watch: Mapping[str, Values]) -> None:
        expected = self.plan.metrics.watched if self.plan.metrics else ()
        if set(watch) != set(expected):
            remedy = (
                "pass them: run.step(…, watch={name: function})"
                if set(watch) < set(expected)
                else "name them in the plan: hg.plan(…, metrics=Metrics(watched=(…,)))"
            )
            raise ValueError(
                f"expected a function to watch for each of {list(expected)}, got {list(watch)}; "
                f"{remedy}"
            )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    plan: Plan,
    rng: Rng,
    execution: Execution = _PLAIN,
    budget: Budget | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    keep: Keep = _NOTHING,
) -> Run:
    """Start a private training run of `model` on `data`, by any first-order optimizer.

    `data` is a tensor, an array, a tuple or mapping of them, a map-style data set, or a
    `sampling.Loader` of one. With a sampling that was `Stated`, it is left None.

    The run is charged to `budget`. In `folder` it keeps checkpoints and its key; with `resume` it
    goes on from there. What `keep` names (a schedule, an average) is saved along.
    """
    _require_kind("rng", rng, Rng, "Rng.from_os()")
    _require_kind("plan", plan, Plan, "hg.plan(…)")
    if budget is not None:
        _require_kind("budget", budget, Budget, 'hg.Ledger("ledger.sqlite").budget("name")')
    if isinstance(optimizer, _REFUSED_OPTIMIZERS):
        raise Refused(
            f"expected an optimizer that takes one dense gradient for each step, got "
            f"{type(optimizer).__name__}; use SGD or Adam"
        )
    check_optimizer(optimizer, _trainable(model))
    forget_structure(_trainable(model))
    if plan.algorithm.output.silent and folder is not None:
        raise Refused(
            f"expected no folder with the output {plan.algorithm.output}, which allows nothing "
            "else to leave, got one; leave it out, or choose another output, such as uniform()"
        )
    loader = _loader(data, plan)
    memory = remembered(
        plan=plan,
        rng=rng,
        budget=budget,
        folder=None if folder is None else Path(folder),
        resume=resume,
        keep=keep,
        fingerprint=loader.fingerprint if loader else none,
    )
    return Run(
        model,
        optimizer,
        _batches(loader, plan, memory),
        plan=plan,
        memory=memory,
        execution=execution,
    )


def _require_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(
            f"expected {name} to be a {kind.__name__}, got a {type(value).__name__}; pass {example}"
        )


def _loader(data: Any, plan: Plan) -> Loader | None:
    if isinstance(plan.sampling, Stated):
        if data is not None:
            raise ValueError(
                "expected data=None with a Stated sampling, whose loader has the data, got "
                f"a {type(data).__name__}; pass None"
            )
        return None
    return data if isinstance(data, Loader) else Loader(data)


def _batches(
    loader: Loader | None, plan: Plan, memory: Memory
) -> Callable[[range], Iterator[Batch]]:
    sampling = plan.sampling
    if isinstance(sampling, Stated):
        return lambda steps: sampling.batches(num_records=plan.records, steps=steps)
    alike = all(stage.sampling == sampling for stage, _ in plan.stages)
    scheme = sampling if alike else Scheduled(plan.stage, sampling.relations)
    assert isinstance(scheme, Draws) and loader is not None
    return lambda steps: loader.batches(
        scheme, num_records=plan.records, steps=steps, rng=memory.sampling
    )


@contextmanager
def _own_randomness(rng: Rng) -> Iterator[None]:
    """Draw dropout and augmentation from this key, and leave torch's own generator alone.

    How far that one had moved would tell the sizes of batches, to whoever sees its state.
    """
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.words(1)[0] >> np.uint64(1)))
        # Of a seed torch's Mersenne Twister on the CPU takes 32 bits, which can be tried out. Its
        # state is 624 words of 32 bits, each in 64, after three of bookkeeping.
        state = torch.get_rng_state()
        drawn = rng.words(624, start=1) >> np.uint64(32)
        state.view(torch.int64)[3:627] = torch.from_numpy(drawn.astype(np.int64))
        torch.set_rng_state(state)
        yield


def _trainable(model: nn.Module) -> Params:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _add(gradient: Mapping[str, Tensor], params: Params) -> None:
    for name, extra in gradient.items():
        p = params[name]
        assert p.grad is not None
        p.grad += extra
