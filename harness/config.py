"""What a run is: the run file (YAML) and the command line's overrides, validated once.

Knows the shape of a run, not what its names mean: methods are checked by the registry, pairs and
datasets by theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.decoder import Placement
from harness.devices import check_devices, with_devices
from harness.errors import UsageError
from harness.messages import describe, first_line
from harness.prompt_split import Split

DEFAULT_PAIR = "qwen2.5-coder"
# Fields that change nothing that is measured: where inputs are read from, which of several like
# machines measures, when to give up.
UNMEASURED = ("data_dir", "cache_dir", "worker_timeout_s", "launcher", "require_accelerator")
_MODEL_FIELDS = ("pair", "target", "draft")

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OptionValue = bool | int | float | str | None | list[Any]


class RunConfig(BaseModel):
    """A benchmark run: which cells, on which models and prompts, measured how.

    Attributes:
        pair: a named target/draft pair; None when the models are given by path.
        pairs_file: further pairs, in the form of `harness/pairs.yaml`; they go before ours.
        target: the target's weights (folder, GGUF file or hub id) instead of a named pair.
        draft: the draft's weights, with `target`.
        engine: what runs the models: the "lean" engine, or transformers' own layers ("hf"), slower
            but for every architecture that it has.
        dtype: of weights and computation; None is the pair's own.
        draft_vocab: tokens that the draft's output head keeps, the most frequent ones; None is
            the pair's own number, 0 keeps all.
        draft_quantization: of the draft's linear layers, so that q is the quantised draft's; None
            is the pair's own choice, "none" leaves them as they are.
        methods: decoding methods by name; `NAME:LABEL` is a variant of NAME, a method of its own
            in every table.
        options: method -> its own parameters (`--set METHOD.KEY=VALUE`); a variant has those under
            its full name and no others.
        datasets: prompt sets by name, or JSONL files of the user's own.
        datasets_file: further datasets, in the form of `datasets/registry.yaml`.
        prompts: how many prompts of each dataset; None is all of them.
        max_rounds: most rounds measured of one output; None is all that it takes. The searches of
            `harness tune` give every candidate as many.
        split: which prompts of the datasets; "evaluation" leaves those out that `harness tune` may
            tune on, one in five.
        max_new_tokens: most tokens emitted for one prompt, an end-of-sequence token counted.
        temperatures: one group of cells each; 0 is greedy.
        batch_sizes: sequences decoded together, one group of cells each.
        top_k, top_p: truncation of target and draft alike; 0 and 1.0 are off.
        repeats: how often every cell decodes every prompt.
        seed: of sampling, of the order of cells, of bootstrap resampling.
        max_context: most tokens of prompt and output together; unless given, no more than the
            models have positions for.
        block_size: prompts that a cell decodes before another cell has its turn.
        placement: devices and cores of the target and of an asynchronous method's draft worker,
            and which cores synchronous methods have.
        devices: `emulated:PROFILE` makes every pass take a hardware profile's time, so that a small
            pair runs at another machine's pace (docs/simulator.md); None is the machine's own. No
            tuned parameters are taken then unless `tuned` is given.
        acceptance: `synthetic:RATE` lets a coin decide which drafted tokens are accepted
            (docs/synthetic.md); None leaves it to the models. Nothing is verified or taken from
            tuning then.
        weights: `random` makes weights of the pair's shape up; needs a synthetic `acceptance`.
        tuned: take each method's parameters from `harness tune` where it has tuned the method for
            this pair, machine, placement, batch size and kind of decoding; `options` win.
        deterministic: switch off choices that follow the clock (slower, reproducible).
        verify: certify that every method's outputs follow the target's distribution.
        control: measure the baseline a second time (A/A); its speedup interval must hold 1.
        warmup_steps: most unmeasured steps of each decoder before the first item; fewer when
            their durations agree sooner.
        warmup_prompt_tokens: warm-up prompts are cut to so many of their last tokens, as by the
            searches of `harness tune`; None leaves them whole.
        raw: prompts as they are, without the chat template.
        system: system prompt of the chat template.
        isolate: measure each repeat of a group of comparable cells in a fresh process, and prepare
            and verify in one; else all in this process.
        launcher: "local" measures on this machine, "ray" on the like nodes of a Ray cluster.
        require_accelerator: word that the name of every GPU of a machine that measures must hold,
            such as "H100".
        worker_timeout_s: a worker process that says nothing for longer (busy with one item, one
            file, one output to verify) is ended.
        data_dir: mirror folder of prompt files; may hold snapshots of the hub.
        cache_dir: where fetched and converted weights are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str | None = None
    pairs_file: Path | None = None
    target: str | None = None
    draft: str | None = None
    engine: Literal["lean", "hf"] = "lean"
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    draft_vocab: Annotated[int, Field(ge=0)] | None = None
    draft_quantization: Literal["none", "int8", "int4"] | None = None
    methods: tuple[str, ...] = ("ar", "sd", "ssd")
    options: dict[str, dict[str, OptionValue]] = {}
    datasets: tuple[str, ...] = ("mini",)
    datasets_file: Path | None = None
    prompts: Count | None = None
    split: Split = "evaluation"
    max_new_tokens: Count = 128
    max_rounds: Count | None = None
    temperatures: tuple[Temperature, ...] = (0.0,)
    batch_sizes: tuple[Count, ...] = (1,)
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repeats: Count = 1
    seed: Annotated[int, Field(ge=0)] = 0
    max_context: Annotated[int, Field(ge=2)] = 2048
    block_size: Count = 4
    placement: Placement = Placement()
    devices: Annotated[str, Field(pattern="^emulated:.")] | None = None
    acceptance: Annotated[str, Field(pattern="^synthetic:.")] | None = None
    weights: Literal["real", "random"] = "real"
    tuned: bool = True
    deterministic: bool = False
    verify: bool = True
    control: bool = True
    warmup_steps: Count = 20
    warmup_prompt_tokens: Count | None = None
    raw: bool = False
    system: str | None = None
    isolate: bool = True
    launcher: Literal["local", "ray"] = "local"
    require_accelerator: Annotated[str, Field(min_length=1)] | None = None
    worker_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    data_dir: Path | None = None
    cache_dir: Path | None = None

    @field_validator("methods", "datasets", "temperatures", "batch_sizes")
    @classmethod
    def _some_and_distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise ValueError("needs at least one value")
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is listed twice")
        return values

    @field_validator("placement", mode="before")
    @classmethod
    def _named_devices(cls, placement: Any) -> Any:
        return with_devices(placement) if isinstance(placement, Mapping) else placement

    @field_validator("placement")
    @classmethod
    def _can_be_placed(cls, placement: Placement) -> Placement:
        if not placement.target_cores or not placement.draft_cores:
            raise ValueError("target_cores and draft_cores need at least one core each")
        check_devices(placement)
        return placement

    @model_validator(mode="before")
    @classmethod
    def _default_pair(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and not any(data.get(key) for key in _MODEL_FIELDS):
            return {**data, "pair": DEFAULT_PAIR}
        return data

    @model_validator(mode="before")
    @classmethod
    def _plain_where_unreal(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("acceptance"):
            data = {"tuned": False, "verify": False, **data}
        if isinstance(data, Mapping) and data.get("devices"):
            data = {"tuned": False, **data}
        return data

    @model_validator(mode="after")
    def _one_source_of_models(self) -> Self:
        if self.pair and (self.target or self.draft):
            raise ValueError("pair: name a pair or give target and draft, not both")
        if not (self.pair or self.target):
            raise ValueError("draft: needs a target beside it")
        if self.engine == "hf" and self.draft_quantization not in (None, "none"):
            raise ValueError("draft_quantization: is the lean engine's; drop it or drop engine hf")
        if self.engine == "hf" and len(self.placement.target_devices) > 1:
            raise ValueError(
                "target_devices: several are the lean engine's; name one, or drop engine hf"
            )
        if self.raw and self.system is not None:
            raise ValueError("system: has no place in a raw prompt; drop it or drop raw")
        if self.launcher == "ray" and not self.isolate:
            raise ValueError("isolate: the nodes of a cluster always isolate; drop no-isolate")
        return self

    @model_validator(mode="after")
    def _one_source_of_luck(self) -> Self:
        if self.acceptance and self.verify:
            raise ValueError("verify: a synthetic acceptance leaves nothing to verify; drop verify")
        if self.weights == "random" and not self.acceptance:
            raise ValueError(
                "weights: random models agree on nothing; add --acceptance synthetic:0.8"
            )
        if self.weights == "random" and self.engine == "hf":
            raise ValueError("weights: random ones are the lean engine's; drop engine hf")
        return self


def load(path: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Reads a run file and lays the command line's choices over it.

    Args:
        path: a YAML file; None for the defaults.
        overrides: fields of `RunConfig`; `options` and `placement` are merged key by key.

    Raises:
        UsageError: unreadable file, unknown field or value out of range, in one line.
    """
    values = merge({} if path is None else _read(path), overrides)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise UsageError(where + describe(error, _field_names())) from error


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lays `overrides` over `values`; mappings are merged, everything else is replaced.

    Models named in the overrides, as a pair or by path, replace those of the file altogether.
    """
    merged = dict(values)
    if any(key in overrides for key in _MODEL_FIELDS):
        merged = {key: value for key, value in merged.items() if key not in _MODEL_FIELDS}
    for key, value in overrides.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_settings(settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`METHOD.KEY=VALUE` arguments as method -> key -> value, each value read as YAML.

    >>> parse_settings(["ssd.lookahead=6", "ssd.backup=fast"])
    {'ssd': {'lookahead': 6, 'backup': 'fast'}}
    """
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        method, dot, key = name.rpartition(".")  # a variant's label may hold dots
        if not (equals and dot and method and key):
            raise UsageError(f"--set {setting}: must look like METHOD.KEY=VALUE")
        try:
            options.setdefault(method, {})[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {setting}: value is no YAML: {first_line(error)}") from error
    return options


def _field_names() -> list[str]:
    nested = [f"placement.{field.name}" for field in dataclasses.fields(Placement)]
    return [*RunConfig.model_fields, *nested]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {first_line(error)}") from error
    except yaml.YAMLError as error:
        raise UsageError(
            f"--config {path}: no valid YAML: {' '.join(str(error).split())}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UsageError(f"--config {path}: must be a mapping of fields to values")
    return values
