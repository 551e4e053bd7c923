"""The run files in configs/: valid, with options only for what they run, and what they claim."""

from itertools import product
from pathlib import Path

import pytest

from harness.config import load
from harness.preparation import resolve_methods

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_is_valid(path):
    config = load(path, {})
    assert resolve_methods(config).keys() == set(config.methods)
    assert config.options.keys() <= set(config.methods)


def test_the_full_ablation_is_the_whole_grid():
    config = load(CONFIGS / "ssd-ablation-full.yaml", {})
    variants = [
        (m.options.fan_out, m.options.saguaro_c, m.options.fallback)
        for name, m in resolve_methods(config).items()
        if name.startswith("ssd:")
    ]
    fan_outs, backups = ("uniform", "geometric", "adaptive"), ("neural", "fast", "adaptive")
    grid = set(product(fan_outs, (1.0, 0.75, 0.5, 0.25, 0.0), backups))
    assert set(variants) == grid
    assert len(variants) == len(grid)
    assert (config.temperatures, config.batch_sizes) == ((0, 0.7, 1), (1, 4, 16))


def test_the_reduced_ablation_changes_one_thing_at_a_time():
    methods = resolve_methods(load(CONFIGS / "ssd-ablation.yaml", {}))
    reference = methods["ssd:reference"].options.model_dump()
    changes = []
    for name, method in methods.items():
        if name.startswith("ssd:") and name != "ssd:reference":
            values = method.options.model_dump()
            changes += [(key, value) for key, value in values.items() if value != reference[key]]
    assert sorted(changes, key=str) == sorted(
        [
            *(("fan_out", value) for value in ("uniform", "geometric", "adaptive")),
            *(("saguaro_c", value) for value in (0.75, 0.5, 0.25, 0.0)),
            *(("fallback", value) for value in ("fast", "neural")),
            *(("build", "all"), ("lookahead", 5), ("budget", 6)),
        ],
        key=str,
    )
