"""Names of devices in run files and on the command line: `cpu`, `cuda:0`, `cuda:0-3`.

Reads names; `impl.engine.placement` knows which devices this machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

    A draft without a device of its own is on the target's first. Several target devices have a core
    each, and the draft worker the next one, where no cores are given.

    Raises:
        ValueError: names the field.
    """
    values = dict(placement)
    if (names := values.get("target_devices")) is not None:
        targets = values["target_devices"] = _read("target_devices", names)
        values.setdefault("draft_device", targets[0])
        if len(targets) > 1:  # each device's process has a core of its own
            values.setdefault("target_cores", tuple(range(len(targets))))
            values.setdefault("draft_cores", (len(targets),))
    if (name := values.get("draft_device")) is not None:
        found = _read("draft_device", name)
        if len(found) > 1:
            raise ValueError(f"draft_device: {name} is more than one device")
        values["draft_device"] = found[0]
    return values


def check_devices(placement: Placement) -> None:
    """Raises `ValueError` for devices that cannot make up one target."""
    targets = placement.target_devices
    if "cpu" in targets and set(targets) != {"cpu"}:
        raise ValueError("target_devices: are either all GPUs or all cpu")
    twice = [name for name in targets if name != "cpu" and targets.count(name) > 1]
    if twice:
        raise ValueError(f"target_devices: {twice[0]} is listed twice")
    if placement.convention == "pooled" and targets != ("cpu",):
        raise ValueError("convention: pooled is for one target device, a CPU; drop it")
    if len(placement.target_cores) % len(targets):
        raise ValueError(
            f"target_cores: {len(placement.target_cores)} cannot be shared out evenly among "
            f"{len(targets)} target_devices; give a multiple"
        )


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
