"""What is trained: two networks of torch, with the rows that a replica sees in each step."""

import torch
from torch import nn
from torch.nn import functional

#: Channels of ResNet-18's stages; each has two units.
_STAGES = (64, 128, 256, 512)
_CLASSES = 10


def perceptron(width=2048):
    """Return a network of three dense layers and 32 rows; the default has 33 MB of weights."""
    inputs, outputs = width // 2, width // 2 - 24
    network = nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )
    return network, torch.randn(32, inputs), torch.randint(outputs, (32,))


def resnet18(width=64):
    """Return ResNet-18 as it is used for small images, and 4 of them; 45 MB of weights."""
    channels, stages = width, []
    for stage, full in enumerate(_STAGES):
        inner = full * width // 64
        stages += [_Unit(channels, inner, stride=2 if stage else 1), _Unit(inner, inner)]
        channels = inner
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, _CLASSES),
    )
    return network, torch.randn(4, 3, 32, 32), torch.randint(_CLASSES, (4,))


class _Unit(nn.Module):
    """Two convolutions, beside a short way past them."""

    def __init__(self, channels, inner, stride=1):
        super().__init__()
        self.first = nn.Conv2d(channels, inner, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(inner)
        self.past = nn.Identity()
        if stride != 1 or channels != inner:
            past = nn.Conv2d(channels, inner, 1, stride, bias=False)
            self.past = nn.Sequential(past, nn.BatchNorm2d(inner))

    def forward(self, images):
        found = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(found)) + self.past(images))
