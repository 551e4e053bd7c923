"""The endpoint against a real llama.cpp server (pip install xllamacpp) with SmolLM2's GGUF file."""

import pytest

from baselines.endpoint import EndpointDecoder, EndpointOptions
from harness.cache import default_cache_dir
from harness.decoder import UNKNOWN_TOKEN, DecoderSetup, FinishReason, Request
from harness.errors import HarnessError
from harness.pairs import find_pair, resolve
from impl.engine.loader import load_tokenizer
from impl.engine.models import Models, ModelSpec

xllamacpp = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    try:
        return resolve(find_pair("smollm2-135m"), default_cache_dir()).target
    except HarnessError as error:
        pytest.skip(f"the weights cannot be had here: {error}")


@pytest.fixture(scope="module")
def url(target):
    params = xllamacpp.CommonParams()
    files = (default_cache_dir() / "models" / target.sha256).glob("*.gguf")
    params.model.path = str(next(files))
    params.n_ctx, params.n_parallel, params.port = 1024, 2, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    del server


def decode(folder, url, requests, **options):
    setup = DecoderSetup(
        Models(ModelSpec(folder)),
        EndpointOptions(url=url, **options),
        batch_size=2,
        max_context=512,
    )
    decoder = EndpointDecoder.create(setup)
    outputs = {request.request_id: [] for request in requests}
    finish = {}
    decoder.start(requests)
    while len(finish) < len(requests):
        for done in decoder.step():
            outputs[done.request_id] += done.tokens
            if done.finish is not None:
                finish[done.request_id] = done.finish
    source = decoder.diagnostics()["tokens_counted_by"]
    decoder.close()
    return outputs, finish, source


@pytest.fixture(scope="module")
def requests(target):
    tokenizer = load_tokenizer(target.folder)
    texts = ("The capital of France is", "Rain, rain, go")
    return [
        Request(f"r{i}", tuple(tokenizer(text)["input_ids"]), 12) for i, text in enumerate(texts)
    ]


def test_ids_by_its_own_api_and_counts_by_openais(target, url, requests):
    outputs, finish, source = decode(target.folder, url, requests, api="llama.cpp")
    assert source == "ids"
    assert [len(ids) for ids in outputs.values()] == [12, 12]
    assert UNKNOWN_TOKEN not in outputs["r0"]
    assert "Paris" in load_tokenizer(target.folder).decode(outputs["r0"])
    assert set(finish.values()) == {FinishReason.LENGTH}
    counted, _, source = decode(target.folder, url, requests)
    assert source == "running count"
    assert {name: len(ids) for name, ids in counted.items()} == {"r0": 12, "r1": 12}
