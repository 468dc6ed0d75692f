"""A guarantee in words, for readers who have never met an ε."""

from __future__ import annotations

import math
from dataclasses import replace

from hushgrad.guarantee import Guarantee, up
from hushgrad.ledger.records import figure
from hushgrad.types import Relation

_NEIGHBOURS = {
    Relation.ADD_REMOVE: "any one record was part of the training data or not",
    Relation.REPLACE_ONE: "any one record of the training data was this or any other",
    Relation.ZERO_OUT: "any one record of the training data was there or blanked out",
}

NOT_COVERED = (
    "What is true of the records as a whole: a model that learns that smoking harms will say so "
    "of a smoker who was in the data, and would say so had they not been.",
    "Several records together. If one person has k records, their ε is some k times as large, or "
    "more: hushgrad account --group k tells.",
    "Other releases from the same data: their ε add up. A ledger (--ledger) keeps count.",
    "Choices made by looking at the data beforehand, such as settings tuned on it.",
    "Records that are not training data: the test records, and what a model was pretrained on.",
    "Side channels such as timing, and whoever can read this computer's memory.",
)
"""What the guarantee does not say."""


def if_secret(guarantee: Guarantee) -> float:
    """ε of a run, had nobody known its seed; the plan's and what was charged beyond it."""
    return replace(guarantee, reproducible=False).epsilon


def in_words(guarantee: Guarantee) -> str:
    """What the two numbers mean, in a few sentences; or why there is no guarantee."""
    epsilon, delta = if_secret(guarantee), guarantee.delta
    if epsilon == math.inf:
        return (
            "This model is not private: no noise was added, and it may give away any record of the "
            "training data."
        )
    meaning = (
        f"The model was trained so that it comes out almost the same whether "
        f"{_NEIGHBOURS[guarantee.plan.relation]}. Almost is made precise by two numbers. "
        f"ε = {up(epsilon)}: but for δ, seeing the model, and all else that the run released, "
        f"changes the odds of any conclusion about that record by a factor of at most e^ε = "
        f"{_factor(epsilon)}. {examples(epsilon, delta)} "
        f"δ = {figure(delta, up=True)}: by how much the probability of any outcome may exceed what "
        "this factor allows."
    )
    if guarantee.reproducible:
        return (
            "This run is reproducible, and so it is not private: it was made with a seed, and "
            "whoever knows the seed can take the noise away again. Had a secret key been used, "
            "this would hold. " + meaning
        )
    return meaning


def examples(epsilon: float, delta: float) -> str:
    """What someone who sees the model can find out about one record at most.

    The belief leaves δ aside, the test does not.
    """
    odds = math.exp(-epsilon)
    belief = math.ceil(1000 * (1 / (1 + odds))) / 10
    # Of (ε, δ)-DP: power ≤ e^ε·α + δ, and power ≤ 1 − e^−ε·(1 − δ − α) from the other side.
    power = 1 - odds * (1 - delta - 0.01)
    if epsilon < 5:  # above, that bound is more than 1
        power = min(power, math.exp(epsilon) * 0.01 + delta)
    found = math.ceil(1000 * power) / 10
    return (
        f"Someone who thinks it as likely as not that a certain record was used could be brought "
        f"to a belief of {belief:g} % at most; and a test that is wrong for 1 in 100 records that "
        f"were not used can find at most {found:g} in 100 that were."
    )


def _factor(epsilon: float) -> str:
    """e^ε in a few digits, rounded up."""
    if epsilon > 700:
        return "over 1e+304"
    factor = math.exp(epsilon)
    return figure(factor, up=True, digits=3 if factor < 1000 else 2)
