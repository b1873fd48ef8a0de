"""MuSGD for one parameter, from the definition, in float64."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Take five steps of X <- a X + b (X X') X + c (X X')(X X') X from X = matrix / its norm."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / (matrix.double().norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


class Parameter:
    """A parameter of a group with ``use_muon``, and its two momentum buffers."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value.detach().double().cpu()
        self.of_muon = torch.zeros_like(self.value)
        self.of_sgd = torch.zeros_like(self.value)

    def step(self, grad: torch.Tensor, lr, momentum, weight_decay, nesterov, muon, sgd) -> None:
        grad = grad.double().cpu()
        self.of_muon = momentum * self.of_muon + (1 - momentum) * grad
        update = momentum * self.of_muon + (1 - momentum) * grad if nesterov else self.of_muon
        rows, columns = update.shape[-2:]
        scale = max(1.0, rows / columns) ** 0.5
        moved = scale * orthogonalized(update.flatten(1)).view_as(update)
        self.value = self.value - lr * muon * moved
        grad = grad + weight_decay * self.value
        self.of_sgd = momentum * self.of_sgd + grad
        self.value = self.value - lr * sgd * (grad + momentum * self.of_sgd if nesterov else self.of_sgd)
