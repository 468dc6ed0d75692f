"""The clipping rules by name, for the command line and for recipes. To add one is one line here."""

from __future__ import annotations

from collections.abc import Callable

from hushgrad.clipping.rules import Clip, abadi, automatic, discard, normalize, reparameterized

CLIPS: dict[str, Callable[[float], Clip]] = {
    "automatic": lambda clip_norm: automatic(clip_norm=clip_norm),  # γ keeps its default
    "abadi": abadi,
    "normalize": normalize,
    "discard": discard,
    "reparameterized": reparameterized,
}
"""The rules by name; each takes its clipping norm R.

>>> CLIPS["abadi"](0.1)
abadi(clip_norm=0.1)
"""
