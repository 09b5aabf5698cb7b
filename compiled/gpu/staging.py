"""What travels between host and device in a step: its inputs in one copy, its results in one or a few, both unawaited.

Host memory that a copy may still read is not written, and that a copy may still write is not read: inputs alternate
between two buffers, and results have a buffer of their own until somebody has waited for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled.device import Device, Event

_ALIGNMENT = 16
"""Bytes: enough for every dtype, and for loads of whole vectors."""

_FIRST_SIZE = 1 << 16

_DTYPES = {
    np.int64: torch.int64, np.int32: torch.int32, np.uint8: torch.uint8, np.float64: torch.float64,
    np.float32: torch.float32,
}  # fmt: skip


class Parcel:
    """Arrays on their way to the device. `add` gives the number under which `Inputs.send` returns each of them."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


@dataclass
class _Buffer:
    host: Tensor
    sent: Event


class Inputs:
    """Sends parcels to ``device``, which has one buffer: the next parcel overwrites it behind all work that was given
    to the device before."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._turns = [_Buffer(torch.empty(0, dtype=torch.uint8), device.event()) for _ in range(2)]
        self._there = torch.empty(0, dtype=torch.uint8, device=device.torch)

    def send(self, parcel: Parcel) -> list[Tensor]:
        """The parcel's arrays on the device, to be used before the next is sent."""
        offsets, size = _layout(parcel.arrays)
        buffer = self._turns[0]
        self._turns.reverse()
        buffer.sent.synchronize()  # of two steps ago: it is done
        if size > len(buffer.host):
            buffer.host = self._device.host((_room(size),), torch.uint8)
        if size > len(self._there):
            self._there = torch.empty(_room(size), dtype=torch.uint8, device=self._device.torch)
        target = buffer.host.numpy()
        for offset, array in zip(offsets, parcel.arrays, strict=True):
            target[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        if size:
            buffer.sent = self._device.send(buffer.host[:size], self._there[:size])
        return [
            _as(self._there, offset, _DTYPES[array.dtype.type], array.shape)
            for offset, array in zip(offsets, parcel.arrays, strict=True)
        ]


class Outputs:
    """Brings tensors from ``device`` to the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def fetch(self, tensors: Sequence[Tensor]) -> "Arrival":
        """Copy ``tensors`` without waiting for them."""
        offsets, size = _layout(tensors)
        fits = [buffer for buffer in self._free if len(buffer) >= size]
        buffer = fits[0] if fits else self._device.host((_room(size),), torch.uint8)
        self._free = [free for free in self._free if free is not buffer][-2:]
        there = [_as(buffer, offset, one.dtype, one.shape) for offset, one in zip(offsets, tensors, strict=True)]
        events = [self._device.fetch(one, target) for one, target in zip(tensors, there, strict=True)]
        return Arrival(self, buffer, there, events)

    def give_back(self, buffer: Tensor) -> None:
        """Its contents are read, or copied."""
        self._free.append(buffer)


class Arrival:
    """Tensors that are on their way to the host."""

    def __init__(self, outputs: Outputs, buffer: Tensor, there: Sequence[Tensor], events: Sequence[Event]) -> None:
        self._outputs = outputs
        self._buffer = buffer
        self._there = there
        self._events = events

    def wait(self) -> list[Tensor]:
        """Block until they are there. Once."""
        for event in self._events:
            event.synchronize()
        found = [one.clone() for one in self._there]
        self._outputs.give_back(self._buffer)
        return found


def _layout(items: Sequence[np.ndarray] | Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each item begins, and where the last one ends, in bytes."""
    offsets, size = [], 0
    for item in items:
        offsets.append(size)
        size += -(-item.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _as(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    flat = buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype)
    return flat if len(shape) == 1 else flat.view(*shape)


def _room(size: int) -> int:
    """Bytes to allocate for ``size``: so that the next, somewhat larger one fits as well."""
    return max(_FIRST_SIZE, 1 << (size - 1).bit_length())
