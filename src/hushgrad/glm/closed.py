"""A linear model's loss with per-sample gradients in closed form, for `hg.train`.

It is an ordinary loss of a batch, so every algorithm accepts it. Its gradients are given by the
factors ℓ'(z, y) and x, as for any other linear layer, but without autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.batches.records import count, pad, padded_size
from hushgrad.glm.losses import ScoreLoss
from hushgrad.glm.rows import MULTIPLE, scores_of
from hushgrad.gradients import Gradients
from hushgrad.gradients.factors import Dense, Outer, Use, UseKey, in_turn
from hushgrad.types import Batch, Params, Refused


@dataclass(frozen=True)
class LinearLoss:
    """The loss ℓ(<θ, x> + bias, y) of a batch `(x, y)`, one value for each record.

    >>> from hushgrad.glm.losses import logistic
    >>> loss = LinearLoss(nn.Linear(3, 1), logistic())
    >>> loss((torch.zeros(2, 3), torch.tensor([1.0, -1.0]))).shape
    torch.Size([2])
    """

    model: nn.Linear
    loss: ScoreLoss

    def __post_init__(self) -> None:
        self._require_plain()
        if not self.loss.vector and self.model.out_features != 1:
            raise Refused(
                f"expected one score for the loss {self.loss}, got {self.model.out_features}; use "
                "a loss of vectors such as multinomial(), or nn.Linear(…, 1)"
            )

    def _require_plain(self) -> None:
        """Require a plain `nn.Linear`: closed forms are not certified, so they must be known."""
        model = self.model
        hooked = type(model) is nn.Linear and (model._forward_hooks or model._forward_pre_hooks)
        if type(model) is not nn.Linear or hooked:
            raise Refused(
                f"expected a plain nn.Linear, got {type(model).__name__}"
                f"{' with hooks' if hooked else ''}, whose gradients may differ from the closed "
                "form; write the loss as a function of the batch, and it will be certified"
            )

    def __call__(self, batch: Batch) -> Tensor:
        x, y = batch
        scores: Tensor = F.linear(x, self.model.weight, self.model.bias)
        return self.loss.value(scores if self.loss.vector else scores.squeeze(-1), y)

    def _scores(self, x: Tensor) -> Tensor:
        """Return the scores by `scores_of`, in which a record's bits depend on its row only."""
        if x.dim() != 2:
            raise Refused(
                f"expected rows of features, [records, features], got {x.dim()} dimensions; "
                "flatten each record"
            )
        scores = scores_of(x, self.model.weight)
        if self.model.bias is not None:
            scores = scores + self.model.bias
        return scores if self.loss.vector else scores.squeeze(-1)

    @torch.no_grad()
    def per_sample(self, params: Params, batch: Batch) -> Gradients:
        """Return per-sample gradients of the model's parameters, for a batch that is not empty."""
        self._require_plain()
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
        factors: dict[str, dict[UseKey, Use]] = {name: {} for name in params}
        weight, bias = self.model.weight, self.model.bias
        if id(weight) in names:
            factors[names[id(weight)]][0,] = Outer(x.unsqueeze(1), slopes.unsqueeze(1))
        if bias is not None and id(bias) in names:
            factors[names[id(bias)]][0,] = Dense(slopes)
        return Gradients(factors, params, self.loss.value(scores, y)[:size], in_turn(size, padded))
