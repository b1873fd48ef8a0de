"""One-line errors for arguments that are not tensors. Torch's own error prints the operator's whole schema.

Call these only if ``not torch.jit.is_scripting()``: TorchScript checks types itself and does not compile that branch. Arguments come
by their names.
"""

from typing import Any

from torch import Tensor


def check_tensors(op: str, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, but a tensor is expected")


def check_optional_tensors(op: str, **values: Any) -> None:
    check_tensors(op, **{name: value for name, value in values.items() if value is not None})


def check_tensor_lists(op: str, **values: Any) -> None:
    for name, tensors in values.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{op}: {name} is a {type(tensors).__name__}, but a list of tensors is expected")
        for i, value in enumerate(tensors):
            if not isinstance(value, Tensor):
                check_tensors(op, **{f"{name}[{i}]": value})
