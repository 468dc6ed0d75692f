"""Events in, (ε, δ) out.

A run describes itself as an event, in one convention: a noise multiplier is noise ÷ the bound on
one record, whatever makes two data sets neighbours. An accountant turns the event into a guarantee
under a `Relation`, or refuses and says what would work:

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

GDP is an approximation: it is shown, and calibrates nothing. `calibrate` finds the noise, the
steps, the batch or the ε that is missing from a `Training`, always on the private side.
`group_epsilon` protects several records at once. `closed_forms` has the papers' own formulas, each
with its conditions checked.
"""

from hushgrad.accounting.accountants import PLD, RDP, Accountant, Pld, Rdp
from hushgrad.accounting.additive import ACCOUNTANTS, GDP, ZCDP, Gdp, Zcdp
from hushgrad.accounting.calibration import Guarantee, Target, calibrate, least_noise, most
from hushgrad.accounting.events import (
    PureDpEvent,
    ShuffledDpEvent,
    gaussian,
    joint_multiplier,
    on_one_batch,
    poisson,
    repeated,
    shuffled,
    truncated_poisson,
    without_replacement,
)
from hushgrad.accounting.group import group_epsilon
from hushgrad.accounting.training import (
    FULL,
    POISSON,
    WITHOUT_REPLACEMENT,
    Scheme,
    Training,
    truncated,
)

__all__ = [
    "ACCOUNTANTS",
    "FULL",
    "GDP",
    "PLD",
    "POISSON",
    "RDP",
    "WITHOUT_REPLACEMENT",
    "ZCDP",
    "Accountant",
    "Gdp",
    "Guarantee",
    "Pld",
    "PureDpEvent",
    "Rdp",
    "Scheme",
    "ShuffledDpEvent",
    "Target",
    "Training",
    "Zcdp",
    "calibrate",
    "gaussian",
    "group_epsilon",
    "joint_multiplier",
    "least_noise",
    "most",
    "on_one_batch",
    "poisson",
    "repeated",
    "shuffled",
    "truncated",
    "truncated_poisson",
    "without_replacement",
]
