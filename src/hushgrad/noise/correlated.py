"""Noise that is correlated over the steps of a run: a matrix mechanism.

The noise of a step takes back a part of what the steps before it added, so that less of it is left
in the model after many steps, at the same guarantee. A release has no event of its own; the whole
run is one: it is reserved before the first step, and unused steps give nothing back.

A run with such noise needs its key to the end, one layout of the sums and one bound on a record.
`release` is given the tags of the run's releases so far, from which past draws are made again:

    noise = kind.at(noise_multiplier)
    released = release(bounded, noise, rng=rng, step=step, past=tags, buffer=buffer)
    tags.append(released.digest)

`buffer` is a `NoiseBuffer`, held by the run in memory alone: it is secret, saves time, and changes
nothing. A replayed step is given the tags of the steps before it. If its tag comes out as another
one, the run has forked: both go on from what they share, and are accounted for by `runs=2`.

Reference: Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization, Theorem 4; McKenna
2024, Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import dp_accounting
from dp_accounting import DpEvent

from hushgrad.events import Participation, repeated
from hushgrad.noise.kinds import Noise, Sampled, gaussian
from hushgrad.noise.optimal import Workload, least_error, prefix_sums
from hushgrad.noise.strategy import Strategy
from hushgrad.types import Refused, Relation


@dataclass(frozen=True)
class Correlated:
    """Gaussian noise that is mixed from the draws of several steps; `correlated` makes it.

    Args:
        strategy: the matrix C that mixes it; None until `fitted` has chosen one for a run.
        bands: the number of bands of C or C⁻¹; None to choose it from the sampling.
        inverse: whether C⁻¹ is banded, not C.
        workload: what becomes of a step's noise in later steps.

    Example:
        >>> from hushgrad.noise.strategy import banded
        >>> correlated(banded([1.0, 0.5])).memory(3)
        3
    """

    strategy: Strategy | None
    bands: int | None
    inverse: bool
    workload: Workload

    @property
    def name(self) -> str:
        """What reports call it."""
        return "correlated gaussian"

    @property
    def mixing(self) -> Strategy:
        """The matrix C, which must have been chosen."""
        if self.strategy is None:
            raise ValueError(
                "expected correlated noise with a strategy, got one that is to be fitted to a "
                "run; call fitted(sampling, num_steps=...) first"
            )
        return self.strategy

    def memory(self, step: int) -> int:
        """How many releases before this step's its noise depends on."""
        return self.mixing.memory(step)

    def at(self, noise_multiplier: float) -> Noise:
        """The noise of one release. Its own event is that of no privacy at all."""
        plain = gaussian(noise_multiplier)
        return replace(
            plain,
            name=self.name,
            event=dp_accounting.NonPrivateDpEvent(),
            strategy=self.mixing,
        )

    def fitted(self, sampling: Sampled, *, num_steps: int) -> Correlated:
        """The same with the strategy of the least error for this sampling and so many steps."""
        if self.strategy is not None:
            return self
        cycle = self._participation(sampling).cycle
        chosen = least_error(
            num_steps,
            cycle=cycle,
            bands=self.bands or cycle,
            inverse=self.inverse,
            workload=self.workload,
        )
        return replace(self, strategy=chosen)

    def run_event(
        self,
        noise_multiplier: float,
        *,
        sampling: Sampled,
        num_records: int,
        num_steps: int,
        runs: int = 1,
    ) -> DpEvent:
        """A whole run of steps that are all alike, as an event for an accountant.

        Where a record is in every batch of its turn, the run is one Gaussian release, of a
        sensitivity that counts all its turns. Where it is sampled, each turn is one
        Poisson-sampled release of the record's column of C. Runs on the same batches share their
        sampling, so that k of them are one of σ/√k.

        Args:
            noise_multiplier: σ, noise ÷ the bound on one record.
            sampling: the scheme that draws the batches.
            num_records: the public number of records.
            num_steps: the number of steps (T).
            runs: how many runs on the same batches are accounted for together.

        Raises:
            Refused: if the sampling does not go with this noise, or its matrix is not stable.
        """
        turns = self._participation(sampling)
        sigma = noise_multiplier / math.sqrt(runs)
        if sigma == 0:
            return dp_accounting.NonPrivateDpEvent()
        if num_steps == 0:
            return repeated(0, dp_accounting.GaussianDpEvent(sigma))
        self.mixing.require_stable(num_steps)
        if turns.rate == 1:
            moved = self.mixing.sensitivity(num_steps, cycle=turns.cycle)
            return dp_accounting.GaussianDpEvent(sigma / moved)
        moved = self.mixing.column_norm(num_steps)
        event = dp_accounting.GaussianDpEvent(sigma / moved)
        return sampling.run_event(event, num_records=num_records, num_steps=num_steps)

    def check(
        self, sampling: Sampled, *, relation: Relation, adaptive: bool = False, releases: int = 1
    ) -> None:
        """Refuse what the event of a run would not cover.

        Args:
            sampling: the scheme that draws the batches.
            relation: what makes two data sets neighbours.
            adaptive: whether the clipping norm changes from step to step.
            releases: how many sums are released at a step.

        Raises:
            Refused: if the sampling does not draw each record by itself, C has more bands than
                the sampling has groups, the clipping norm adapts, or a step releases several sums.
        """
        turns = self._participation(sampling)
        if adaptive:
            raise Refused(
                "expected one clipping norm for all steps with correlated noise, got one that "
                "adapts; clip by a fixed rule, or use Independent(gaussian)"
            )
        if releases != 1:
            raise Refused(
                f"expected one release at each step with correlated noise, got {releases}; use "
                "DP-SGD, or Independent(gaussian)"
            )
        if turns.rate < 1 and relation is Relation.REPLACE_ONE:
            raise Refused(
                "expected add-remove or zero-out with correlated noise on sampled batches, got "
                f"{relation.value}; state the guarantee for add-remove, or use "
                "Independent(gaussian)"
            )

    def _participation(self, sampling: Sampled) -> Participation:
        """When a record takes part, if this noise can be accounted for with it."""
        turns = sampling.participation
        if turns is None:
            raise Refused(
                "expected a sampling that draws each record by itself with correlated noise, got "
                f"{sampling.statement}; use CyclicPoisson(rate, cycle) or FullBatch()"
            )
        if turns.rate == 1:
            return turns
        inverse, bands = self.inverse, self.bands
        if self.strategy is not None:
            inverse, bands = self.strategy.inverse, self.strategy.bands
        if inverse and bands != 1:
            raise Refused(
                "expected every record of a group in its batch with a banded inverse, whose C is "
                f"not banded, got {sampling.statement}; use CyclicPoisson(1 / cycle, cycle), or "
                "leave inverse out"
            )
        if bands is not None and bands > turns.cycle:
            raise Refused(
                f"expected at most as many bands as the sampling has groups, {turns.cycle}, got "
                f"{bands}, with which noise would be shared by two turns of a record; use fewer "
                "bands, or CyclicPoisson(rate, cycle) with a longer cycle"
            )
        return turns


def correlated(
    strategy: Strategy | None = None,
    *,
    bands: int | None = None,
    inverse: bool = False,
    workload: Workload = prefix_sums,
) -> Correlated:
    """Gaussian noise that is correlated over steps, for `plan(noise=...)`.

    Args:
        strategy: the matrix C; left out, the plan fits the one of the least error.
        bands: how many bands (b) that has; as many as the sampling has groups, if left out.
        inverse: whether C⁻¹ is banded, not C. Its noise needs the last b − 1 steps only, but it is
            offered only where every record of a group is in its batch.
        workload: what becomes of a step's noise in later steps, which is what "least error" is
            about: `prefix_sums` for SGD, `momentum(0.9)` with momentum.

    Returns:
        A kind of noise. With `CyclicPoisson(rate, cycle)` at rate < 1 / cycle it takes at most
        `cycle` bands, under add/remove or zero-out. Of full batches independent noise has the
        least error that is possible, so correlating gains nothing there.

    >>> from hushgrad.sampling import CyclicPoisson
    >>> kind = correlated(bands=4).fitted(CyclicPoisson(0.01, cycle=4), num_steps=100)
    >>> [round(c, 2) for c in kind.mixing.coefficients]
    [0.68, 0.48, 0.41, 0.36]

    Reference: Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization.
    """
    if bands is not None and bands < 1:
        raise ValueError(f"expected bands >= 1, got {bands}; 1 band is independent noise")
    if strategy is not None:
        if bands not in (None, strategy.bands) or inverse not in (False, strategy.inverse):
            raise ValueError(
                "expected a strategy or the number of its bands, got both; leave bands out"
            )
        bands, inverse = strategy.bands, strategy.inverse
    return Correlated(strategy, bands, inverse, workload)
