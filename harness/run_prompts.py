"""The prompts of a run: read, picked, and made into the token ids that every method gets."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config import RunConfig
from harness.dataset_registry import load_registry
from harness.encoding import EncodedPrompt, encode_prompts
from harness.errors import UsageError
from harness.pairs import ResolvedPair
from harness.prompts import PromptSet, load_prompts


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
    config: RunConfig, pair: ResolvedPair, prompts: Mapping[str, PromptSet]
) -> dict[str, tuple[EncodedPrompt, ...]]:
    """Token ids of a run's prompts, by the target's tokenizer and chat template."""
    from impl.engine.loader import load_tokenizer

    tokenizer = load_tokenizer(pair.target.folder)
    return {
        name: encode_prompts(found, tokenizer, template=not config.raw, system=config.system)
        for name, found in prompts.items()
    }
