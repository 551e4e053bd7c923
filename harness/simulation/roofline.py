"""How long a forward pass should take, from sizes and datasheets alone (Williams et al. 2009).

    seconds = max(bytes / bandwidth, operations / peak) + exchange + overhead

Bytes are the weights once and the keys and values of every sequence; operations are two for each
weight and new token, and the attention's. Tensor parallelism divides both and adds two all-reduces
a layer. Bandwidth and peak are the datasheet's times an assumed efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from harness.memory import DTYPE_BYTES, Shape


class Device(BaseModel):
    """One device; see `profiles/devices.yaml` for units, sources and what checked them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    checked: str
    bandwidth_gb_s: float = Field(gt=0)
    peak_tflops: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    layer_us: float = Field(ge=0)
    all_reduce_us: float = Field(ge=0)
    pass_us: float = Field(ge=0)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the datasheet's figures that kernels reach; assumed, equal for every device.

    Attributes:
        bandwidth: of the memory bandwidth, at a few tokens a pass.
        compute: of the peak, where a pass is bound by arithmetic.
    """

    bandwidth: float = 0.80
    compute: float = 0.60


@dataclass(frozen=True, slots=True)
class Roofline:
    """The passes of one model on some devices.

    Attributes:
        shape: the model's sizes.
        dtype: of weights, keys and values.
        device: each of them.
        devices: how many the model is split over (tensor parallel).
        efficiency: reached.
    """

    shape: Shape
    dtype: str
    device: Device
    devices: int = 1
    efficiency: Efficiency = Efficiency()

    def seconds(self, tokens: np.ndarray, batch_size: int, context: float) -> np.ndarray:
        """Seconds of passes over `tokens` new tokens in all.

        Args:
            tokens: of all sequences together, any shape.
            batch_size: sequences whose keys and values are read.
            context: tokens that each of them has.
        """
        efficiency, device = self.efficiency, self.device
        read = (self.read_bytes + self._kv_bytes(batch_size * context)) / self.devices
        memory = read / (device.bandwidth_gb_s * 1e9 * efficiency.bandwidth)
        operations = tokens * self._operations(context) / self.devices
        compute = operations / (device.peak_tflops * 1e12 * efficiency.compute)
        return np.asarray(np.maximum(memory, compute) + self._exchange(tokens) + self._overhead)

    @property
    def read_bytes(self) -> float:
        """Weights that a pass reads: all but an embedding table that is no output head."""
        return float(self._multiplied * DTYPE_BYTES[self.dtype])

    @property
    def _multiplied(self) -> int:
        shape = self.shape
        return shape.parameters - (0 if shape.tied else shape.vocab * shape.hidden)

    def _kv_bytes(self, tokens: float) -> float:
        return self.shape.kv_bytes(self.dtype, 1) * tokens

    def _operations(self, context: float) -> float:
        """For one new token: the weights', and QK and PV of the attention."""
        shape = self.shape
        return 2 * self._multiplied + 4 * shape.layers * shape.heads * shape.head_dim * context

    def _exchange(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds that all-reduced rows spend on the links: a ring sends 2 (n - 1) / n of them."""
        row = self.shape.hidden * DTYPE_BYTES[self.dtype]
        sent = 2 * (self.devices - 1) / self.devices * tokens * row
        return 2 * self.shape.layers * sent / (self.device.link_gb_s * 1e9)

    @property
    def _overhead(self) -> float:
        device = self.device
        reduced = 2 * device.all_reduce_us if self.devices > 1 else 0.0
        return 1e-6 * (self.shape.layers * (device.layer_us + reduced) + device.pass_us)
