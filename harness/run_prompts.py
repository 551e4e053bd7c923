"""The prompts of a run: read, picked, and made into the token ids that every method gets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config import RunConfig
from harness.dataset_registry import load_registry
from harness.decoder import ModelProvider
from harness.encoding import EncodedPrompt, encode_prompts, ids_sha256
from harness.errors import StoreError, UsageError
from harness.messages import first_line
from harness.progress import Progress
from harness.prompts import PromptSet, load_prompts
from harness.reference_turns import TargetAnswers, write_answers
from harness.store import write_text

_FILE = "prompts.jsonl"


def prompt_sets(config: RunConfig) -> dict[str, PromptSet]:
    """The prompts that a run takes, dataset by dataset.

    Raises:
        UsageError: no such dataset, or two of one name.
        DatasetError: one that no source has, or that is altered or malformed.
    """
    registry = load_registry(config.datasets_file)
    found: dict[str, PromptSet] = {}
    for dataset in config.datasets:
        prompts = load_prompts(
            dataset,
            config.prompts,
            seed=config.seed,
            split=config.split,
            registry=registry,
            data_dir=config.data_dir,
            cache_dir=config.cache_dir,
        )
        if prompts.name in found:
            raise UsageError(f"datasets: two of them are called {prompts.name}; rename the file")
        found[prompts.name] = prompts
    return found


def encode(
    config: RunConfig,
    prompts: Mapping[str, PromptSet],
    models: ModelProvider,
    eos_token_ids: frozenset[int],
    progress: Progress,
) -> dict[str, tuple[EncodedPrompt, ...]]:
    """Token ids of a run's prompts, by the target's tokenizer and chat template.

    Earlier answers that no dataset has are written by the target (`harness.reference_turns`).
    """
    from impl.engine.loader import load_tokenizer

    tokenizer = load_tokenizer(models.target_folder)
    total = _open_answers(prompts)

    def answered(count: int) -> None:
        progress.count("earlier answers", count, total)

    with TargetAnswers(config, models, tokenizer, eos_token_ids, answered) as answers:
        written = {name: write_answers(found, answers) for name, found in prompts.items()}
    return {
        name: encode_prompts(found, tokenizer, template=not config.raw, system=config.system)
        for name, found in written.items()
    }


def _open_answers(prompts: Mapping[str, PromptSet]) -> int:
    """At most as many answers must be written; equal conversations share theirs."""
    given = (prompt for found in prompts.values() for prompt in found.prompts)
    return sum(message.content is None for prompt in given for message in prompt.messages)


def write_prompts(directory: Path, prompts: Mapping[str, Iterable[EncodedPrompt]]) -> None:
    """Stores a run's token ids: one JSON object a line (docs/run-directory.md)."""
    rows = [
        json.dumps({"dataset": dataset, **asdict(prompt)}) + "\n"
        for dataset, encoded in prompts.items()
        for prompt in encoded
    ]
    write_text(directory / _FILE, "".join(rows))


def stored_prompts(
    directory: Path, datasets: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[EncodedPrompt, ...]] | None:
    """The token ids that a run was made with; None for a run that did not store them.

    Args:
        directory: the run directory.
        datasets: of its manifest.

    Raises:
        StoreError: they are not those that the manifest has the hash of.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    found: dict[str, list[EncodedPrompt]] = {name: [] for name in datasets}
    try:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            ids = tuple(row["ids"])
            found[row["dataset"]].append(EncodedPrompt(row["index"], row["category"], ids))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {first_line(error)}") from error
    for name, encoded in found.items():
        if ids_sha256(encoded) != datasets[name]["ids_sha256"]:
            raise StoreError(f"{path}: prompts of {name} are not those of the run's manifest")
    return {name: tuple(encoded) for name, encoded in found.items()}
