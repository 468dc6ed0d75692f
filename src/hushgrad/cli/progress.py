"""The progress of a run in the terminal: what was released, and what certification is at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hushgrad.run.guarantee import up
from hushgrad.run.odometer import LABEL, Odometer
from hushgrad.run.plan import Plan
from hushgrad.run.training import Run

LOGGER = "hushgrad.gradients"
"""The logger that certification tells of its progress."""

_SHOWN = ("loss", "clipped")


class Bar:
    """A bar with the steps and the time left, ε so far, and the private metrics if there are any.

    Written to stderr, so that stdout holds results alone.

    Args:
        plan: what is carried out.
        quiet: whether nothing is shown.
        taken: steps that an earlier process took.
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
        # Working ε out for a bar that nobody sees would cost time.
        self._visible = console.is_terminal and not quiet
        self._relay = Relay(self._tell, console)

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

    # A first step may certify for a minute, during which a still bar would look hung.
    def _tell(self, message: str) -> None:
        """Show what the library is at while a step goes on."""
        if self._visible:
            self._live.update(self._group(Text(message)))

    def _group(self, status: Text) -> Group:
        return Group(self._progress, status)

    def __enter__(self) -> Bar:
        self._live.start()
        self._relay.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._relay.__exit__(kind, error, trace)
        self._live.stop()


class Relay(logging.Handler):
    """While it is entered, shows what certification logs of its progress, and prints warnings.

    Nothing of it depends on more than the model and public numbers.

    Args:
        show: told each message.
        console: where warnings are printed.
    """

    def __init__(self, show: Callable[[str], None], console: Console) -> None:
        super().__init__()
        self._show, self._console = show, console
        self._logger = logging.getLogger(LOGGER)
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        if record.levelno >= logging.WARNING:
            # A warning must outlive the line of status that the next message replaces.
            self._console.print(record.getMessage(), style="yellow", markup=False)
        else:
            self._show(record.getMessage())

    def __enter__(self) -> Relay:
        self._level = self._logger.level
        # Only ever more talkative: a program that asked for debug messages goes on getting them.
        self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
        self._logger.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@contextmanager
def show_certification(*, quiet: bool) -> Iterator[None]:
    """Show the progress of a certification that comes before the first step.

    Args:
        quiet: whether nothing is shown.
    """
    console = Console(stderr=True, quiet=quiet)
    with console.status("checking the recipe") as status, Relay(status.update, console):
        yield
