"""Prints the table of docs/equivalence.md, measured now.

PYTHONPATH=tests/unit python tests/equivalence/mutants_table.py [NAME ...]
"""

import sys

import torch
from chain_mutants import CHAIN_MUTANTS
from mutants import MUTANTS, Mutant
from tiny_runs import tokens_needed, verdict_of

HEADER = """\
| mutant | of | tokens | caught by | statistic | p, corrected | tokens needed |
|---|---|--:|---|--:|--:|--:|
"""


def row(mutant: Mutant) -> str:
    """A mutant's line, measured now."""
    run, prompts = mutant.decode(), mutant.setting.workload(0).prompt_ids()
    verdict, needed = verdict_of(run, prompts), tokens_needed(run, prompts)
    best = min(verdict.tests, key=lambda test: (test.adjusted, test.p_value))
    cells = (
        mutant.name,
        mutant.setting.method,
        verdict.tokens,
        f"{best.test} ({best.stratum})",
        f"{best.statistic:.3g}",
        f"{best.adjusted:.1g}",
        needed or f"more than {verdict.tokens}",
    )
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(HEADER)
    for mutant in (*MUTANTS, *CHAIN_MUTANTS):
        if len(sys.argv) == 1 or mutant.name in sys.argv[1:]:
            sys.stdout.write(row(mutant))
            sys.stdout.flush()
