"""Giving work to a device without waiting for it, and waiting for it where a time is taken."""

from __future__ import annotations

import torch


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on the device, without waiting for them."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values where the device can fetch them by itself; others as they are."""
    from_host = device.type == "cuda" and values.device.type == "cpu"
    return values.pin_memory() if from_host else values


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
