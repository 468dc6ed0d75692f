"""The minimiser of a strongly convex objective, with a certified bound on its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from hushgrad.glm.gradients import linear_gradients
from hushgrad.glm.losses import ScoreLoss
from hushgrad.glm.rows import RowSource
from hushgrad.types import Refused

_MOST_STEPS = 200
_HALVINGS = 40
_DENSE = 2048  # up to this many parameters the Hessian is a dense matrix


def minimiser(
    rows: RowSource,
    labels: Tensor,
    *,
    loss: ScoreLoss,
    strength: float,
    tilt: Float64[Tensor, "classes width"],
    tolerance: float,
) -> Float64[Tensor, "classes width"]:
    """Return a θ at which the gradient of Σℓ + Λ‖θ‖²/2 + <tilt, θ> has norm at most `tolerance`.

    So θ is within tolerance/Λ of the minimiser. It uses Newton's method and measures progress by
    the gradient's norm, which every damped Newton step decreases for a smooth, strongly convex
    objective. If the loss's slope has corners, Newton may get stuck; then accelerated descent
    continues, which cannot. Giving up instead would reveal something about the records.
    """

    def gradient(theta: Tensor) -> Tensor:
        slopes = linear_gradients(rows, labels, theta, loss=loss).slopes
        return rows.combine(slopes) + strength * theta + tilt

    theta = torch.zeros_like(tilt)
    now = gradient(theta)
    for _ in range(_MOST_STEPS):
        # The other half of the tolerance covers rounding in the gradient.
        if now.norm() <= tolerance / 2:
            return theta
        step = _newton_step(rows, labels, theta, now, loss=loss, strength=strength)
        share, moved = 1.0, gradient(theta - step)
        for _ in range(_HALVINGS):
            if moved.norm() < (1 - share / 4) * now.norm():
                break
            share /= 2
            moved = gradient(theta - share * step)
        else:
            break
        theta, now = theta - share * step, moved
    steepest = strength + loss.smoothness * float(rows.sq_norms.sum())
    return _accelerated_descent(gradient, theta, strength, steepest, tolerance)


def _accelerated_descent(
    gradient: Callable[[Tensor], Tensor],
    theta: Tensor,
    strength: float,
    steepest: float,
    tolerance: float,
) -> Tensor:
    """Do the same by accelerated descent, in a number of steps that is proved to suffice.

    With κ = steepest/Λ, each step multiplies the bound on F − F*, initially ‖∇F‖²/Λ, by 1 − 1/√κ,
    and ‖∇F‖² is at most 2·steepest·(F − F*).

    Reference: Nesterov 2018, Lectures on Convex Optimization, Theorem 2.2.3.
    """
    now, root = gradient(theta), math.sqrt(steepest / strength)
    ratio = 8 * root**2 * (float(now.norm()) / tolerance) ** 2
    most = math.ceil(root * math.log(max(ratio, 2.0))) + 1 if math.isfinite(ratio) else 0
    ahead = theta
    for _ in range(most):
        moved = ahead - gradient(ahead) / steepest
        ahead, theta = moved + (root - 1) / (root + 1) * (moved - theta), moved
        now = gradient(theta)
        if now.norm() <= tolerance / 2:
            return theta
    raise Refused(
        f"expected to find a minimiser with a gradient below {tolerance / 2:.3g}, which the proof "
        "needs, but got none: the loss is not as convex and smooth as it states; check the loss, "
        'raise the regularization, or use algorithm "sgd"'
    )


def _newton_step(
    rows: RowSource,
    labels: Tensor,
    theta: Tensor,
    gradient: Tensor,
    *,
    loss: ScoreLoss,
    strength: float,
) -> Tensor:
    """Return H⁻¹·gradient, H the Hessian of the regularised objective."""
    z = rows.scores(theta)
    y = torch.cat([labels, labels.new_zeros(len(z) - rows.count)])
    if theta.numel() <= _DENSE:
        hessian = _hessian(rows, _curvatures(z, y, loss), strength)
        step: Tensor = torch.linalg.solve(hessian, gradient.reshape(-1))
        return step.reshape(theta.shape)

    def product(v: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(np.ascontiguousarray(v)).reshape(theta.shape)
        along = rows.scores(direction)
        bent = torch.func.jvp(lambda s: _slopes(s, y, loss), (z,), (along,))[1]
        return (rows.combine(bent) + strength * direction).reshape(-1).numpy()

    size = theta.numel()
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    found, _ = cg(operator, gradient.reshape(-1).numpy(), rtol=1e-6, maxiter=10 * size)
    return torch.from_numpy(found).reshape(theta.shape)


def _slopes(z: Tensor, y: Tensor, loss: ScoreLoss) -> Tensor:
    return loss.derivative(z, y) if loss.vector else loss.derivative(z[:, 0], y)[:, None]


def _curvatures(z: Tensor, y: Tensor, loss: ScoreLoss) -> Float64[Tensor, "n k k"]:
    """Return ℓ''(z) of each record: one column for each direction of the scores."""
    columns = []
    for axis in torch.eye(z.shape[1], dtype=z.dtype):
        along = axis.expand_as(z).contiguous()
        columns.append(torch.func.jvp(lambda s: _slopes(s, y, loss), (z,), (along,))[1])
    return torch.stack(columns, 2)


def _hessian(
    rows: RowSource, curvatures: Float64[Tensor, "n k k"], strength: float
) -> Float64[Tensor, "size size"]:
    classes, width = curvatures.shape[1], rows.width
    blocks = torch.zeros(classes, width, classes, width, dtype=torch.float64)
    for a in range(classes):
        for b in range(a + 1):
            blocks[a, :, b, :] = rows.gram(curvatures[:, a, b])
            blocks[b, :, a, :] = blocks[a, :, b, :]
    size = classes * width
    return blocks.reshape(size, size) + strength * torch.eye(size, dtype=torch.float64)
