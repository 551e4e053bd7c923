"""`harness verify`: is every method of a run lossless? Of a stored run, or of one made for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands.run import PATH, default_out, run_config, run_options

if TYPE_CHECKING:
    from harness.config import RunConfig
    from harness.equivalence.certificate import Certificate, Verdict
    from harness.progress import Progress
    from harness.runner import RunSummary


@click.command()
@click.argument("run", required=False, type=PATH)
@run_options
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="At least this many for each method and temperature; more repeats until they are there.",
)
@click.option("--out", type=PATH, help="Directory of the run that is made; runs/TIME by default.")
@click.option(
    "--reference",
    type=click.Choice(["engine", "transformers-fp32"]),
    default="engine",
    help="What outputs are scored with.",
)
@click.option(
    "--against",
    type=PATH,
    help="Score nothing: compare n-grams with the ar outputs of this other run (for endpoints).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
def verify(
    run: Path | None,
    config: Path | None,
    settings: tuple[str, ...],
    tokens: int | None,
    out: Path | None,
    reference: Any,
    against: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Certify the methods of RUN, or decode what the options say and certify that.

    Exits with 1 when a method fails. Speeds are stored too but not shown: use `harness run`.
    """
    from dataclasses import asdict

    from harness import runner
    from harness.progress import progress
    from harness.store import to_json

    bar = progress(sys.stderr)
    if run is None:
        resolved = _for_verifying(run_config(config, settings, given))
        summary = _decode(resolved, tokens, out or default_out(), bar)
        if summary.status != "finished" or summary.faults:
            return _incomplete(summary)
        run = summary.directory
    else:
        _refuse_options(config, settings, tokens, out, given)
    if against is not None:
        return _compare(run, against)
    places = {name: given[name] for name in ("cache_dir", "data_dir")}
    certificate = runner.verify(run, bar, reference=reference, **places)
    click.echo(to_json(asdict(certificate)) if as_json else describe(certificate))
    return 0 if certificate.passed else 1


def _compare(run: Path, against: Path) -> int:
    """Prints the two-sample tests of every group."""
    from harness.equivalence.certificate import ALPHA
    from harness.equivalence.two_sample import compare_runs
    from harness.store import read_run

    failed = False
    for group, tests in compare_runs(read_run(run), read_run(against)).items():
        worst = min(tests, key=lambda test: test.adjusted)
        differs = worst.adjusted <= ALPHA
        failed |= differs
        click.echo(
            f"{'fail' if differs else 'pass'}  {group.method}, temperature {group.temperature:g}, "
            f"batch size {group.batch_size}: {worst.n} outputs, {worst.test} p "
            f"{worst.p_value:.2g}, {worst.adjusted:.2g} corrected"
        )
    return int(failed)


def describe(certificate: Certificate) -> str:
    """The certificate for people: a line for each verdict, more for each that fails."""
    exact = "the very logits" if certificate.exact_reference else "not bit for bit the logits"
    lines = [
        f"certificate at alpha {certificate.alpha:g} for all methods together; "
        f"reference {certificate.reference}, {exact} that the methods saw"
    ]
    for verdict in certificate.verdicts:
        lines += _verdict_lines(verdict)
    return "\n".join(lines)


def _verdict_lines(verdict: Verdict) -> list[str]:
    where = f"{verdict.method}, temperature {verdict.temperature:g}, batch size "
    lines = [
        f"{verdict.status:4}  {where}{verdict.batch_size}: {verdict.tokens} tokens; "
        f"{verdict.reason}"
    ]
    case = verdict.reproducer
    if case is not None:
        lines += [
            f"      shows most in request {case.request_id} ({case.prompt_tokens} prompt tokens), "
            f"seed {case.seed}, round {case.round}, output position {case.position}",
            f"      again: {case.command}",
        ]
    return lines


def _for_verifying(config: RunConfig) -> RunConfig:
    """The config with the baseline in it and little warming up; verified once, at the end.

    The A/A control says nothing of sampled outputs: it draws the baseline's tokens again.
    """
    from harness import synthetic
    from harness.plan import BASELINE

    synthetic.refuse(config, "leaves nothing to verify")
    changes: dict[str, Any] = {
        "warmup_steps": 1,
        "verify": False,
        "isolate": False,
        "control": config.control and 0 in config.temperatures,
    }
    if BASELINE not in config.methods:
        changes["methods"] = (BASELINE, *config.methods)
    return config.model_copy(update=changes)


def _decode(config: RunConfig, tokens: int | None, out: Path, progress: Progress) -> RunSummary:
    """Measures the run that is verified afterwards."""
    from harness import runner
    from harness.token_goal import decode_tokens

    if tokens is None:
        return runner.run(config, out, progress)
    return decode_tokens(config, tokens, out, progress)


def _incomplete(summary: RunSummary) -> int:
    for failure in summary.failures:
        click.echo(f"failed: {failure.item}: {failure.error}: {failure.message}", err=True)
    for fault in summary.faults:
        click.echo(f"does not add up: {fault}", err=True)
    return summary.exit_code


def _refuse_options(
    config: Path | None,
    settings: tuple[str, ...],
    tokens: int | None,
    out: Path | None,
    given: dict[str, Any],
) -> None:
    """A stored run says itself what it decoded."""
    from harness.errors import UsageError

    places = ("cache_dir", "data_dir")
    named = [name for name, value in given.items() if value is not None and name not in places]
    others = {"config": config, "set": settings or None, "tokens": tokens, "out": out}
    named += [name for name, value in others.items() if value is not None]
    if named:
        raise UsageError(
            f"--{named[0].replace('_', '-')}: has no place beside a stored run; drop one of them"
        )
