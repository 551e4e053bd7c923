"""Hardware profiles: what passes of target and draft cost, derived from a roofline or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from harness.errors import UsageError
from harness.messages import describe, first_line, unknown
from harness.pairs import find_pair
from harness.simulation.roofline import Device, Roofline
from impl.ssd.budgeting import PassTimes

PROFILES = Path(__file__).with_name("profiles")
_DEVICES = "devices.yaml"


class PassModel(Protocol):
    """What passes of one model cost."""

    def seconds(self, tokens: np.ndarray, batch_size: int, context: float) -> np.ndarray:
        """Seconds by new tokens of all sequences together; `context` tokens in each of them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine that runs a pair.

    Attributes:
        name: file or file name without its ending.
        kind: roofline or measured.
        target_devices, draft_devices: how many each model owns.
        verify_idle, verify_loaded: target passes while the draft rests and while it works.
        draft_idle, draft_loaded: draft passes likewise.
        transfer_s: from one device to the other and back, once a round of asynchronous methods.
        host_s: the part of every pass that is the host's: laying it out, sampling.
    """

    name: str
    kind: str
    target_devices: int
    draft_devices: int
    verify_idle: PassModel
    verify_loaded: PassModel
    draft_idle: PassModel
    draft_loaded: PassModel
    transfer_s: float
    host_s: float = 0.0


class RooflineFile(BaseModel):
    """A profile derived from a pair's sizes and a device's datasheet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["roofline"]
    pair: str
    device: str
    target_devices: int = Field(gt=0)
    draft_devices: int = Field(gt=0)
    transfer_us: float = Field(ge=0)

    def profile(self, name: str) -> Profile:
        """Raises `UsageError` or `ModelError` for a pair or device that is not known."""
        pair, device = find_pair(self.pair), _device(self.device)
        if pair.draft is None:
            raise UsageError(f"{name}: pair: {self.pair} has no draft model")
        target = Roofline(pair.target.known_shape(), pair.dtype, device, self.target_devices)
        draft = Roofline(pair.draft.known_shape(), pair.dtype, device, self.draft_devices)
        models = (target, target, draft, draft)
        owned = (self.target_devices, self.draft_devices)
        shared = (1e-6 * self.transfer_us, 1e-6 * device.pass_us)
        return Profile(name, self.kind, *owned, *models, *shared)


class Table(BaseModel):
    """Measured passes: seconds by new tokens of all sequences."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    seconds: tuple[Annotated[float, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.tokens) != len(self.seconds) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError("tokens must ascend, with one value of seconds for each")
        return self

    def model(self) -> MeasuredPasses:
        """Linear between the measured sizes."""
        return MeasuredPasses(PassTimes.of(dict(zip(self.tokens, self.seconds, strict=True))))


class MeasuredFile(BaseModel):
    """A profile that `harness profile` measured. `machine` says where, `pair` on which models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["measured"]
    pair: str
    machine: str
    target_devices: int = Field(gt=0)
    draft_devices: int = Field(gt=0)
    transfer_us: float = Field(ge=0)
    context: int = Field(gt=0, description="tokens that a measured pass attended to")
    verify_idle: Table
    verify_loaded: Table
    draft_idle: Table
    draft_loaded: Table

    def profile(self, name: str) -> Profile:
        """The profile under this name."""
        return Profile(
            name,
            self.kind,
            self.target_devices,
            self.draft_devices,
            verify_idle=self.verify_idle.model(),
            verify_loaded=self.verify_loaded.model(),
            draft_idle=self.draft_idle.model(),
            draft_loaded=self.draft_loaded.model(),
            transfer_s=1e-6 * self.transfer_us,
        )


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    """Passes as measured. Their context is what it was when measured, whatever is asked for."""

    times: PassTimes

    def seconds(self, tokens: np.ndarray, batch_size: int, context: float) -> np.ndarray:  # noqa: ARG002
        """See `PassModel`."""
        sizes, where = np.unique(tokens, return_inverse=True)
        return np.array([self.times.at(int(size)) for size in sizes])[where].reshape(tokens.shape)


_FILE: TypeAdapter[RooflineFile | MeasuredFile] = TypeAdapter(
    Annotated[RooflineFile | MeasuredFile, Field(discriminator="kind")]
)


def shipped() -> tuple[str, ...]:
    """Names of the profiles that come with the program."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.yaml") if path.name != _DEVICES))


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or a file.

    Raises:
        UsageError: neither, unreadable, or a field that is wrong.
    """
    path = Path(name)
    if not path.suffix or not path.exists():
        if name not in shipped():
            raise UsageError(f"--profile: {unknown('profile', name, shipped())}")
        path = PROFILES / f"{name}.yaml"
    try:
        return _FILE.validate_python(_read(path)).profile(path.stem)
    except ValidationError as error:
        known = {*RooflineFile.model_fields, *MeasuredFile.model_fields}
        raise UsageError(f"{path}: {describe(error, known)}") from error


def write_profile(file: MeasuredFile, path: Path) -> None:
    """Writes a measured profile. Raises `UsageError` where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(file.model_dump(mode="json"), sort_keys=False, width=120)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror or error}") from error


def devices() -> Mapping[str, Device]:
    """The devices that a roofline is known for."""
    values = _read(PROFILES / _DEVICES)
    return {name: Device.model_validate(fields) for name, fields in values.items()}


def _device(name: str) -> Device:
    known = devices()
    if name not in known:
        raise UsageError(f"device: {unknown('device', name, known)}")
    return known[name]


def _read(path: Path) -> Mapping[str, object]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read as YAML: {first_line(error)}") from error
    if not isinstance(values, Mapping):
        raise UsageError(f"{path}: must be a mapping of fields to values")
    return values
