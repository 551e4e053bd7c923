"""Names of devices in run files and on the command line: `cpu`, `cuda:0`, `cuda:0-3`.

Reads names; `impl.engine.placement` knows which devices this machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.decoder import Placement

_FORM = re.compile(r"(?P<kind>cpu)|cuda:(?P<first>\d+)(-(?P<last>\d+))?")


def parse_devices(names: str | Iterable[str]) -> tuple[str, ...]:
    """Device names with ranges spelt out, in the order in which they are given.

    >>> parse_devices("cuda:0-2,cuda:5")
    ('cuda:0', 'cuda:1', 'cuda:2', 'cuda:5')

    Raises:
        ValueError: a name of another form, a range that counts down, no name at all.
    """
    items = names.split(",") if isinstance(names, str) else names
    found = tuple(device for item in items for device in _spelt_out(str(item).strip()))
    if not found:
        raise ValueError("needs at least one device")
    return found


def with_devices(placement: Mapping[str, Any]) -> dict[str, Any]:
    """A placement's fields with its devices read.

    A draft without a device of its own is on the target's first. Several devices have a core each,
    those of the draft behind the target's, where no cores are given.

    Raises:
        ValueError: names the field.
    """
    values = dict(placement)
    if (names := values.get("target_devices")) is not None:
        targets = values["target_devices"] = _read("target_devices", names)
        values.setdefault("draft_device", targets[0])
    if (names := values.get("draft_device")) is not None:
        values["draft_device"] = ",".join(_read("draft_device", names))
    ranks = len(values.get("target_devices") or ("cpu",))
    drafts = len((values.get("draft_device") or "cpu").split(","))
    if ranks > 1 or drafts > 1:  # each device's process has a core of its own
        values.setdefault("target_cores", tuple(range(ranks)))
        values.setdefault("draft_cores", tuple(range(ranks, ranks + drafts)))
    return values


def check_devices(placement: Placement) -> None:
    """Raises `ValueError` for devices that cannot make up one target, or one draft each."""
    targets, drafts = placement.target_devices, placement.draft_devices
    _check_alike("target_devices", targets, "target_cores", placement.target_cores)
    _check_alike("draft_device", drafts, "draft_cores", placement.draft_cores)
    if placement.convention == "pooled" and targets != ("cpu",):
        raise ValueError("convention: pooled is for one target device, a CPU; drop it")


def _check_alike(field: str, devices: Sequence[str], own: str, cores: Sequence[int]) -> None:
    if "cpu" in devices and set(devices) != {"cpu"}:
        raise ValueError(f"{field}: are either all GPUs or all cpu")
    twice = [name for name in devices if name != "cpu" and devices.count(name) > 1]
    if twice:
        raise ValueError(f"{field}: {twice[0]} is listed twice")
    if len(cores) % len(devices):
        many = field if field.endswith("s") else f"{field}s"
        raise ValueError(
            f"{own}: {len(cores)} cannot be shared out evenly among {len(devices)} {many}; "
            "give a multiple"
        )
    shared = [core for core in cores if cores.count(core) > 1]
    if shared and len(devices) > 1 and devices[0] == "cpu":
        raise ValueError(f"{own}: {shared[0]} is listed twice; a device has cores of its own")


def _spelt_out(name: str) -> list[str]:
    form = _FORM.fullmatch(name)
    if form is None:
        raise ValueError(f"{name or 'nothing'} is no device; write cpu, cuda:0 or cuda:0-3")
    if form["kind"]:
        return ["cpu"]
    first, last = int(form["first"]), int(form["last"] or form["first"])
    if last < first:
        raise ValueError(f"{name} counts down; write cuda:{last}-{first}")
    return [f"cuda:{number}" for number in range(first, last + 1)]


def _read(field: str, names: Any) -> tuple[str, ...]:
    try:
        return parse_devices(names)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: {error}") from error
