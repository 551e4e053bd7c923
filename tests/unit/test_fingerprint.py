import json
import os

import pytest

from harness import fingerprint as module
from harness.decoder import Placement
from harness.fingerprint import fingerprint, identity, machine_differences, package_versions


@pytest.fixture(scope="module")
def here():
    return fingerprint(Placement(target_cores=(0,), draft_cores=(0,)))


def test_fingerprint_is_strict_json_and_says_what_this_machine_is(here):
    assert json.loads(json.dumps(here, allow_nan=False)) == here
    assert here["cpu"]["cores_available"] == len(os.sched_getaffinity(0))
    assert here["memory_bytes"] > 2**28
    assert here["placement"] == {
        "target_cores": [0],
        "draft_cores": [0],
        "shared": True,
        "convention": "equal-target",
        "target_devices": ["cpu"],
        "draft_device": "cpu",
        "channel": "shared",
    }
    # some builds carry "+cu130" in the module and not in the package
    assert here["torch"]["version"].split("+")[0] == package_versions()["torch"].split("+")[0]


def test_differences_name_the_fields_of_identity(here):
    other = json.loads(json.dumps(here))
    other["load_average"] = 99.0
    other["cpu"]["frequency_mhz"] = 1.0
    other["environment"]["HARNESS_CACHE_DIR"] = "/elsewhere"
    assert machine_differences(here, other) == []
    other["cpu"]["model"] = "Z80"
    other["environment"]["OMP_PROC_BIND"] = "true"
    assert machine_differences(here, other) == [
        f"cpu.model: {here['cpu']['model']!r} and 'Z80'",
        "environment.OMP_PROC_BIND: None and 'true'",
    ]


def test_cpu_info_is_that_of_the_first_processor():
    text = "processor\t: 0\nmodel name\t: Fast CPU: v2\nflags\t: fpu avx2\n\nmodel name\t: Other\n"
    assert module._cpu_info(text)["model name"] == "Fast CPU: v2"
    assert module._cpu_info("") == {}


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), (None, None)],
)
def test_quota_of_a_container_is_in_cores(cpu_max, cores):
    assert module._quota(cpu_max) == cores


def test_environment_keeps_what_matters_and_no_secret():
    variables = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "HARNESS_DATA_DIR": "/data",
        "HARNESS_API_KEY": "secret",
        "HOME": "/home/me",
    }
    kept = ["CUDA_VISIBLE_DEVICES", "HARNESS_DATA_DIR", "OMP_NUM_THREADS"]
    variables |= {"CUDA_HOME": "/usr", "NCCL_P2P_DISABLE": "1", "LD_PRELOAD": "libtcmalloc.so"}
    kept = sorted([*kept, "NCCL_P2P_DISABLE", "LD_PRELOAD"])
    assert list(module._environment(variables)) == kept


def test_a_variable_that_torch_gives_itself_is_no_difference(here):
    own = {**here["environment"], "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"}
    assert machine_differences(here, {**here, "environment": own}) == []
    chosen = {**here["environment"], "TORCHINDUCTOR_FREEZING": "1"}
    assert len(machine_differences(here, {**here, "environment": chosen})) == 1


def test_libraries_and_instruction_sets_are_told(here):
    from transformers import __version__ as transformers

    assert here["libraries"]["transformers"] == transformers
    assert here["libraries"].keys() == {"transformers", "tokenizers", "flash-attn"}
    assert {"cpu_capability", "blas", "onednn", "cuda", "cudnn", "nccl"} <= here["torch"].keys()


BUILT = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605
  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)
  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release, LAPACK_INFO=mkl
"""


@pytest.mark.parametrize(
    ("pattern", "told"),
    [(r"BLAS_INFO=(\w+)", "open"), (r"MKL-DNN v([\d.]+)", "3.12.0"), (r"NNPACK v(\d)", None)],
)
def test_what_pytorch_was_built_with(pattern, told):
    assert module._built_with(pattern, BUILT) == told


def gpu(number, **fields):
    return {"name": "H200", "uuid": f"GPU-{number}", "power_limit_w": 700.0} | fields


def test_gpus_differ_by_their_settings_and_their_number_but_not_by_their_uuid(here):
    one = here | {"gpus": [gpu(1), gpu(2)], "gpu_driver": "580.1"}
    assert machine_differences(one, one | {"gpus": [gpu(3), gpu(4)]}) == []
    other = one | {"gpus": [gpu(1), gpu(2, power_limit_w=300.0)], "gpu_driver": "590.2"}
    assert machine_differences(one, other) == [
        "gpu_driver: '580.1' and '590.2'",
        "gpus.1.power_limit_w: 700.0 and 300.0",
    ]
    assert machine_differences(one, one | {"gpus": [gpu(1)]}) == ["gpus.count: 2 and 1"]


def test_what_an_older_program_did_not_record_is_no_difference(here):
    older = {name: value for name, value in here.items() if name != "libraries"}
    older["torch"] = {"version": here["torch"]["version"]}
    assert machine_differences(older, here) == machine_differences(here, older) == []


def test_a_thread_count_that_a_process_gave_itself_is_no_identity():
    import torch

    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(identity(fingerprint(Placement())))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
