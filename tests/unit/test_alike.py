"""Which nodes may measure one run: their kind of machine, their GPUs, and how a refusal reads."""

from typing import Any

from harness.launch.alike import refused_nodes


def machine(model: str = "EPYC", gpus: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"cpu": {"model": model}, "gpus": [{"name": gpu} for gpu in gpus], **fields}


def test_the_kind_of_machine_that_most_nodes_are_measures() -> None:
    nodes = {"a": machine("Xeon"), "b": machine(), "c": machine(load_average=3.0)}
    assert refused_nodes(nodes, None, None) == {
        "a": "it differs in cpu.model: 'EPYC' and 'Xeon'",
    }


def test_of_two_kinds_that_are_as_many_the_first_measures() -> None:
    nodes = {"a": machine("Xeon"), "b": machine()}
    assert list(refused_nodes(nodes, None, None)) == ["b"]


def test_a_resumed_run_goes_on_with_its_own_kind_of_machine_even_if_it_is_the_rarer() -> None:
    nodes = {"a": machine("Xeon"), "b": machine(), "c": machine()}
    assert sorted(refused_nodes(nodes, None, machine("Xeon"))) == ["b", "c"]


def test_every_gpu_must_be_the_required_one() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    nodes = {
        "cpu-1": machine(),
        "cpu-2": machine(),
        "cpu-3": machine(),
        "mixed": machine(gpus=(h100, "NVIDIA A100-SXM4-80GB")),
        "good": machine(gpus=(h100, h100)),
    }
    assert refused_nodes(nodes, "h100", None) == {
        **dict.fromkeys(
            ("cpu-1", "cpu-2", "cpu-3"), "require_accelerator: h100 is not what it has (no GPU)"
        ),
        "mixed": "require_accelerator: h100 is not what it has "
        "(NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB)",
    }


def test_a_refusal_names_four_fields_and_counts_the_others() -> None:
    nodes = {"a": machine(**dict.fromkeys("uvwxyz", 1)), "b": machine(**dict.fromkeys("uvwxyz", 2))}
    assert refused_nodes(nodes, None, None) == {
        "b": "it differs in u: 1 and 2; v: 1 and 2; w: 1 and 2; x: 1 and 2; 2 more"
    }
