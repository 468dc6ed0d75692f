"""The progress of a run in the terminal: nothing in it but what was released."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hushgrad.guarantee import up
from hushgrad.odometer import LABEL, Odometer
from hushgrad.plan import Plan
from hushgrad.training import Run

_SHOWN = ("loss", "clipped")


class Bar:
    """A bar with the steps and the time left, ε so far, and the private metrics if there are any.

    Written to stderr, so that stdout holds results alone.
    """

    def __init__(self, plan: Plan, *, quiet: bool, taken: int = 0) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("steps", total=plan.steps, completed=taken)
        self._odometer = Odometer(plan)
        self._live = Live(self._group(Text("")), console=console, refresh_per_second=4)
        self._visible = console.is_terminal and not quiet

    def __call__(self, run: Run) -> None:
        """Show the run after a step."""
        self._progress.update(self._task, completed=run.steps_taken)
        if self._visible:
            self._live.update(self._group(Text(self.status(run))))

    def status(self, run: Run) -> str:
        """ε so far and the private metrics, smoothed, in one line."""
        spent = f"ε ≤ {up(self._odometer.epsilon(run.steps_taken))} {LABEL}"
        watched = run.plan.metrics.watched if run.plan.metrics else ()
        metrics = run.metrics
        shown = [f"{n} ≈ {metrics[n]:.3g}" for n in (*_SHOWN, *watched) if n in metrics]
        return " · ".join([spent, *shown, *(["(private metrics)"] if shown else [])])

    def _group(self, status: Text) -> Group:
        return Group(self._progress, status)

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
