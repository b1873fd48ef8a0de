"""Works on lists of tensors in one launch, in place: moving average, SGD, unscale, norm and clip.

All functions take tensors of float16, bfloat16, float32 and float64, also mixed, of any sizes and strides, on one device. Tensors
with the same index have the same shape. Nothing is copied or made contiguous: tensors of one index with the same memory layout are read
16 bytes at a time, others element by element. Arithmetic is float32, or float64 if one of the tensors of that index is float64. No
function waits for the GPU, and all can be captured in a CUDA graph, to which the list belongs. Autograd records none of them; they count
as in-place operations on the tensors that they write, which may be leaves (parameters), but not results of recorded operations.

Common errors (RuntimeError, raised before anything is written): lists of different lengths; tensors of different shapes or
devices; integer, complex or sparse tensors; an expanded tensor that would be written. The message names the list and the index.
"""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def multi_tensor_ema_(averages: list[Tensor], values: list[Tensor], decay: float | Tensor) -> None:
    """Compute ``v *= decay; v += (1 - decay) * x`` for each v of ``averages`` and x of ``values``, in one launch.

    Args:
        averages: tensors to update; their types and strides may differ from those of ``values``.
        values: what to average.
        decay: a number, or a one-element tensor on the same device, read when the kernel runs. Give it in float64: in
            float32, 1 - 0.9999 is off by 1.7e-4.

    Behavior: ModelEMA of YOLOv5; the results are bitwise identical in float32 and float64.
    """
    if isinstance(decay, Tensor):
        torch.ops.torch_fastdet.multi_tensor_ema_(averages, values, decay)
    else:
        torch.ops.torch_fastdet.multi_tensor_ema_(averages, values, decay)


def _on_device(value: float | Tensor, params: list[Tensor]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full(
        [], value, dtype=torch.float64, device=params[0].device if len(params) > 0 else torch.device("cpu")
    )


def _needed_buffers(params: list[Tensor], momentum_buffers: list[Tensor], momentum: float | Tensor) -> list[Tensor]:
    """Return ``momentum_buffers``, or an empty list where ``momentum`` is the number 0."""
    given = "a tensor"
    if not isinstance(momentum, Tensor):
        if momentum == 0.0:
            return momentum_buffers[:0]
        given = str(momentum)
    if len(momentum_buffers) == 0 and len(params) > 0:
        raise RuntimeError(
            f"multi_tensor_sgd_: momentum is {given}, but momentum_buffers is empty; one buffer for each tensor of params is expected"
        )
    return momentum_buffers


@checked
def multi_tensor_sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    is_first_step: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Perform one step of ``torch.optim.SGD`` over a list, in one launch.

    Args:
        params: parameters, updated; their dtypes and strides may differ from those of ``grads`` and ``momentum_buffers``.
        grads: gradients; they change only where ``grad_scale`` is given.
        momentum_buffers: one for each parameter, updated; an empty list where ``momentum`` is 0. One that is a tensor and 0 leaves
            them as they are.
        lr: learning rate: a number, or a one-element tensor on the device, read when the kernel runs; so is momentum.
        momentum: this and the next four are torch.optim.SGD's.
        dampening: of the gradient in the momentum.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        maximize: step up the gradient.
        is_first_step: the buffers hold nothing yet and become the gradient, undamped. Zeros do the same where dampening is 0.
        grad_scale: a float32 scalar on the device; gradients are multiplied by its inverse first, in place, as GradScaler does.
        found_inf: a float32 scalar on the device; where it is not 0, nothing is written.

    Raises:
        ValueError: a negative lr, momentum or weight_decay.
        RuntimeError: momentum without buffers.

    Source: the update rule of https://pytorch.org/docs/stable/generated/torch.optim.SGD.html.
    """
    rest = dampening, weight_decay, nesterov, maximize, is_first_step, grad_scale, found_inf
    if isinstance(lr, Tensor) or isinstance(momentum, Tensor):
        # The overload takes both as tensors.
        buffers = _needed_buffers(params, momentum_buffers, momentum)
        numbers = _on_device(lr, params), _on_device(momentum, params)
        torch.ops.torch_fastdet.multi_tensor_sgd_(params, grads, buffers, *numbers, *rest)
    else:
        torch.ops.torch_fastdet.multi_tensor_sgd_(params, grads, momentum_buffers, lr, momentum, *rest)


@checked
def multi_tensor_unscale_(grads: list[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    """Multiply each gradient by ``1 / scale``, in place, and set ``found_inf`` to 1 where one of them was not finite.

    Args:
        grads: gradients, updated.
        scale: float32 scalar on the device; its inverse is taken in float64 and rounded to float32, as GradScaler does.
        found_inf: float32 scalar on the device; left as it is where all gradients are finite.

    Raises:
        RuntimeError: a scale or found_inf that is not a tensor of one float element on the device.
    """
    torch.ops.torch_fastdet.multi_tensor_unscale_(grads, scale, found_inf)


@checked
def multi_tensor_norm(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors as one vector.

    Args:
        tensors: tensors of any shapes.

    Returns:
        A scalar on their device, of the dtype that they promote to: float16 where all are float16, float32 where they are float16 and
        bfloat16. Computed in float32 (float64 where one of them is float64) and rounded once, in a fixed order: the same tensors give
        the same bits in every run. An empty list gives 0, float32, on the CPU.
    """
    return torch.ops.torch_fastdet.multi_tensor_norm(tensors)


@checked
def multi_tensor_clip_grad_norm_(grads: list[Tensor], max_norm: float) -> Tensor:
    """Multiply the gradients by ``min(max_norm / (norm + 1e-6), 1)``, in place, in two launches.

    Args:
        grads: gradients, updated.
        max_norm: the norm to clip to.

    Returns:
        The norm before, as :func:`multi_tensor_norm` gives it. The factor comes from the norm before it is rounded.
    """
    return torch.ops.torch_fastdet.multi_tensor_clip_grad_norm_(grads, max_norm)
