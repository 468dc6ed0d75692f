"""Per-sample gradients, certified for the model before they are used.

- `per_sample(loss, params, batch)` takes them; `gradients_of(objective, batch)` does the same for
  whoever has an `Objective` at hand. `certificate_for` only certifies.
- `traced`, `dense`, `loop`, `recomputed`, `compiled` are the forms, `auto` the first that serves.
- `rule` and `operation` teach the form `traced` an operation of one's own.
- `constant` declares what is the same for every batch; `observe` takes other values of records.

Two more modules are for others: `gradients.factors`, for gradients in closed form, and
`gradients.reference`, for comparisons with runs of one record. All else is the room's own.
"""

from __future__ import annotations

from hushgrad.gradients.certification.certify import Certificate
from hushgrad.gradients.constants import constant, unwrap_constants
from hushgrad.gradients.factors.gradients import Gradients, difference, require_factors
from hushgrad.gradients.factors.kinds import Dense, OneHot, Outer
from hushgrad.gradients.forms.choices import (
    AnyGradients,
    Form,
    auto,
    compiled,
    dense,
    loop,
    recomputed,
    traced,
)
from hushgrad.gradients.guards import check_optimizer, check_parameters, restored
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.observed import RecordValues, observe
from hushgrad.gradients.taking import (
    certificate_for,
    forget_structure,
    gradients_of,
    per_sample,
    use_certificate,
)
from hushgrad.gradients.tracing.call import Call
from hushgrad.gradients.tracing.rules.registry import operation, rule

__all__ = [
    "AnyGradients",
    "Call",
    "Certificate",
    "Dense",
    "Form",
    "Gradients",
    "Objective",
    "OneHot",
    "Outer",
    "RecordValues",
    "auto",
    "certificate_for",
    "check_optimizer",
    "check_parameters",
    "compiled",
    "constant",
    "dense",
    "difference",
    "forget_structure",
    "gradients_of",
    "loop",
    "observe",
    "operation",
    "per_sample",
    "recomputed",
    "require_factors",
    "restored",
    "rule",
    "traced",
    "unwrap_constants",
    "use_certificate",
]
