"""Define MuSGD for one parameter in float64."""

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
