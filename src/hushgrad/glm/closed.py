"""A linear model's loss that knows its own per-sample gradients, for `hg.train`.

It is an ordinary loss of a batch, so every algorithm takes it; its gradients come in closed form,
as the factors ℓ'(z, y) and x that any other linear layer leaves, without autograd or a tape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hushgrad.glm.losses import ScoreLoss
from hushgrad.persample import Gradients
from hushgrad.persample.factors import Dense, Outer, Use
from hushgrad.persample.gradients import Key
from hushgrad.persample.records import MULTIPLE, count, pad, padded_size
from hushgrad.types import Batch, Params, Refused


@dataclass(frozen=True)
class LinearLoss:
    """ℓ(<θ, x> + bias, y) of a batch `(x, y)`, one value for each record.

    >>> from hushgrad.glm.losses import logistic
    >>> loss = LinearLoss(nn.Linear(3, 1), logistic())
    >>> loss((torch.zeros(2, 3), torch.tensor([1.0, -1.0]))).shape
    torch.Size([2])
    """

    model: nn.Linear
    loss: ScoreLoss

    def __call__(self, batch: Batch) -> Tensor:
        x, y = batch
        return self.loss.value(self._scores(x), y)

    def _scores(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(x)
        return scores if self.loss.vector else scores.squeeze(-1)

    @torch.no_grad()
    def per_sample(self, params: Params, batch: Batch) -> Gradients:
        """Per-sample gradients of the model's parameters, for a batch that has records."""
        names = {id(p): name for name, p in params.items()}
        own = [p for p in self.model.parameters() if p.requires_grad]
        if names.keys() != {id(p) for p in own}:
            raise Refused(
                "expected the linear model's own parameters, got others; train "
                "dict(model.named_parameters()) of the model that the loss was made with"
            )
        size = count(batch)
        padded = padded_size(size, MULTIPLE)
        x, y = pad(batch, size, padded)
        scores = self._scores(x)
        slopes = self.loss.derivative(scores, y)
        slopes = slopes if self.loss.vector else slopes.unsqueeze(-1)
        factors: dict[str, dict[Key, Use]] = {name: {} for name in params}
        weight, bias = self.model.weight, self.model.bias
        if id(weight) in names:
            factors[names[id(weight)]][0,] = Outer(x.unsqueeze(1), slopes.unsqueeze(1))
        if bias is not None and id(bias) in names:
            factors[names[id(bias)]][0,] = Dense(slopes)
        return Gradients(factors, params, self.loss.value(scores, y)[:size], padded)
