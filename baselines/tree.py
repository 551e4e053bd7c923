"""Tree: several candidates for each position, verified in one tree-masked pass.

Dynamic trees as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858), with the pair's draft model in the
place of EAGLE's head; static ones as in SpecInfer (Miao et al. 2024, arXiv 2305.09781).
"""

from __future__ import annotations

import time
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from harness.decoder import DecoderOptions, DecoderSetup, Round, Span, SpanKind, TuningGrid
from impl.engine.candidate_tree import TreePlan
from impl.engine.engine_decoder import EngineDecoder, settle
from impl.engine.sequence import Sequence
from impl.engine.tree_drafter import TreeDrafter

MOST_NODES = 256

Width = Annotated[int, Field(ge=1, le=64)]


class TreeOptions(DecoderOptions):
    """Parameters of tree speculation."""

    tuning_grid: ClassVar[TuningGrid] = {"nodes": (4, 8, 12), "depth": (3, 4, 6)}

    nodes: int = Field(
        8, ge=1, le=MOST_NODES, description="draft tokens a round (N), the best kept"
    )
    depth: int = Field(4, ge=1, le=64, description="levels of the tree: draft passes a round")
    branching: int = Field(
        2, ge=1, le=64, description="nodes of a level that are expanded, and children of each"
    )
    shape: tuple[Width, ...] | None = Field(
        None,
        description="a static tree instead: children of every node, level by level ([4,2,2,1])",
    )
    candidates: Literal["sampled", "likeliest"] = Field(
        "sampled",
        description="at temperature > 0: drawn without replacement, or the likeliest (as EAGLE-2)",
    )

    @field_validator("shape")
    @classmethod
    def _not_too_large(cls, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if shape is not None and not shape:
            raise ValueError("needs at least one level")
        if shape and (nodes := TreePlan.static(shape).kept) > MOST_NODES:
            raise ValueError(f"has {nodes} nodes; at most {MOST_NODES}")
        return shape

    def plan(self) -> TreePlan:
        """How the trees grow."""
        if self.shape is not None:
            return TreePlan.static(self.shape)
        return TreePlan.dynamic(nodes=self.nodes, depth=self.depth, branching=self.branching)


class TreeDecoder(EngineDecoder):
    """Draft and target take turns on the target's device."""

    name = "tree"
    Options = TreeOptions
    needs_draft = True

    def __init__(self, setup: DecoderSetup, options: TreeOptions) -> None:
        plan = options.plan()
        super().__init__(setup, tree_nodes=plan.kept)
        self.options = options
        self.drafter = TreeDrafter(
            setup.models.draft(),
            plan,
            setup.batch_size,
            setup.max_context,
            sampled=options.candidates == "sampled",
        )

    @classmethod
    def create(cls, setup: DecoderSetup) -> TreeDecoder:
        """See `Decoder.create`."""
        return cls(setup, TreeOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """Grows a tree for each live sequence, verifies them all in one target pass."""
        live = self.slots.live()
        start_ns = time.perf_counter_ns()
        drafts = self.drafter.propose(live)
        drafting = Span(SpanKind.DRAFT, start_ns, time.perf_counter_ns())
        outcomes, verifying = self.verifier.verify(live, drafts)
        for sequence, outcome in zip(live, outcomes, strict=True):
            self.drafter.settle(sequence, outcome)
        return [
            settle(sequence, draft, outcome, [drafting, verifying])
            for sequence, draft, outcome in zip(live, drafts, outcomes, strict=True)
        ]

    def _prefill(self, sequence: Sequence) -> None:
        super()._prefill(sequence)
        self.drafter.prefill(sequence)
