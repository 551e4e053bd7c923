"""The tiny pair decoded in this process and kept as the harness would, and its certificates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fixed_logits import PLAIN, local_draft, work_beside_the_target

from harness.config import RunConfig
from harness.decoder import Decoder, DecoderSetup
from harness.encoding import EncodedPrompt, encode_prompts
from harness.equivalence.battery import run_tests
from harness.equivalence.certificate import ALPHA, Verdict, certify, correct
from harness.equivalence.reference_scores import EngineLogits, References
from harness.equivalence.token_table import groups_of, rows_of, token_table
from harness.greedy import GreedyCheck
from harness.measure import run_item
from harness.prompts import load_prompts
from harness.registry import decoder_class, decoder_options
from harness.store import RunData
from harness.workload import Workload, make_workload
from impl.engine import loader
from impl.engine.chain_decoder import ChainDecoder
from impl.engine.models import Models, ModelSpec

TINY = Path(__file__).parents[2] / "harness" / "tiny"
EOS = frozenset({0, 2})
BATCH = 16
PARTS = 16
NOTHING_GREEDY = GreedyCheck(0, None, ())


@dataclass(frozen=True)
class TrimmedSpec(ModelSpec):
    """A draft whose head keeps three tokens of four."""

    def head_ids(self) -> torch.Tensor:
        ids = torch.arange(512)
        return ids[ids % 4 != 3]


@dataclass(frozen=True)
class Setting:
    """What is decoded by which method; by default as much as a run of the mini prompts twice.

    Attributes:
        method: by name.
        temperature, top_p: of target and draft.
        prompts: how many.
        repeats: how often each is continued, every time under another random stream.
        max_new_tokens: of each output.
        trimmed: whether the draft's head is.
        options: of the method.
    """

    method: str = "sd"
    temperature: float = 1.0
    top_p: float = 1.0
    prompts: int = 48
    repeats: int = 2
    max_new_tokens: int = 128
    trimmed: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def config(self, seed: int) -> RunConfig:
        """The run file's equivalent."""
        return RunConfig(
            pair="tiny",
            methods=(self.method,),
            temperatures=(self.temperature,),
            top_p=self.top_p,
            batch_sizes=(BATCH,),
            max_new_tokens=self.max_new_tokens,
            repeats=self.repeats,
            block_size=self.prompts,
            seed=seed,
            control=False,
        )

    def workload(self, seed: int) -> Workload:
        """Every request."""
        return make_workload(self.config(seed), {"mini": mini_prompts()[: self.prompts]}, EOS)


@cache
def mini_prompts() -> tuple[EncodedPrompt, ...]:
    """The project's own 48 prompts, ended by the pair's chat template."""
    tokenizer = loader.load_tokenizer(TINY / "target")
    return encode_prompts(load_prompts("mini"), tokenizer)


@cache
def models(trimmed: bool = False) -> Models:
    """The pair in float32, loaded once."""
    spec = TrimmedSpec if trimmed else ModelSpec
    return Models(ModelSpec(TINY / "target", "float32"), spec(TINY / "draft", "float32"))


@cache
def references() -> References:
    """The same models with caches of their own."""
    return References(EngineLogits(models().target()), EngineLogits(models().draft()))


@contextmanager
def open_decoder(setting: Setting) -> Iterator[Decoder]:
    """The method's real decoder; a draft process works in this one."""
    defaults = {"sd": {"lookahead": 4}, "ssd": PLAIN}.get(setting.method, {})
    given = defaults | dict(setting.options)
    options = decoder_options(setting.method, given)
    setup = DecoderSetup(models(setting.trimmed), options, batch_size=BATCH)
    kind = decoder_class(setting.method)
    chains = issubclass(kind, ChainDecoder)
    with local_draft(passes=0 if chains else None):
        decoder = kind.create(setup)
    if chains:
        work_beside_the_target(decoder, passes=3)
    try:
        yield decoder
    finally:
        decoder.close()


def decode(setting: Setting, seed: int = 0) -> RunData:
    """Decodes everything and keeps it as a run directory would."""
    workload = setting.workload(seed)
    with open_decoder(setting) as decoder:
        results = [run_item(decoder, item, workload.requests(item)) for item in workload.plan]
    manifest = {
        "config": workload.config.model_dump(mode="json"),
        "stop_token_ids": sorted(EOS),
    }
    requests = pd.DataFrame([row for result in results for row in result.requests])
    rounds = pd.DataFrame([row for result in results for row in result.rounds])
    return RunData(manifest, requests, rounds)


def verdict_of(run: RunData, prompts: Mapping[str, tuple[int, ...]]) -> Verdict:
    """The certificate of a run of one method."""
    (verdict,) = certify(run, prompts, references(), NOTHING_GREEDY).verdicts
    return verdict


def tokens_needed(run: RunData, prompts: Mapping[str, tuple[int, ...]]) -> int | None:
    """The fewest tokens, in whole outputs, from which on the certificate's tests reject.

    Returns:
        Rounded up to the next of 16 equal parts of the run; None when all of it is too little.
    """
    (group,) = groups_of(run.requests)
    table = token_table(run, rows_of(run.requests, group), prompts, references())
    outputs = table["output"].to_numpy()
    ends = [(outputs.max() + 1) * part // PARTS for part in range(1, PARTS + 1)]
    needed = None
    for end in reversed(ends):
        own = table[outputs < end]
        tests = correct({group: run_tests(own, exact_support=True)})[group]
        if min(test.adjusted for test in tests) > ALPHA:
            break
        needed = len(own)
    return needed
