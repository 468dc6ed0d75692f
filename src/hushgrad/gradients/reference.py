"""What other forms are compared with: runs of one record at a time, without random draws.

For contract suites and tests of one's own; `hushgrad.testing.check_per_sample` is made of these.

>>> import torch
>>> w = torch.nn.Parameter(torch.ones(2))
>>> loss, gradients = one_record(lambda x: x @ w, {"w": w}, torch.ones(1, 2), copies=1)
>>> loss.item(), gradients["w"].tolist()
(2.0, [1.0, 1.0])
"""

from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.comparison import COARSE, FINE, Precision
from hushgrad.gradients.forms.loop import one_record

__all__ = ["COARSE", "FINE", "Precision", "WithoutRandomness", "one_record"]
