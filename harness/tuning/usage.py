"""What a run takes from tuning: for each method and setting the choice that holds, or why none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.cache import default_cache_dir
from harness.config import RunConfig
from harness.decoder_pool import Method, TunedOptions
from harness.errors import StoreError
from harness.messages import describe
from harness.plan import Cell
from harness.preparation import Prepared, resolve_methods
from harness.tuning.choices import Choice, Conditions, Setting, find, read_choices


@dataclass(frozen=True, slots=True)
class Tuned:
    """A run's methods with their tuned parameters.

    Attributes:
        methods: by name.
        choices: those in use.
        unused: a line for each method and setting that could have been tuned and is not.
    """

    methods: Mapping[str, Method]
    choices: tuple[Choice, ...]
    unused: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The manifest's `tuning`."""
        return {
            "choices": [choice.model_dump(mode="json") for choice in self.choices],
            "unused": list(self.unused),
        }


def choices_folder(config: RunConfig) -> Path:
    """Where `harness tune` keeps what it chose."""
    return default_cache_dir(config.cache_dir) / "tuned"


def use_choices(
    methods: Mapping[str, Method],
    choices: Iterable[Choice],
    config: RunConfig,
    conditions: Conditions,
) -> Tuned:
    """Gives every method the newest choice that holds, setting by setting.

    Options that the run gives itself win, one by one. A variant (`NAME:LABEL`) has the options
    that are given to it and no others, so nothing tuned.
    """
    choices = tuple(choices)
    used, unused = [], []
    for name, setting in product(methods, _settings(config)):
        method = methods[name]
        if ":" in name or not method.grid.keys() - method.given:
            continue
        found = find(choices, name, setting, conditions)
        options = found if isinstance(found, str) else _options(method, found)
        if isinstance(options, str):
            unused.append(f"{name} ({setting}): {options}")
        elif isinstance(found, Choice):
            used.append(found)
    return Tuned(with_choices(methods, used), tuple(used), tuple(unused))


def with_choices(methods: Mapping[str, Method], choices: Iterable[Choice]) -> dict[str, Method]:
    """The methods with the tuned parameters of choices that hold."""
    tuned = dict(methods)
    for choice in choices:
        method = tuned[choice.method]
        options = _options(method, choice)
        if isinstance(options, str):
            raise StoreError(f"{choice.method}: {options}")
        tuned[choice.method] = replace(method, tuned={**method.tuned, choice.setting: options})
    return tuned


def tuned_methods(prepared: Prepared, manifest: Mapping[str, Any]) -> Tuned:
    """What a run that is about to start takes from tuning, where its config wants any.

    Args:
        prepared: the run.
        manifest: what is known of it; its pair and fingerprint are read.
    """
    config = prepared.config
    methods = resolve_methods(config)
    if not config.tuned:
        return Tuned(methods, (), ())
    conditions = Conditions(manifest["pair"], manifest["fingerprint"], prepared.prompt_hashes)
    return use_choices(methods, read_choices(choices_folder(config)), config, conditions)


def stored_choices(manifest: Mapping[str, Any]) -> list[Choice]:
    """The choices that a run started with, so that it goes on with the same."""
    return [Choice.model_validate(values) for values in manifest["tuning"]["choices"]]


def _options(method: Method, choice: Choice) -> TunedOptions | str:
    """The method's options with those of the choice that are not given; or why that cannot be."""
    values = {key: value for key, value in choice.options.items() if key not in method.given}
    try:
        options = type(method.options).model_validate({**method.options.model_dump(), **values})
    except ValidationError as error:
        return f"its tuned options are not valid here ({describe(error, ())})"
    return TunedOptions(options, tuple(values))


def _settings(config: RunConfig) -> list[Setting]:
    cells = (
        Cell("", "", temperature, batch_size)
        for temperature, batch_size in product(config.temperatures, config.batch_sizes)
    )
    return list(dict.fromkeys(map(Setting.of, cells)))
