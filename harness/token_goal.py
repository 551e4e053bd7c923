"""Decoding until every method has emitted so many tokens: as many repeats as that takes.

How many tokens the next output will have is not known before it is decoded. So a first run decodes
what outputs of full length would need, and where outputs ended earlier it is continued by further
repeats. Whether to go on is decided by counts of tokens alone, at the end of a repeat; no test has
been looked at by then and no output is left out. The number of outputs is thus a stopping time of
the sequence of tokens, which leaves every test of the certificate valid (docs/equivalence.md).
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

from harness import runner
from harness.config import RunConfig
from harness.equivalence.token_table import groups_of, rows_of
from harness.progress import Progress
from harness.run_prompts import prompt_sets
from harness.runner import RunSummary
from harness.store import read_run


def decode_tokens(config: RunConfig, tokens: int, out: Path, progress: Progress) -> RunSummary:
    """Measures a run of at least `tokens` for each method, temperature and batch size.

    Args:
        config: the run. Without a number of prompts it takes only as many as full outputs need;
            its repeats are the fewest that are made.
        tokens: emitted by each, summed over datasets.
        out: run directory; absent or empty.
        progress: told what happens.

    Returns:
        The last part's summary; fewer tokens than asked for only where a part has failed or was
        interrupted, or where no prompt fits the context.

    Raises:
        HarnessError: as `runner.run` does.
    """
    config = _first_part(config, tokens)
    summary = runner.run(config, out, progress)
    while summary.status == "finished" and 0 < (fewest := fewest_tokens(out)) < tokens:
        repeats = ceil(config.repeats * tokens / fewest)
        progress.note(f"{fewest} tokens of {tokens}: going on to {repeats} repeats")
        config = config.model_copy(update={"repeats": repeats})
        summary = runner.extend(out, repeats, progress)
    return summary


def fewest_tokens(directory: Path) -> int:
    """The tokens of the method, temperature and batch size that has the fewest; 0 of nothing."""
    requests = read_run(directory).requests
    counts = (rows_of(requests, group)["output_tokens"].sum() for group in groups_of(requests))
    return int(min(counts, default=0))


def _first_part(config: RunConfig, tokens: int) -> RunConfig:
    """The config with the prompts and repeats that suffice if every output has full length."""
    outputs = ceil(tokens / config.max_new_tokens)
    if config.prompts is None:
        each = ceil(outputs / len(config.datasets))
        config = config.model_copy(update={"prompts": each})
    prompts = sum(len(found.prompts) for found in prompt_sets(config).values())
    repeats = max(config.repeats, ceil(outputs / prompts))
    return config.model_copy(update={"repeats": repeats})
