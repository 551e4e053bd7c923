"""Finding methods by name through entry points, broken ones included."""

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import ClassVar

import pytest
from pydantic import Field

from harness import registry
from harness.decoder import Decoder, DecoderOptions, DecoderSetup
from harness.errors import HarnessError, UsageError


class DraftingOptions(DecoderOptions):
    lookahead: int = Field(4, ge=1)


class Drafting(Decoder):
    name: ClassVar[str] = "sd"
    Options: ClassVar[type[DecoderOptions]] = DraftingOptions

    @classmethod
    def create(cls, setup: DecoderSetup) -> Decoder:
        raise NotImplementedError

    def start(self, requests):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    admit = release = step = close = start  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    values = {
        "sd": f"{here}:Drafting",
        "absent": "no_such_module:Decoder",
        "odd": "json:dumps",
        "ar": f"{here}:Drafting",
    }
    points = EntryPoints(EntryPoint(n, v, registry.GROUP) for n, v in values.items())
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def test_methods_are_listed_in_order_of_name_broken_ones_too() -> None:
    assert list(registry.available()) == ["absent", "ar", "odd", "sd"]


def test_a_method_is_imported_by_name() -> None:
    assert registry.decoder_class("sd").name == "sd"


def test_an_unknown_method_names_the_near_match() -> None:
    with pytest.raises(UsageError) as error:
        registry.decoder_class("sdd")
    assert str(error.value) == 'unknown method "sdd": did you mean "sd"? (see harness methods)'


def test_a_method_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r'unknown method "xyz": known: absent, ar, odd, sd'):
        registry.decoder_class("xyz")


def test_a_broken_entry_point_says_why() -> None:
    with pytest.raises(HarnessError) as error:
        registry.decoder_class("absent")
    assert str(error.value) == (
        "method 'absent' (no_such_module:Decoder) cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_an_entry_point_that_is_no_decoder_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"'odd' \(json:dumps\) is not a subclass"):
        registry.decoder_class("odd")


def test_options_are_validated_by_the_method() -> None:
    assert registry.decoder_options("sd", {"lookahead": "6"}) == DraftingOptions(lookahead=6)
    assert registry.decoder_options("sd", {}) == DraftingOptions(lookahead=4)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"lokahead": 6}, 'unknown option "sd.lokahead": did you mean "sd.lookahead"?'),
        ({"lookahead": 0}, "sd.lookahead: must be >= 1"),
    ],
)
def test_a_wrong_option_is_one_line(values: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as error:
        registry.decoder_options("sd", values)
    assert str(error.value) == line


def test_a_variant_is_its_methods_class_under_its_own_name() -> None:
    assert registry.registered_name("sd:k0.5") == "sd"
    assert registry.decoder_class("sd:k6") is registry.decoder_class("sd")
    assert registry.decoder_options("sd:k6", {"lookahead": 6}) == DraftingOptions(lookahead=6)


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("sdd:k6", 'unknown method "sdd": did you mean "sd"? (see harness methods)'),
        ("sd:", 'method "sd:": needs a label behind the colon, as in sd:a'),
    ],
)
def test_a_wrong_variant_is_one_line(method: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        registry.decoder_class(method)
    assert str(error.value) == line


def test_a_variants_wrong_option_is_told_by_its_full_name() -> None:
    with pytest.raises(UsageError, match=r"^sd:k0\.lookahead: must be >= 1$"):
        registry.decoder_options("sd:k0", {"lookahead": 0})


def test_listing_imports_no_method() -> None:
    code = (
        "import sys; from harness.registry import available; assert available();"
        "print([m for m in sys.modules if m.split('.')[0] in ('baselines', 'impl', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
