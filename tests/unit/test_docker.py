"""What can be told of the container recipes without a container engine."""

import re
from pathlib import Path

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
RECIPES = sorted(DOCKER.glob("*.Dockerfile"))
BASE = re.compile(r"[a-z/]+:[a-z0-9.-]+@sha256:[0-9a-f]{64}")


def instructions(recipe: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) of each, continued lines joined, comments left out."""
    lines = [x for x in recipe.read_text().splitlines() if not x.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
class TestRecipe:
    def test_bases_are_pinned_by_tag_and_digest(self, recipe: Path) -> None:
        bases = [rest.split()[0] for name, rest in instructions(recipe) if name == "FROM"]
        assert bases
        assert all(BASE.fullmatch(base) for base in bases)

    def test_it_runs_as_an_ordinary_user(self, recipe: Path) -> None:
        last_stage = [name for name, _ in instructions(recipe)]
        assert last_stage[::-1].index("USER") < last_stage[::-1].index("FROM")
        users = [rest for name, rest in instructions(recipe) if name == "USER"]
        assert int(users[-1]) > 0
        assert f"--uid {users[-1]} harness" in recipe.read_text()

    def test_every_package_comes_with_the_pinned_versions(self, recipe: Path) -> None:
        installs = [r for name, r in instructions(recipe) if name == "RUN" and "pip " in r]
        assert installs
        assert all("-c constraints.txt" in install for install in installs)


def test_compose_builds_these_recipes() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    built = {service["build"]["dockerfile"] for service in compose["services"].values()}
    assert built == {f"docker/{recipe.name}" for recipe in RECIPES}
    images = {service["image"] for service in compose["services"].values()}
    assert images == {f"saguaro-harness:{recipe.stem}" for recipe in RECIPES}
