"""The endpoint against a server that plays what real ones stream, and what goes wrong with them."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from mock_server import Script, serve

from baselines.endpoint import EndpointDecoder, EndpointOptions
from baselines.endpoint_stream import read_chunk
from harness.decoder import DecoderSetup, FinishReason, Request, SamplingParams
from harness.errors import EndpointError, ModelError, RequestError
from harness.measure import run_item
from harness.plan import Cell, WorkItem
from impl.engine import loader
from impl.engine.models import Models, ModelSpec

TINY = Path(__file__).parents[2] / "harness" / "tiny"
MODELS = Models(ModelSpec(TINY / "target"))


def chunk(text="", finish=None, **choice):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}]}


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(tokens, **event):
    return {"choices": [], **event, "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


@contextmanager
def open_decoder(url, batch_size=1, **options):
    setup = DecoderSetup(
        MODELS, EndpointOptions(url=url, **options), batch_size=batch_size, max_context=64
    )
    decoder = EndpointDecoder.create(setup)
    try:
        yield decoder
    finally:
        decoder.close()


def opened(url, **options):
    with open_decoder(url, **options) as decoder:
        return decoder.model


def request(name="a", max_new_tokens=10, prompt=(5, 9, 40), **settings):
    return Request(name, prompt, max_new_tokens, **settings)


def rounds_of(script, *, eos=frozenset({2}), max_new_tokens=10, **options):
    """Every round of one request."""
    with serve(script) as server, open_decoder(server.url, **options) as decoder:
        decoder.start([request(max_new_tokens=max_new_tokens, eos_token_ids=eos)])
        rounds = decoder.step()
        while rounds[-1].finish is None:
            rounds += decoder.step()
        decoder.release("a")
        source = decoder.diagnostics()["tokens_counted_by"]
    return rounds, source


def tokens_of(rounds):
    return [token for done in rounds for token in done.tokens]


# --- counting ------------------------------------------------------------------------------------


def test_tokens_are_taken_by_their_ids_however_many_a_chunk_holds():
    script = Script(
        [
            chunk("", token_ids=[]),
            chunk("ab", token_ids=[7, 8]),
            chunk("", token_ids=[9]),  # half a character: no text yet
            chunk("é c", token_ids=[10, 11, 12]),
            chunk("", "stop", token_ids=[2]),
            usage(7),
        ]
    )
    rounds, source = rounds_of(script)
    assert tokens_of(rounds) == [7, 8, 9, 10, 11, 12, 2]
    assert (rounds[-1].finish, source) == (FinishReason.EOS, "ids")
    assert {(r.drafted, r.accepted) for r in rounds} == {(0, 0)}


def test_tokens_are_counted_by_usage_in_every_chunk():
    script = Script(
        [
            delta(role="assistant") | {"usage": {"completion_tokens": 0}},
            delta(reasoning_content="so") | {"usage": {"completion_tokens": 2}},
            delta(content="") | {"usage": {"completion_tokens": 3}},
            delta(content="abc") | {"usage": {"completion_tokens": 6}},
            delta("stop") | {"usage": {"completion_tokens": 7}},
        ]
    )
    rounds, source = rounds_of(script)
    assert tokens_of(rounds) == [-1] * 7
    assert (rounds[-1].finish, source) == (FinishReason.EOS, "running count")


def test_tokens_are_counted_by_llama_cpps_timings():
    script = Script(
        [
            chunk("ab") | {"timings": {"predicted_n": 2}},
            chunk("c") | {"timings": {"predicted_n": 3}},
            chunk("", "length")
            | {"timings": {"predicted_n": 3}, "usage": {"completion_tokens": 3}},
        ]
    )
    rounds, _ = rounds_of(script, max_new_tokens=3)
    assert tokens_of(rounds) == [-1] * 3
    assert rounds[-1].finish is FinishReason.LENGTH


def test_a_count_that_comes_last_corrects_the_chunks():
    script = Script(
        [
            delta(role="assistant", content=""),
            delta(reasoning="so"),
            delta(content="ab"),
            delta(content=""),
            delta("stop"),
            usage(6),
        ]
    )
    rounds, source = rounds_of(script)
    assert tokens_of(rounds) == [-1] * 6
    assert source == "usage"
    assert rounds[-1].finish is FinishReason.EOS


def test_llama_cpps_own_api_tells_ids():
    script = Script(
        [
            {"content": "a", "tokens": [7], "stop": False, "tokens_predicted": 1},
            {"content": "b", "tokens": [8], "stop": False, "tokens_predicted": 2},
            {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "tokens_predicted": 3},
        ],
        done=False,
    )
    with serve(script) as server, open_decoder(server.url, api="llama.cpp") as decoder:
        decoder.start([request()])
        rounds = decoder.step()
        while rounds[-1].finish is None:
            rounds += decoder.step()
        path, _, body = server.requests[0]
    assert tokens_of(rounds) == [7, 8, -1]  # its end-of-sequence token is counted, not shown
    assert rounds[-1].finish is FinishReason.EOS
    assert (path, body["n_predict"], body["return_tokens"]) == ("/completion", 10, True)


# Where the second chunk makes up max_new_tokens, the harness itself ends the text before the server
# has told how many tokens there were.
LIMITS = pytest.mark.parametrize("max_new_tokens", [10, 2])


@LIMITS
def test_a_stream_without_counts_is_refused(max_new_tokens):
    script = Script([chunk("ab"), chunk("c"), chunk("", "length")])
    with pytest.raises(EndpointError, match="told neither token ids nor usage"):
        rounds_of(script, max_new_tokens=max_new_tokens)


@LIMITS
def test_counts_below_what_was_streamed_are_refused(max_new_tokens):
    script = Script([chunk("a"), chunk("b"), chunk("", "length"), usage(1)])
    with pytest.raises(EndpointError, match="counted 1 tokens behind 2 that it streamed"):
        rounds_of(script, max_new_tokens=max_new_tokens)


def test_a_text_that_is_full_is_counted_by_what_the_server_says_behind_it():
    script = Script([chunk("a"), chunk("b"), chunk("", "length"), usage(2)])
    rounds, source = rounds_of(script, max_new_tokens=2)
    assert (tokens_of(rounds), source) == ([-1, -1], "usage")
    assert rounds[-1].finish is FinishReason.LENGTH


def test_the_harness_s_own_rules_end_a_text_by_its_ids():
    events = [chunk("abc", token_ids=[7, 2, 8]), chunk("", "length", token_ids=[9])]
    rounds, _ = rounds_of(Script(events))
    assert (tokens_of(rounds), rounds[-1].finish) == ([7, 2], FinishReason.EOS)


def test_an_end_behind_the_last_token_is_a_round_of_its_own():
    gate = threading.Event()
    script = Script([chunk("a", token_ids=[7]), gate.wait, chunk("", "stop", token_ids=[])])
    with serve(script) as server, open_decoder(server.url) as decoder:
        decoder.start([request()])
        assert decoder.step()[0].tokens == (7,)
        gate.set()
        (last,) = decoder.step()
    assert (last.tokens, last.finish) == ((), FinishReason.EOS)


# --- timing --------------------------------------------------------------------------------------


def test_start_returns_with_the_first_token_and_step_waits_for_the_next():
    """A role and an empty chunk are no first token."""
    first, second = threading.Event(), threading.Event()
    script = Script(
        [
            chunk("", token_ids=[]),
            first.wait,
            chunk("a", token_ids=[7]),
            second.wait,
            chunk("b", "stop", token_ids=[8, 2]),
        ]
    )
    with serve(script) as server, open_decoder(server.url) as decoder:
        started = threading.Thread(target=decoder.start, args=([request()],))
        started.start()
        started.join(0.2)
        assert started.is_alive()
        first.set()
        started.join(10)
        assert not started.is_alive()
        assert decoder.step()[0].tokens == (7,)
        stepped: list[int] = []
        step = threading.Thread(target=lambda: stepped.extend(decoder.step()[0].tokens))
        step.start()
        step.join(0.2)
        assert step.is_alive()
        second.set()
        step.join(10)
        assert stepped == [8, 2]


def test_admitting_beside_a_live_stream_does_not_wait():
    """Or what the server decodes meanwhile would be in nobody's time."""
    gate = threading.Event()
    streams = iter(
        [
            Script([chunk("a", token_ids=[7]), gate.wait, chunk("", "stop", token_ids=[2])]),
            Script([gate.wait, chunk("", "stop", token_ids=[8, 2])]),
        ]
    )
    both = serve(lambda _: next(streams))
    with both as server, open_decoder(server.url, batch_size=2) as decoder:
        decoder.start([request("a")])
        decoder.step()
        decoder.admit(request("b"))  # returns, though nothing of b has arrived
        gate.set()
        rounds = {done.request_id: done.tokens for done in decoder.step()}
        assert rounds == {"a": (2,), "b": (8, 2)}


def test_the_harness_measures_it_like_any_method():
    def script(body):
        ids = [body["prompt"][0], 30, 2]
        return Script(
            [chunk("x", token_ids=[i]) for i in ids[:2]] + [chunk("", "stop", token_ids=[2])]
        )

    requests = [
        request(f"r{i}", prompt=(10 + i, 3), eos_token_ids=frozenset({2})) for i in range(5)
    ]
    cell = Cell("endpoint", "mini", 0.0, 2)
    item = WorkItem(cell, 0, 0, tuple(range(5)))
    with serve(script) as server, open_decoder(server.url, batch_size=2) as decoder:
        result = run_item(decoder, item, requests)
    assert {row.request_id: row.output_ids for row in result.requests} == {
        f"r{i}": (10 + i, 30, 2) for i in range(5)
    }
    assert {row.finish for row in result.requests} == {"eos"}


# --- what is sent --------------------------------------------------------------------------------

ONE = Script([chunk("a", "length", token_ids=[7])])


def sent(options, sampling=SamplingParams(0.7, top_k=5, top_p=0.9, seed=3)):  # noqa: B008
    with serve(ONE) as server, open_decoder(server.url, **options) as decoder:
        decoder.start([request(max_new_tokens=1, sampling=sampling)])
        decoder.step()
        return server.requests[0]


def test_the_prompt_goes_as_ids_with_everything_that_could_change_the_distribution():
    path, headers, body = sent({})
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([5, 9, 40], 1, "mock")
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 0.9, 5, 0)
    assert body["repetition_penalty"] == body["repeat_penalty"] == 1
    assert headers["Accept-Encoding"] == "identity"  # a compressed stream comes in blocks
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert sent({}, SamplingParams(1.0))[2]["top_k"] == -1


def test_only_what_openai_knows():
    _, _, body = sent({"openai_only": True, "prompt": "text"})
    known = {"model", "stream", "temperature", "top_p", "seed", "max_tokens", "prompt"}
    assert set(body) == known | {"stream_options"}
    assert body["stream_options"] == {"include_usage": True}
    assert isinstance(body["prompt"], str)


def test_chat_sends_a_message():
    path, _, body = sent({"api": "chat"})
    assert path == "/v1/chat/completions"
    ((message),) = body["messages"]
    assert (message["role"], type(message["content"])) == ("user", str)


@pytest.mark.parametrize(
    ("options", "loads"), [({}, 0), ({"prompt": "text"}, 1), ({"api": "chat"}, 1)]
)
def test_a_tokenizer_is_loaded_before_anything_is_timed(monkeypatch, options, loads):
    loaded = []
    load = loader.load_tokenizer
    monkeypatch.setattr(loader, "load_tokenizer", lambda f: loaded.append(f) or load(f))
    with serve(ONE) as server, open_decoder(server.url, **options) as decoder:
        assert len(loaded) == loads
        for name in ("a", "b"):
            decoder.start([request(name, max_new_tokens=1)])
        assert len(loaded) == loads


def test_each_request_has_a_seed_of_its_own():
    with serve(ONE) as server, open_decoder(server.url) as decoder:
        for name in ("a", "b", "a"):
            decoder.start([request(name, max_new_tokens=1)])
            decoder.step()
        seeds = [body["seed"] for _, _, body in server.requests]
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("MOCK_KEY", "secret")
    assert sent({"api_key_env": "MOCK_KEY"})[1]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("MOCK_KEY")
    with pytest.raises(ModelError, match=r"endpoint\.api_key_env: MOCK_KEY is not set"):
        sent({"api_key_env": "MOCK_KEY"})


# --- what goes wrong -----------------------------------------------------------------------------

JSON = "application/json"
FAILURES = {
    "429 with JSON": (
        Script(status=429, body='{"error": {"message": "slow down"}}', content_type=JSON),
        "answered 429 Too Many Requests: slow down; it is busy",
    ),
    "500 with HTML": (
        Script(status=500, body="<html><h1>Bad</h1> gateway</html>", content_type="text/html"),
        "answered 500 Internal Server Error: Bad gateway",
    ),
    "401": (
        Script(status=401, body='{"error": "no key"}', content_type=JSON),
        "no key; set endpoint.api_key_env",
    ),
    "404": (
        Script(status=404, body='{"detail": "Not Found"}', content_type=JSON),
        "Not Found; check endpoint.url",
    ),
    "400 without a reason": (
        Script(status=400),
        "answered 400 Bad Request: no reason given; endpoint.openai_only=true leaves out",
    ),
    "cut in the middle": (
        Script([chunk("a", token_ids=[7])], done=False),
        "cut the stream before its end",
    ),
    "cut in an event": (
        Script([chunk("a", token_ids=[7]), 'data: {"choices": [{"te'], done=False),
        "cut the stream before its end|not JSON",
    ),
    "malformed JSON": (Script(["data: {oops}\n\n"]), "not JSON: {oops}"),
    "JSON, but no object": (Script(["data: 17\n\n"]), "not a JSON object: 17"),
    "odd shapes": (Script([{"choices": 5}]), "streamed something unexpected"),
    "an error in the stream": (
        Script([chunk("a", token_ids=[7]), {"error": {"message": "out of memory"}}]),
        "ended its stream with an error: out of memory",
    ),
    "no stream at all": (Script(['{"choices": []}'], content_type=JSON), "broke the stream"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_say_what_the_server_did(name):
    script, message = FAILURES[name]
    with pytest.raises(EndpointError, match=message) as caught:
        rounds_of(script)
    assert "request a: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_stalls_is_given_up():
    gate = threading.Event()
    script = Script([chunk("a", token_ids=[7]), lambda: gate.wait(5)])
    with pytest.raises(EndpointError, match="sent nothing for too long"):
        rounds_of(script, read_timeout=0.3)
    gate.set()


def test_signs_of_life_are_no_tokens():
    """llama.cpp's pings: comments, so that a client or a proxy goes on waiting."""

    def pings():
        while True:
            time.sleep(0.05)
            yield ": ping\n\n"

    with serve(Script(pings())) as server, open_decoder(server.url, read_timeout=0.3) as decoder:
        decoder.start([request()])
        reader = decoder.streams["a"]._thread
        with pytest.raises(EndpointError, match=r"sent nothing for too long \(no token\)"):
            decoder.step()
        decoder.close()
        assert not reader.is_alive()  # the pings would keep it reading for ever


def test_a_released_stream_is_closed_though_the_server_says_nothing():
    gate = threading.Event()
    script = Script([chunk("a", token_ids=[7]), lambda: gate.wait(60)])
    with serve(script) as server, open_decoder(server.url) as decoder:
        decoder.start([request()])
        decoder.step()
        reader = decoder.streams["a"]._thread
        decoder.release("a")
        assert not reader.is_alive()
        gate.set()


def test_closing_does_not_wait_for_a_request_that_is_not_answered():
    gate = threading.Event()

    def script(body):
        if body["prompt"] == [1]:
            gate.wait(60)
        return ONE

    with serve(script) as server:
        with open_decoder(server.url, batch_size=2) as decoder:
            decoder.start([request("a"), request("b", prompt=(1,))])
            begin = time.monotonic()
        assert time.monotonic() - begin < 20
        gate.set()


def test_no_connection_outlives_its_request():
    """An idle one may be closed by the server at any time, and holds one of its threads."""
    with serve(ONE) as server, open_decoder(server.url) as decoder:
        for _ in range(3):
            decoder.start([request(max_new_tokens=1)])
            decoder.step()
        assert len(server.clients) == 4  # the list of models, and a request each


def test_a_server_that_is_not_there():
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1: cannot be reached"):
        opened("http://127.0.0.1:9/v1", connect_timeout=1)


def test_which_model_must_be_said_where_there_are_several():
    with serve(ONE, models=("one", "two")) as server:
        with pytest.raises(EndpointError, match=r"has 2 models; set endpoint\.model"):
            opened(server.url)
        opened(server.url, model="two")


def test_a_prompt_beyond_the_context_never_reaches_the_server():
    with serve(ONE) as server, open_decoder(server.url) as decoder:
        with pytest.raises(RequestError, match="leaves no room in a context of 64"):
            decoder.start([request(prompt=tuple(range(64)))])
        assert server.requests == []


def test_a_failed_request_leaves_nothing_behind():
    scripts = iter([Script(status=500), ONE])
    with serve(lambda _: next(scripts)) as server, open_decoder(server.url) as decoder:
        decoder.start([request()])
        with pytest.raises(EndpointError):
            decoder.step()
        decoder.start([request()])
        assert decoder.step()[0].tokens == (7,)


def test_fields_of_a_chunk_by_hand():
    found = read_chunk('{"choices": [{"delta": {"content": null}, "finish_reason": "length"}]}')
    assert (found.ids, found.count, found.has_text, found.finish) == (None, None, False, "length")
    found = read_chunk('{"choices": [{"text": "a", "token_ids": [1, 2]}], "usage": null}')
    assert (found.ids, found.count, found.has_text, found.finish) == ((1, 2), None, True, None)
