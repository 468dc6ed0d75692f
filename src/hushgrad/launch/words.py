"""A guarantee in words, for readers who have never met an ε."""

from __future__ import annotations

import math
from importlib.metadata import version

from hushgrad.ledger.records import figure
from hushgrad.run.guarantee import Guarantee, up
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


def in_words(guarantee: Guarantee) -> str:
    """What ε and δ mean, in a few sentences; or why there is no guarantee.

    Args:
        guarantee: that of a run, however far it came.

    >>> import hushgrad as hg
    >>> plan = hg.plan(records=1000, batch=100, epochs=1, noise_multiplier=0.0, delta=1e-5)
    >>> in_words(Guarantee(plan, plan.steps, reproducible=False))[:26]
    'This model is not private:'
    """
    if not guarantee.steps_taken:
        return (
            "There is no guarantee: the run has taken no private step, so the model is not its own."
        )
    epsilon, delta = guarantee.epsilon_if_secret, guarantee.delta
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

    The belief leaves δ aside, the test does not. Both are rounded up.

    Args:
        epsilon: ε.
        delta: δ.

    >>> examples(1.0, 1e-5).partition("a belief of ")[2].partition("; ")[0]
    '73.2 % at most'
    """
    odds = math.exp(-epsilon)
    # Bayes: even odds before are odds of e^ε after, at most.
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
    if epsilon > 700:  # e^710 is no float
        return "over 1e+304"
    factor = math.exp(epsilon)
    return figure(factor, up=True, digits=3 if factor < 1000 else 2)


def model_card(guarantee: Guarantee) -> str:
    """The section on privacy for a model card, in Markdown: what is claimed, and on what it rests.

    Every number is from `guarantee.to_dict()`. A model that is not private is called so.

    Args:
        guarantee: that of a run.
    """
    facts = guarantee.to_dict()
    plan, trained = facts["plan"], f"{facts['steps_taken']} of {facts['steps_planned']}"
    rows = {
        "Guarantee": guarantee.headline,
        "Protected": f"one record of the training data ({facts['relation']})",
        "Records": f"{plan['records']}, a public number",
        "Sampling": plan["sampling"],
        "Noise multiplier": f"{plan['noise_multiplier']:.6g}",
        "Clipping": plan["clip"],
        "Steps": f"{trained} planned ones",
        "Accountant": str(facts["accountant"]).upper(),
        "Algorithm": f"{plan['algorithm']}, which returns {facts['returns']}",
        "Made with": f"hushgrad {version('hushgrad')}",
    }
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    said = (*facts["assumptions"], *(f"not counted: {what}" for what in facts["not_counted"]))
    lines = [f"- {line}" for line in (*said, *facts["warnings"])]
    return "\n".join(
        ["## Privacy", "", in_words(guarantee), "", "| | |", "| --- | --- |", *table, "", *lines]
    )
