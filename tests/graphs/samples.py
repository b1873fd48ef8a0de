"""Provide small models, batches and training loops that the graphs' tests share."""

from contextlib import nullcontext

import torch
from torch import nn

from tests.graphs.fake_gpu import GPU
from torch_fastdet.ema import ModelEMA
from torch_fastdet.graphs import TrainStep
from torch_fastdet.optim import SGD, FusedStep
from torch_fastdet.switches.loss.yolov5 import ComputeLoss


class Net(nn.Module):
    """Compute two scales of output, with batch norm, a parameter that is never used, and an attribute."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.SiLU())
        self.heads = nn.ModuleList([nn.Conv2d(width, 8, 1), nn.Conv2d(width, 8, 1)])
        self.unused = nn.Parameter(torch.zeros(3))
        self.names = ["a", "b"]

    def forward(self, x, flip=False):
        x = self.stem(x.flip(-1) if flip else x)
        y = self.body(x)
        return [self.heads[0](x + nn.functional.interpolate(y, scale_factor=2.0)), self.heads[1](y)]


class HostSync(nn.Module):
    def forward(self, x):
        return x * float(x.mean())


def loss_of(outputs):
    return sum((output.float() ** 2).mean() for output in outputs)


def images(*shape, channels_last=False):
    x = torch.randn(*shape, device=GPU.device)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def three_passes(net, x):
    """Warm up, capture and replay a graphed net; return the gradients of the last pass."""
    for _ in range(3):
        net.zero_grad()
        loss_of(net(x)).backward()


def same_gradients(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), f"{name}: {(p.grad - q.grad).abs().max()}"


def same_state(a, b):
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values()):
        assert torch.equal(value, other), name


def train(model, batches, accumulate=1, amp=None, set_to_none=True, scaler=None):
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9, nesterov=True
    )
    for i, x in enumerate(batches):
        with torch.autocast("cuda", amp) if amp else nullcontext():
            loss = loss_of(model(x))
        (scaler.scale(loss) if scaler else loss).backward()
        if (i + 1) % accumulate == 0:
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if i + 1 < len(batches):
                optimizer.zero_grad(set_to_none=set_to_none)


class Detector(nn.Module):
    """Define a small YOLO: a backbone, three levels, and the attributes that ComputeLoss needs."""

    def __init__(self, classes=4):
        super().__init__()
        strides, width = (8, 16, 32), 16

        def block(c1, c2, stride):
            return nn.Sequential(nn.Conv2d(c1, c2, 3, stride, 1, bias=False), nn.BatchNorm2d(c2), nn.SiLU(inplace=True))

        self.stem = nn.Sequential(block(3, width, 2), block(width, width, 2), block(width, width, 2))
        self.down = nn.ModuleList([block(width, width, 2), block(width, width, 2)])
        self.heads = nn.ModuleList([nn.Conv2d(width, 3 * (5 + classes), 1) for _ in strides])
        detect = nn.Module()
        detect.na, detect.nc, detect.nl, detect.stride = 3, classes, 3, torch.tensor(strides).float()
        anchors = torch.tensor([[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]])
        detect.register_buffer("anchors", anchors.float().view(3, 3, 2) / detect.stride.view(3, 1, 1))
        self.model = [detect]
        self.hyp = {"box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}

    def forward(self, x):
        outputs = [self.stem(x)]
        for down in self.down:
            outputs.append(down(outputs[-1]))
        return [
            y.view(y.shape[0], 3, -1, *y.shape[2:]).permute(0, 1, 3, 4, 2)
            for y in (head(x) for head, x in zip(self.heads, outputs))
        ]

    def to_device(self):
        self.to(GPU.device)
        self.model[0].to(GPU.device)
        return self


def groups_of(model):
    """Group parameters as YOLOv5 does: biases, decayed weights, norm weights."""
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    norms = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    return [{"params": biases}, {"params": weights, "weight_decay": 5e-4}, {"params": norms}]


def some_targets(count, batch, classes=4):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.6 + 0.05), 1)
    image, label = torch.randint(0, batch, (count, 1)), torch.randint(0, classes, (count, 1))
    return torch.cat((image.float(), label.float(), box), 1).to(GPU.device)


def make_training(model, scale=2.0**12, interval=7):
    optimizer = SGD(groups_of(model), lr=0.01, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(GPU.device.type, init_scale=scale, growth_interval=interval)
    return ComputeLoss(model), optimizer, scaler, ModelEMA(model, tau=50)


def warm_up(optimizer, i):
    for j, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 * min(1.0, (i + 1) / 50) * (1 + j)
        group["momentum"] = 0.8 + 0.1 * min(1.0, i / 50)


def one_by_one(model, batches, accumulate=1, after=lambda i, ema, step: None):
    """Run the same training with separate calls; ``after`` is called after each batch."""
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    fused = FusedStep(optimizer, scaler, ema, 10.0)
    items = []
    for i, (images, targets) in enumerate(batches):
        warm_up(optimizer, i)
        with torch.autocast("cuda", torch.float16):
            loss, item = loss_of_batch(model(images.float() / 255), targets)
        items.append(item)
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            fused.step()
            optimizer.zero_grad()
        after(i, ema, None)
    return torch.stack(items), ema, scaler, optimizer


def in_graphs(model, batches, accumulate=1, after=lambda i, ema, step: None, **options):
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema, **options)
    items = []
    for i, (images, targets) in enumerate(batches):
        warm_up(optimizer, i)
        items.append(step(images, targets, update=(i + 1) % accumulate == 0))
        after(i, ema, step)
    return torch.stack(items), ema, scaler, optimizer, step


def some_batches(count, sizes=(64,)):
    batches = []
    for i in range(count):
        size = sizes[i % len(sizes)]
        images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, device=GPU.device)
        targets = some_targets(1 + i % 9, 2)
        batches.append((images, targets))
    return batches


def assert_same_training(model, plain, got, want):
    items, ema, scaler, optimizer = got[:4]
    want_items, want_ema, want_scaler, want_optimizer = want
    # The capacity for targets determines how sums over them are grouped, which does not change the training.
    torch.testing.assert_close(items, want_items, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(want_items).all()
    same_state(model, plain)
    same_state(ema.ema, want_ema.ema)
    assert ema.updates == want_ema.updates
    assert scaler.get_scale() == want_scaler.get_scale()
    states = zip(optimizer.state_dict()["state"].values(), want_optimizer.state_dict()["state"].values())
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in states)
