"""Questions that the simulator answers, each as the lines of one chart and a sentence.

Every method has its best lookahead at every point. Nothing here is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.memory import DTYPE_BYTES
from harness.pairs import find_pair
from harness.simulation.acceptance import Acceptance
from harness.simulation.profile import (
    MeasuredPasses,
    Profile,
    RooflineFile,
    devices,
    load_profile,
)
from harness.simulation.scenario import METHODS, Fallback, Method, Scenario
from harness.simulation.simulate import fastest_each
from impl.ssd.budgeting import PassTimes

PAIR, DEVICE = "llama-3.1-70b", "h100"
EXPONENT = 1.2
ACCEPTANCES = (0.5, 0.65, 0.8, 0.9)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
_LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
_ROUNDS = 2000
_FLEET, _CONCURRENT = 64, (64, 250, 1000, 2500, 5000, 10_000)
_FLEET_ROUNDS = 200  # of hundreds of sequences each
_USABLE = 0.9  # share of a device's memory for weights, keys and values


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: points of (x, y)."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's chart.

    Attributes:
        key: file name.
        title: the question.
        x, y: what the axes show.
        lines: what is drawn.
        finding: the answer in words, read off the lines.
        level: a horizontal line that matters; None for none.
        log_x: whether the x axis is logarithmic.
    """

    key: str
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    finding: str
    level: float | None = None
    log_x: bool = False


def answers() -> list[Answer]:
    """All of them."""
    asked: tuple[Callable[[], Answer], ...] = (
        where_ssd_stops_paying,
        where_a_batch_stops_ssd,
        what_the_extra_device_costs,
        what_budget_an_acceptance_needs,
        *(lambda b=b: how_rivals_compare(b) for b in (1, 16)),
        what_a_fleet_gives,
    )
    return [ask() for ask in asked]


def where_ssd_stops_paying() -> Answer:
    """SSD over its rivals by the cost of a draft pass, in verifications."""
    ratios = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
    profiles = [(ratio, _flat(ratio)) for ratio in ratios]
    lines = tuple(
        Line(f"acceptance {rate}", _over_rivals([(x, _one("ssd", p, rate)) for x, p in profiles]))
        for rate in ACCEPTANCES
    )
    return Answer(
        "where-ssd-stops-paying",
        "Where does SSD stop paying? Cost of a draft pass, batch 1",
        "draft pass / verification",
        "SSD over the better of SD and AR, tokens/s",
        lines,
        _each(lines, lambda line: f"best {_peak(line)}; at or below it {_from_on(line)}"),
        level=1.0,
        log_x=True,
    )


def where_a_batch_stops_ssd() -> Answer:
    """SSD over its rivals by the batch size, per device: SSD owns one more."""
    profile = _deployment(4)
    lines = tuple(
        Line(
            f"acceptance {rate}",
            _over_rivals(
                [(b, _one("ssd", profile, rate, b, fallback="adaptive")) for b in BATCHES],
                per_device=True,
            ),
        )
        for rate in ACCEPTANCES
    )
    return Answer(
        "where-a-batch-stops-ssd",
        f"Where does a batch stop SSD? {PAIR} on 4 + 1 {DEVICE}",
        "batch size",
        "SSD over the better of SD and AR, per device",
        lines,
        _each(lines, lambda line: f"best {_peak(line)}; at or below it {_from_on(line)}"),
        level=1.0,
        log_x=True,
    )


def what_the_extra_device_costs() -> Answer:
    """A draft device against the same device given to the target."""
    rate = 0.8
    cases: tuple[tuple[str, Method, int], ...] = (
        ("ssd 4 + 1", "ssd", 4), ("sd, TP 5", "sd", 5), ("sd, TP 4", "sd", 4)
    )  # fmt: skip
    lines = []
    for label, method, count in cases:
        profile = _deployment(count)
        scenarios = [_one(method, profile, rate, b, fallback="adaptive") for b in BATCHES]
        found = fastest_each(scenarios, _ROUNDS, lookaheads=_LOOKAHEADS)
        points = zip(BATCHES, (one.tokens_per_s_per_device for one in found), strict=True)
        lines.append(Line(label, tuple(points)))
    return Answer(
        "what-the-extra-device-costs",
        f"What does the draft's device cost? {PAIR}, {DEVICE}, acceptance {rate}",
        "batch size",
        "tokens/s per device",
        tuple(lines),
        _each(lines, lambda line: f"{line.points[0][1]:.1f} at batch 1, "
              f"{line.points[-1][1]:.0f} at {line.points[-1][0]:g}")
        + ". TP 4 per device is also what data parallel replicas give.",
        log_x=True,
    )  # fmt: skip


def what_budget_an_acceptance_needs() -> Answer:
    """SSD's speed by the guesses in its cache."""
    budgets, profile = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128), _deployment(4)
    lines = []
    for rate in ACCEPTANCES:
        scenarios = [_one("ssd", profile, rate, budget=budget) for budget in budgets]
        found = fastest_each(scenarios, _ROUNDS, lookaheads=_LOOKAHEADS)
        speeds = [one.tokens_per_s for one in found]
        points = zip(budgets, (speed / max(speeds) for speed in speeds), strict=True)
        lines.append(Line(f"acceptance {rate}", tuple(points)))
    return Answer(
        "what-budget-an-acceptance-needs",
        f"What fan-out budget does which acceptance need? {PAIR} on 4 + 1 {DEVICE}, batch 1",
        "budget, guesses a sequence",
        "tokens/s, relative to the best budget",
        tuple(lines),
        _each(lines, lambda line: f"95% of the best from {_first_above(line, 0.95):g} guesses on"),
        level=0.95,
        log_x=True,
    )


def how_rivals_compare(batch_size: int) -> Answer:
    """Every method over AR by acceptance."""
    rates, profile = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), _deployment(4)
    base = fastest_each([_one("ar", profile, 0.5, batch_size)], _ROUNDS)[0].tokens_per_s
    lines = []
    for method in METHODS[1:]:
        scenarios = [_one(method, profile, rate, batch_size, fallback="adaptive") for rate in rates]
        found = fastest_each(scenarios, _ROUNDS, lookaheads=_LOOKAHEADS)
        points = zip(rates, (one.tokens_per_s / base for one in found), strict=True)
        lines.append(Line(method, tuple(points)))
    return Answer(
        f"how-rivals-compare-b{batch_size}",
        f"How do the methods compare? {PAIR} on {DEVICE}, batch {batch_size}",
        "acceptance",
        "tokens/s over AR",
        tuple(lines),
        _each(lines, lambda line: f"{line.points[0][1]:.2f} at {line.points[0][0]}, "
              f"{line.points[4][1]:.2f} at {line.points[4][0]}"),
        level=1.0,
    )  # fmt: skip


def what_a_fleet_gives() -> Answer:
    """Speed of a user against throughput of a device, on 64 devices."""
    rate = 0.8
    lines = []
    for method in ("ar", "sd", "ssd"):
        points = []
        for concurrent in _CONCURRENT:
            best = max(
                (point for tp in (4, 8) if (point := _serve(method, tp, concurrent, rate))),
                key=lambda point: point[1],
                default=None,
            )
            if best is not None:
                points.append(best)
        lines.append(Line(method, tuple(points)))
    return Answer(
        "what-a-fleet-gives",
        f"{_FLEET} {DEVICE}, {PAIR}, {_CONCURRENT[0]} to {_CONCURRENT[-1]:,} concurrent requests, "
        f"acceptance {rate}",
        "tokens/s per user",
        "tokens/s per device",
        tuple(lines),
        _each(lines, lambda line: f"{line.points[0][0]:.0f} a user at {_CONCURRENT[0]} requests, "
              f"{line.points[-1][1]:.0f} a device at {_CONCURRENT[-1]:,}"),
    )  # fmt: skip


def _serve(
    method: Method, target_devices: int, concurrent: int, rate: float
) -> tuple[float, float] | None:
    """(tokens/s per user, per device) with the requests shared among replicas; None if no room."""
    profile = _deployment(target_devices)
    one = _one(method, profile, rate, fallback="adaptive")
    replicas = _FLEET // one.devices
    batch = -(-concurrent // replicas)
    if batch > _room(target_devices, one.context):
        return None
    lookaheads = (1, 2, 3, 4, 6, 8)
    found = fastest_each([replace(one, batch_size=batch)], _FLEET_ROUNDS, lookaheads=lookaheads)[0]
    return found.tokens_per_s_per_user, found.tokens_per_s * replicas / _FLEET


def _room(target_devices: int, context: int) -> int:
    """Sequences whose keys and values fit beside the target's weights."""
    pair = find_pair(PAIR)
    shape = pair.target.known_shape()
    memory = _USABLE * 1e9 * devices()[DEVICE].memory_gb * target_devices
    weights = shape.parameters * DTYPE_BYTES[pair.dtype]
    return int((memory - weights) // shape.kv_bytes(pair.dtype, context))


def _deployment(target_devices: int) -> Profile:
    """The pair on so many devices and one for the draft."""
    if target_devices == 4:
        return load_profile(f"{DEVICE}x4+1-{PAIR}")
    file = RooflineFile(
        kind="roofline", pair=PAIR, device=DEVICE, target_devices=target_devices, draft_devices=1,
        transfer_us=100,
    )  # fmt: skip
    return file.profile(f"{DEVICE}x{target_devices}+1-{PAIR}")


def _flat(ratio: float) -> Profile:
    """A verification takes one second and a draft pass `ratio`, at any size."""
    target, draft = (MeasuredPasses(PassTimes((1,), (s,))) for s in (1.0, ratio))
    return Profile("flat", "assumed", 1, 1, target, target, draft, draft, 0.0)


def _one(
    method: Method,
    profile: Profile,
    rate: float,
    batch_size: int = 1,
    budget: int = 24,
    fallback: Fallback = "neural",
) -> Scenario:
    return Scenario(
        method,
        profile,
        Acceptance((rate,), EXPONENT),
        batch_size=batch_size,
        budget=budget,
        fallback=fallback,
    )


def _over_rivals(
    cases: Sequence[tuple[float, Scenario]], *, per_device: bool = False
) -> tuple[tuple[float, float], ...]:
    """Speed of each scenario over the better of SD and AR in its place, by x."""
    methods: tuple[Method, ...] = ("ssd", "sd", "ar")
    scenarios = [replace(one, method=method) for method in methods for _, one in cases]
    found = fastest_each(scenarios, _ROUNDS, lookaheads=_LOOKAHEADS)
    speeds = [one.tokens_per_s_per_device if per_device else one.tokens_per_s for one in found]
    size = len(cases)
    each = zip(cases, speeds[:size], speeds[size : 2 * size], speeds[2 * size :], strict=True)
    return tuple((x, mine / max(sd, ar)) for (x, _), mine, sd, ar in each)


def _each(lines: Sequence[Line], told: Callable[[Line], str]) -> str:
    return "; ".join(f"{line.label}: {told(line)}" for line in lines)


def _peak(line: Line) -> str:
    x, y = max(line.points, key=lambda point: point[1])
    return f"{y:.2f} at {x:g}"


def _from_on(line: Line) -> str:
    """From which x on it stays at 1 or below."""
    above = [i for i, (_, y) in enumerate(line.points) if y > 1.0]
    first = above[-1] + 1 if above else 0
    return f"from {line.points[first][0]:g} on" if first < len(line.points) else "nowhere"


def _first_above(line: Line, level: float) -> float:
    return next(x for x, y in line.points if y >= level)
