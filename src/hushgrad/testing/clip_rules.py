"""Does a clipping rule keep its bound, whatever the gradients are?"""

from __future__ import annotations

import torch
from torch import Tensor

from hushgrad.clipping.rules import Clip
from hushgrad.testing.requiring import require


def check_clip_rule(clip: Clip, groups: int = 1) -> None:
    """Check that a clipping rule keeps its bound, and treats each record on its own.

    The library clamps the weights of every rule to the bound that the rule states. This suite tells
    whether your rule would need the clamp.

    Args:
        clip: the rule, such as `clipping.custom(...)`.
        groups: the number of groups of parameters to try it with.

    Raises:
        AssertionError: if a weight exceeds the bound, is not finite, is not repeatable, or
            depends on other records in the batch.

    Example:
        >>> from hushgrad import clipping
        >>> check_clip_rule(clipping.automatic(), groups=3)
    """
    clip_norms = torch.tensor(clip.clip_norms(groups), dtype=torch.float64)
    bound, norms = clip.bound(groups), _norms(groups)
    for one in norms:
        weights, again = (clip.weigh(one.clone(), clip_norms) for _ in range(2))
        at = f"{clip.name} at norms {one.tolist()}"
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights)
        fix = "return one weight for each group of the one record that is given"
        require(shape == (groups,), f"{at}: a tensor of shape ({groups},)", shape, fix)
        fix = "give a norm of zero, a tiny and a huge one a weight of their own (torch.where)"
        require(bool(weights.isfinite().all()), f"{at}: finite weights", weights.tolist(), fix)
        length = float((weights * one).square().sum().sqrt())
        fix = "shorten the weights, or state a larger bound"
        require(length <= bound * (1 + 1e-9), f"{at}: a norm up to {bound:.6g}", length, fix)
        fix = "draw no random numbers and keep no state in a rule"
        same = torch.equal(weights, again)
        require(same, f"{at}: {weights.tolist()} again", again.tolist(), fix)
    together, last = clip.weights(norms), torch.tensor(groups - 1)
    for i, one in enumerate(norms):
        alone, turned = clip.weights(one[None])[0], clip.weights(norms[i:].flip(0))[-1]
        came = torch.stack([alone, together[i], turned])
        fix = "compute them from that record's norms only, by elementwise operations"
        expected = f"{clip.name}: the same weights for a record alone and in a batch"
        require(bool((came == alone).all()), expected, came.tolist(), fix)
    for bad in (torch.nan, torch.inf):
        came = clip.weights(torch.stack([norms[0], norms[1].index_fill(0, last, bad)]))
        holds = torch.equal(came[0], together[0]) and not came[1].any()
        expected = f"{clip.name}: weight 0 at a norm of {bad}, the other record unmoved"
        require(holds, expected, came.tolist(), "leave Clip.weights as it is")


def _norms(groups: int) -> Tensor:
    """Return norms of all magnitudes: equal in all groups, in one group only, and random."""
    sizes = torch.tensor([0, 1e-30, 1e-12, 1e-3, 0.5, 1, 2, 1e3, 1e12, 1e30]).double()[:, None]
    one_only = torch.eye(groups, dtype=torch.float64)[0]
    random = torch.randn(40, groups, generator=torch.Generator().manual_seed(0)).double()
    rows = [sizes.expand(-1, groups), sizes * one_only, sizes * one_only.flip(0)]
    return torch.cat([*rows, random.exp(), (20 * random).clamp(-60, 60).exp()])
