"""What a checkpoint must contain so that a run of a plan can resume from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hushgrad.run.plan import Plan
from hushgrad.types import Refused

_FIELDS = {
    "plan": dict,
    "entry": str,
    "batches": str,
    "draw": str,
    "reproducible": bool,
    "run": dict,
    "keep": dict,
}
"""What a run's checkpoint holds; of "run", the memory reads the numbers of steps."""


def require_state(saved: Mapping[str, Any], plan: Plan, path: Path) -> None:
    """Refuse a checkpoint that is not one of a run of this plan."""
    wrong = [name for name, kind in _FIELDS.items() if type(saved.get(name)) is not kind]
    if not wrong:
        _require_same(plan, saved["plan"])
        steps = [saved["run"].get(name) for name in ("step", "taken")]
        # type(...) is int: a bool passes isinstance and is no number of steps.
        if not all(type(n) is int and 0 <= n <= plan.steps for n in steps):
            wrong = ["run"]
    if wrong:
        raise Refused(
            f"expected the checkpoint of a run in {path}, got one with invalid {', '.join(wrong)}; "
            "put an older copy in its place, or start another run"
        )


def _require_same(plan: Plan, saved: Mapping[str, Any]) -> None:
    # Through JSON, as the checkpoint's terms went: tuples become lists.
    now = json.loads(json.dumps(plan.terms()))
    changed = [f"{key} {saved.get(key)} → {now[key]}" for key in now if now[key] != saved.get(key)]
    if changed:
        raise Refused(
            f"expected the plan that the run began with, got {'; '.join(changed)}; resume with "
            "that plan, or start another run"
        )
