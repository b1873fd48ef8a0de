"""What is not a tensor raises a one-line error, for every argument of every operator that wants a tensor or a list of them."""

import inspect
import typing

import pytest
import torch
from torch import Tensor

from torch_fastdet import ops

TENSOR = torch.ones(1, 4)
RIGHT = {
    Tensor: TENSOR,
    list[Tensor]: [TENSOR] * 2,
    list[int]: [4, 4],
    list[tuple[int, int]]: [(4, 4)],
    list[float]: [8.0],
    int: 5,
    float: 1.0,
}


def kind(hint) -> type:
    """Tensor, list[Tensor] and what else there is, whether None or a tensor may stand for it or not."""
    hints = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is list:
        return list[hints[0]]
    return hints[0] if hints else hint


def calls():
    for name in ops.__all__:
        function = getattr(ops, name)
        hints = {key: kind(hint) for key, hint in typing.get_type_hints(function).items()}
        parameters = inspect.signature(function).parameters
        right = {key: RIGHT[hints[key]] for key, p in parameters.items() if p.default is p.empty}
        for key in parameters:
            if hints[key] is Tensor:
                yield name, right | {key: [1]}, f"{key} is a list, but a tensor is expected"
            elif hints[key] == list[Tensor]:
                yield name, right | {key: 1}, f"{key} is a int, but a list of tensors is expected"
                yield name, right | {key: [TENSOR, "x"]}, rf"{key}\[1\] is a str, but a tensor is expected"


@pytest.mark.parametrize("name, arguments, sentence", list(calls()))
def test_what_is_no_tensor_is_one_sentence(name, arguments, sentence):
    with pytest.raises(TypeError, match=f"^{name}: {sentence}$"):
        getattr(ops, name)(**arguments)
