"""One-line errors for arguments that are not tensors. Torch's own error prints the operator's whole schema.

Call these only if ``not torch.jit.is_scripting()``: TorchScript checks types itself and does not compile that branch.
"""

from typing import Any

from torch import Tensor


def check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}, but a tensor is expected")


def check_optional_tensor(op: str, name: str, value: Any) -> None:
    if value is not None:
        check_tensor(op, name, value)


def check_tensor_list(op: str, name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{op}: {name} is a {type(values).__name__}, but a list of tensors is expected")
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            check_tensor(op, f"{name}[{i}]", value)
