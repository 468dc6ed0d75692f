"""The parts that per-sample gradients consist of, for whoever makes some of their own.

>>> import torch
>>> rows = Outer(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0]]]))  # one record, Wx + b
>>> rows.materialised().tolist()
[[[3.0, 4.0]]]
"""

from hushgrad.gradients.factors.choice import cost_of
from hushgrad.gradients.factors.gradients import Factors, Gradients, UseKey
from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer, Rows, Use
from hushgrad.gradients.factors.slots import Slots, in_turn

__all__ = [
    "Dense",
    "Factor",
    "Factors",
    "Gradients",
    "OneHot",
    "Outer",
    "Rows",
    "Slots",
    "Use",
    "UseKey",
    "cost_of",
    "in_turn",
]
