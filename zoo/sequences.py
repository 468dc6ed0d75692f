"""Networks for sequences of vectors: recurrent, and a transformer's encoder."""

from __future__ import annotations

from torch import Tensor, nn


class LastStep(nn.Module):
    """A linear head on the last output of an LSTM."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        return self.head(outputs[:, -1])


class Encoder(nn.Module):
    """A transformer encoder in four heads, with a linear head on the mean of its outputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))
