"""The token table: a row a token, with its reference scores and where its run emitted it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from harness.decoder import SamplingParams
from harness.equivalence.pit import fresh_uniforms, transform
from harness.equivalence.reference_scores import Columns, References, score_output
from harness.errors import StoreError

if TYPE_CHECKING:
    from harness.store import RunData

Scored = Callable[[int, int], None]

JUST_REFILLED = 2  # rounds of a sequence that took over a used slot


def unwatched(done: int, total: int) -> None:
    """For nobody who wants to know how far it is."""


class Group(NamedTuple):
    """What gets a verdict: the outputs of all datasets and repeats together."""

    method: str
    temperature: float
    batch_size: int


def groups_of(requests: pd.DataFrame) -> list[Group]:
    """Every group of a run once, in order."""
    rows = requests[["method", "temperature", "batch_size"]].drop_duplicates()
    return sorted(Group(*row) for row in rows.itertuples(index=False))


def rows_of(requests: pd.DataFrame, group: Group, *, control: bool = False) -> pd.DataFrame:
    """A group's outputs, without those of the A/A control (which repeats the baseline's tokens)."""
    return requests[
        requests["method"].eq(group.method)
        & requests["temperature"].eq(group.temperature)
        & requests["batch_size"].eq(group.batch_size)
        & requests["control"].eq(control)
    ]


def token_table(
    run: RunData,
    requests: pd.DataFrame,
    prompts: Mapping[str, Sequence[int]],
    references: References,
    scored: Scored = unwatched,
) -> pd.DataFrame:
    """One row a token of `requests`, output after output, all outputs of a prompt together.

    `scored` is told after each output how many have been scored, of how many.

    Returns:
        The columns of `reference_scores.reduce_rows` and `place_tokens`; the fields of
        `Group`; `item`, `dataset`, `request_id`, `prompt_tokens`, `output` (its number), and the
        randomised PIT values `u` and `u_by_id`.
    """
    config, end_ids = run.manifest["config"], run.manifest.get("stop_token_ids", ())
    rounds = dict(iter(run.rounds.groupby(["item", "request_id"])))
    outputs = requests.sort_values(["dataset", "prompt_index"]).to_dict("records")
    tables: list[Columns] = []
    for number, row in enumerate(outputs):
        name, output = row["request_id"], row["output_ids"]
        params = SamplingParams(row["temperature"], config["top_k"], config["top_p"])
        scores = score_output(references, prompts[name], output, params, end_ids)
        places = place_tokens(len(output), rounds[row["item"], name].sort_values("round"))
        uniforms = fresh_uniforms(f"{row['item']} {name}", len(output))
        values = {
            "u": transform(scores["p_above"], scores["p_token"], uniforms),
            "u_by_id": transform(scores["p_lower_ids"], scores["p_token"], uniforms),
            "output": np.full(len(output), number),
        }
        tables.append({**places, **scores, **values})
        scored(number + 1, len(outputs))
    columns = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    names = [*Group._fields, "item", "dataset", "request_id", "prompt_tokens"]
    of_output = pd.DataFrame(outputs)[names]
    repeated = of_output.iloc[columns["output"]].reset_index(drop=True)
    return pd.concat([pd.DataFrame(columns), repeated], axis=1)


def place_tokens(output_tokens: int, rounds: pd.DataFrame) -> Columns:
    """Where each token of one output was emitted.

    Args:
        output_tokens: length of the output.
        rounds: its rows of rounds.parquet, in order.

    Returns:
        Columns with a row a token: `position` in the output, `round`, `index` in the round,
        `drafted` in the round, `cache`, and `refilled`: within `JUST_REFILLED` rounds of taking
        over a used slot.

    Raises:
        StoreError: the rounds emitted another number of tokens than the output has.
    """
    emitted = rounds["emitted"].to_numpy()
    if emitted.sum() != output_tokens:
        name = rounds["request_id"].iloc[0] if len(rounds) else "an output"
        raise StoreError(
            f"{name}: its rounds emitted {emitted.sum()} tokens, its output has {output_tokens}; "
            "measure the run again"
        )
    starts = np.repeat(emitted.cumsum() - emitted, emitted)
    number = np.repeat(rounds["round"].to_numpy(), emitted)
    admitted_later = bool(rounds["step"].min() > 0)
    return {
        "position": np.arange(output_tokens),
        "round": number,
        "index": np.arange(output_tokens) - starts,
        "drafted": np.repeat(rounds["drafted"].to_numpy(), emitted),
        "cache": np.repeat(rounds["cache"].to_numpy(dtype=object), emitted),
        "refilled": admitted_later & (number < JUST_REFILLED),
    }
