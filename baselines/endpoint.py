"""endpoint: any server with OpenAI's streaming API (vLLM, SGLang, llama.cpp, TGI, ...).

Prompts go as token ids, so that the server continues what the other methods continue. Sampling
parameters that servers set by themselves are sent with their neutral values. The request's end is
the server's; token ids, where it tells them, are checked against the same rules as everywhere.

Prefill: `start` returns with the first token of any of its streams. Up to then the server has only
prefilled; what it prefills later, of this batch or of requests admitted to it, falls into steps, as
the server goes on decoding the others meanwhile. So the first token comes with the prefill: time
per output token compares with other methods', n tokens take n - 1 token times.
Switch prefix caching off on the server, or repeated prompts are not prefilled at all. Give it a
slot for each sequence of a batch: a step waits for a token of each, so for one in a queue as well.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from harness.decoder import Decoder, DecoderOptions, DecoderSetup, FinishReason, Request, Round
from harness.errors import EndpointError, ModelError, RequestError
from impl.engine.sequence import Sequence, SequenceSlots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from baselines.endpoint_stream import Stream


class EndpointOptions(DecoderOptions):
    """Where the server is and what it understands."""

    url: str = Field("http://127.0.0.1:8000/v1", description="of the API; ends in /v1")
    model: str | None = Field(None, description="by the server's name; its only one by default")
    api: Literal["completions", "chat", "llama.cpp"] = Field(
        "completions",
        description="chat sends a prompt as a user's message (use it with --raw); llama.cpp is its "
        "own /completion, which tells token ids",
    )
    prompt: Literal["ids", "text"] = Field("ids", description="how a prompt is sent; chat: text")
    openai_only: bool = Field(False, description="leave out what OpenAI's own API does not know")
    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    connect_timeout: float = Field(10, gt=0, description="seconds")
    read_timeout: float = Field(120, gt=0, description="seconds without a token")


class EndpointDecoder(Decoder):
    """See the module docstring. Streams of a batch run side by side on the server."""

    name = "endpoint"
    Options = EndpointOptions
    own_kernels = True

    def __init__(self, setup: DecoderSetup, options: EndpointOptions) -> None:
        import httpx2

        self.setup, self.options = setup, options
        self.slots = SequenceSlots(setup.batch_size, setup.max_context)
        self.streams: dict[str, Stream] = {}
        self.arrival = threading.Condition()
        self.source = ""
        self.tokenizer = self._tokenizer()
        self.client = httpx2.Client(
            # A compressor would hold tokens back.
            headers={"Accept-Encoding": "identity", **_authorization(options)},
            timeout=httpx2.Timeout(options.read_timeout, connect=options.connect_timeout),
            # A connection for each request: none that the server has closed meanwhile, and none
            # that keeps one of its threads waiting.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        try:
            self.model = options.model or self._only_model()
        except EndpointError:
            self.client.close()
            raise

    @classmethod
    def create(cls, setup: DecoderSetup) -> EndpointDecoder:
        """See `Decoder.create`."""
        return cls(setup, EndpointOptions.model_validate(setup.options.model_dump()))

    def start(self, requests: List[Request]) -> None:
        """See `Decoder.start` and the module docstring."""
        self._release_all()
        try:
            for request in requests:
                self._open(request)
            self._await_first()
        except (RequestError, EndpointError):
            self._release_all()
            raise

    def admit(self, request: Request) -> None:
        """See `Decoder.admit` and the module docstring."""
        alone = not self.slots.live()
        self._open(request)
        if alone:
            self._await_first()

    def release(self, request_id: str) -> None:
        """See `Decoder.release`."""
        self.slots.close(request_id)
        self.streams.pop(request_id).close()

    def step(self) -> list[Round]:
        """Whatever has arrived for each sequence, at least one token."""
        return [self._round(sequence) for sequence in self.slots.live()]

    def close(self) -> None:
        """See `Decoder.close`."""
        self._release_all()
        self.client.close()

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """Which model answered, and what its tokens were counted by."""
        return {"endpoint": self.options.url, "model": self.model, "tokens_counted_by": self.source}

    def _round(self, sequence: Sequence) -> Round:
        name = sequence.request.request_id
        stream = self.streams[name]
        try:
            tokens = sequence.append(stream.take(self.options.read_timeout))
            if sequence.finish is not None:
                stream.settle(self.options.read_timeout)
        except EndpointError as error:
            raise EndpointError(f"{self.options.url}: request {name}: {error}") from error
        self.source = stream.source
        if sequence.finish is None and stream.ended:
            stopped = stream.finish not in ("length", "limit")
            sequence.finish = FinishReason.EOS if stopped else FinishReason.CONTEXT
        return Round(name, tokens, drafted=0, accepted=0, finish=sequence.finish)

    def _open(self, request: Request) -> None:
        import httpx2

        from baselines.endpoint_stream import Stream, check_status

        sequence = self.slots.open(request)
        body = self._body(request, sequence.draft_limit(self.setup.max_context) + 1)
        message = self.client.build_request("POST", self._address(), json=body)

        def send() -> httpx2.Response:
            return check_status(self.client.send(message, stream=True))

        self.streams[request.request_id] = Stream(send, self.arrival)

    def _await_first(self) -> None:
        """Returns when any stream has something to take, good or bad, or none has for too long."""
        with self.arrival:
            self.arrival.wait_for(
                lambda: not self.streams or any(s.ready for s in self.streams.values()),
                self.options.read_timeout,
            )

    def _release_all(self) -> None:
        for sequence in self.slots.all():
            name = sequence.request.request_id
            if name in self.streams:
                self.release(name)
            else:
                self.slots.close(name)

    def _address(self) -> str:
        url = self.options.url.rstrip("/")
        if self.options.api == "llama.cpp":
            return f"{url.removesuffix('/v1')}/completion"
        return f"{url}/{'chat/' if self.options.api == 'chat' else ''}completions"

    def _body(self, request: Request, most: int) -> dict[str, Any]:
        sampling, options = request.sampling, self.options
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": _seed(request),
            ("n_predict" if options.api == "llama.cpp" else "max_tokens"): most,
            **self._prompt(request),
        }
        if options.api != "llama.cpp":
            body["stream_options"] = {"include_usage": True}
        return body if options.openai_only else _merged(body, _extensions(sampling.top_k))

    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Where prompts go as text; loaded once, as that takes longer than many a prefill."""
        if self.options.api != "chat" and self.options.prompt == "ids":
            return None
        from impl.engine.loader import load_tokenizer

        return load_tokenizer(self.setup.models.target_folder)

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.tokenizer is None:
            return {"prompt": list(request.prompt_ids)}
        text = self.tokenizer.decode(list(request.prompt_ids))
        if self.options.api == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def _only_model(self) -> str:
        """The name of the one model that the server has."""
        import httpx2

        from baselines.endpoint_stream import check_status

        url = self.options.url.rstrip("/")
        try:
            data = check_status(self.client.get(f"{url}/models")).json()["data"]
            names = [model["id"] for model in data]
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EndpointError(f"{url}: cannot be reached ({error}); is it running?") from error
        except EndpointError as error:
            raise EndpointError(f"{url}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{url}: lists no models; set endpoint.model") from error
        if len(names) != 1:
            raise EndpointError(f"{url}: has {len(names)} models; set endpoint.model")
        return str(names[0])


def _authorization(options: EndpointOptions) -> dict[str, str]:
    if options.api_key_env is None:
        return {}
    key = os.environ.get(options.api_key_env)
    if not key:
        raise ModelError(f"endpoint.api_key_env: {options.api_key_env} is not set or empty")
    return {"Authorization": f"Bearer {key}"}


def _extensions(top_k: int) -> dict[str, Any]:
    """What servers know beyond OpenAI's API: ids, counts, and their own defaults made neutral."""
    return {
        "top_k": top_k or -1,  # off, for vLLM, SGLang and llama.cpp alike
        "min_p": 0.0,
        "repetition_penalty": 1.0,  # vLLM, SGLang
        "repeat_penalty": 1.0,  # llama.cpp
        "return_token_ids": True,  # vLLM
        "return_tokens": True,  # llama.cpp
        "timings_per_token": True,  # llama.cpp
        "cache_prompt": False,  # llama.cpp
        "stream_options": {"continuous_usage_stats": True},  # vLLM, SGLang
    }


def _merged(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    options = {**body.get("stream_options", {}), **more["stream_options"]}
    return {**body, **more, "stream_options": options}


def _seed(request: Request) -> int:
    """Another one for each request, so that repeats of a prompt differ; 31 bits."""
    key = f"{request.sampling.seed}:{request.request_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1
