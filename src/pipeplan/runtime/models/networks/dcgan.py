"""DCGAN's generator (Radford et al. 2015): an image of 64 x 64 of 100 numbers, by transposed convolutions."""

from __future__ import annotations

from torch import Tensor, nn


class Growing(nn.Module):
    """A transposed convolution, a norm over the batch and a ReLU."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 2, padding: int = 1) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        self.norm, self.active = nn.BatchNorm2d(outputs), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[samples, channels, height, width], twice as high and wide."""
        result: Tensor = self.active(self.norm(self.grow(x)))
        return result


class Generator(nn.Module):
    """Four of them, then one to three colours."""

    def __init__(self, numbers: int = 100, width: int = 64) -> None:
        super().__init__()
        widths = [8 * width, 4 * width, 2 * width, width]
        pairs = zip(widths, widths[1:], strict=False)
        first = Growing(numbers, widths[0], stride=1, padding=0)
        self.layers = nn.ModuleList([first, *(Growing(*pair) for pair in pairs)])
        self.colours = nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """[samples, numbers] to [samples, 3, 64, 64] between -1 and 1."""
        x = input[:, :, None, None]
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.colours(x).tanh()
        return result
