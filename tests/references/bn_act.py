"""Define BatchNorm2d in training with an activation, its gradients and running statistics, in float64: mean and
(biased) variance over N, H and W of each channel, and derivatives by the chain rule rather than autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Result:
    y: Tensor
    grad_x: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    mean: Tensor
    variance: Tensor  # biased

    def running(self, old_mean: Tensor, old_variance: Tensor, momentum: float, count: int) -> tuple[Tensor, Tensor]:
        """Return the new running statistics, in which the variance is unbiased."""
        unbiased = self.variance * count / (count - 1)
        return (
            (1 - momentum) * old_mean.double() + momentum * self.mean,
            (1 - momentum) * old_variance.double() + momentum * unbiased,
        )


def activate(z: Tensor, activation: str, slope: float) -> tuple[Tensor, Tensor]:
    """Return the activation and its derivative, with PyTorch's where it is not differentiable."""
    if activation == "silu":
        s = 1 / (1 + torch.exp(-z))
        return z * s, s * (1 + z * (1 - s))
    if activation == "relu":
        passes = ~(z <= 0)  # NaN too
        return torch.where(passes, z, torch.zeros_like(z)), passes.double()
    if activation == "leaky_relu":
        factor = torch.where(z > 0, torch.ones_like(z), torch.full_like(z, slope))
        return z * factor, factor
    if activation == "hardswish":
        value = z * torch.clamp(z + 3, 0, 6) / 6
        return value, torch.where(z < -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0))
    assert activation == "identity"
    return z, torch.ones_like(z)


def bias_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "silu",
    slope: float = 0.01,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the output in evaluation, where the running statistics are constants."""
    z = x.double()
    if mean is not None:
        z = z - mean.double().view(1, -1, 1, 1)
    if variance is not None:
        z = z / torch.sqrt(variance.double().view(1, -1, 1, 1) + eps)
    z = z if weight is None else z * weight.double().view(1, -1, 1, 1)
    z = z if bias is None else z + bias.double().view(1, -1, 1, 1)
    value = activate(z, activation, slope)[0]
    return value if residual is None else value + residual.double()


def bn_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    grad_y: Tensor,
    eps: float = 1e-5,
    activation: str = "silu",
    slope: float = 0.01,
    residual: Tensor | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Result:
    """Compute the definition; ``statistics``, mean and 1 / sqrt(variance + eps), replace those of x."""
    x, grad_y = x.detach().double(), grad_y.detach().double()
    channels = (1, -1, 1, 1)
    gamma = torch.ones(x.shape[1], device=x.device).double() if weight is None else weight.detach().double()
    beta = torch.zeros(x.shape[1], device=x.device).double() if bias is None else bias.detach().double()
    mean = x.mean((0, 2, 3)) if statistics is None else statistics[0].double()
    variance = ((x - mean.view(channels)) ** 2).mean((0, 2, 3))
    invstd = 1 / torch.sqrt(variance + eps) if statistics is None else statistics[1].double()
    normalised = (x - mean.view(channels)) * invstd.view(channels)
    value, slope_at = activate(normalised * gamma.view(channels) + beta.view(channels), activation, slope)
    # Gradients that are NaN are dropped where nothing passes, as in PyTorch's kernels.
    grad_z = torch.where(slope_at == 0, 0.0, grad_y * slope_at)
    grad_bias, grad_weight = grad_z.sum((0, 2, 3)), (grad_z * normalised).sum((0, 2, 3))
    count = x.shape[0] * x.shape[2] * x.shape[3]
    centered = grad_z - grad_bias.view(channels) / count - normalised * grad_weight.view(channels) / count
    grad_x = centered * (gamma * invstd).view(channels)
    y = value if residual is None else value + residual.detach().double()
    return Result(y, grad_x, grad_weight, grad_bias, mean, variance)
