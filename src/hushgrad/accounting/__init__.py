"""Accounting: turns the event of a run into (ε, δ).

A run describes itself as an event, with one convention: a noise multiplier is noise ÷ the bound on
one record, under every relation. An accountant turns the event into a guarantee under a
`Relation`, or raises `Refused` and names what would work:

>>> from hushgrad.accounting import PLD, gaussian, poisson, repeated
>>> run = repeated(2250, poisson(0.04, gaussian(1.5)))
>>> f"{PLD.epsilon(run, delta=1e-5):.3f}"
'6.769'

| sampling | add/remove | replace-one | zero-out |
| --- | --- | --- | --- |
| full batch | PLD, RDP, zCDP, GDP | PLD, RDP, zCDP, GDP | PLD, RDP, zCDP, GDP |
| Poisson | PLD, RDP, GDP | PLD | PLD, RDP, GDP |
| truncated Poisson | PLD | PLD | PLD |
| without replacement | – | RDP | – |
| shuffled, unamplified | – | PLD, RDP, zCDP, GDP | PLD, RDP, zCDP, GDP |

A value of `hushgrad.sampling` states how batches are sampled; its `run_event` is the event of a
run. GDP is an approximation: it is shown for comparison and cannot calibrate. `calibrate` finds the
noise, the steps, the batch or the ε that is missing from a `Training`, and never claims too much
privacy. `group_epsilon` protects several records at once. `uniformly_stopped` accounts for a run
that stops at a step drawn in public. `closed_forms` has the papers' formulas, with their conditions
checked.
"""

from hushgrad.accounting.accountants import PLD, RDP, Accountant, Pld, Rdp
from hushgrad.accounting.additive import ACCOUNTANTS, GDP, ZCDP, Gdp, Zcdp
from hushgrad.accounting.calibration import Calibrated, Target, calibrate, least_noise, most
from hushgrad.accounting.events import gaussian, poisson, uniformly_stopped
from hushgrad.accounting.group import group_epsilon
from hushgrad.accounting.training import Training
from hushgrad.events import (
    MixedDpEvent,
    PureDpEvent,
    ShuffledDpEvent,
    joint_multiplier,
    on_one_batch,
    repeated,
)
from hushgrad.sampling.named import (
    SamplingOf,
    fixed_batches,
    full_batches,
    poisson_batches,
    shuffled_batches,
    truncated_batches,
)

__all__ = [
    "ACCOUNTANTS",
    "GDP",
    "PLD",
    "RDP",
    "ZCDP",
    "Accountant",
    "Calibrated",
    "Gdp",
    "MixedDpEvent",
    "Pld",
    "PureDpEvent",
    "Rdp",
    "SamplingOf",
    "ShuffledDpEvent",
    "Target",
    "Training",
    "Zcdp",
    "calibrate",
    "fixed_batches",
    "full_batches",
    "gaussian",
    "group_epsilon",
    "joint_multiplier",
    "least_noise",
    "most",
    "on_one_batch",
    "poisson",
    "poisson_batches",
    "repeated",
    "shuffled_batches",
    "truncated_batches",
    "uniformly_stopped",
]
