"""Forms are told apart by what they run, and their gradients add up."""

from __future__ import annotations

from typing import Any

import torch
from compare import private
from torch import nn
from uses import squared

from hushgrad.gradients import Form, loop, per_sample, traced


def test_two_forms_of_one_name_are_two_forms() -> None:
    layer, calls = nn.Linear(3, 5), []

    def named(label: str) -> Form:
        def run(*args: Any) -> Any:
            calls.append(label)
            return loop.run(*args)

        return Form("mine", run)

    loss, batch = squared(layer), torch.randn(8, 3)
    per_sample(loss, private(layer), batch, form=named("one"))
    calls.clear()
    per_sample(loss, private(layer), batch, form=named("other"))
    assert set(calls) == {"other"}


def test_gradients_of_two_forms_add_up() -> None:
    """The traced form pads its batch, the others do not."""
    layer, batch = nn.Linear(3, 5), torch.randn(5, 3)
    one, other = (
        per_sample(squared(layer), private(layer), batch, form=form) for form in (traced, loop)
    )
    for both in (one + other, other + one):
        for name, square in both.sq_norms().items():
            torch.testing.assert_close(square, 4 * other.sq_norms()[name], rtol=1e-3, atol=0)
