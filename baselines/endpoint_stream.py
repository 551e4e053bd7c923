"""What an OpenAI-compatible server streams, read into tokens: by ids or by its own count.

A chunk is no token: it may hold several, or none, or only a role. So tokens are taken, in this
order of preference, from ids (vLLM's `token_ids`, llama.cpp's `tokens`), from a running count
(`usage` in every chunk, llama.cpp's `timings`), or from the `usage` of the last chunk. In the last
case a chunk with text counts as one token until the end says how many there were; a stream that
never says is refused.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from harness.decoder import UNKNOWN_TOKEN
from harness.errors import EndpointError

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "text")
_MOST_OF_A_MESSAGE = 300  # characters of what a server says about an error
_LONGEST_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream.

    Attributes:
        ids: of its tokens; None where the server tells none.
        count: tokens of the whole stream so far; None where the event does not say.
        has_text: whether it carries any text, the model's reasoning included.
        finish: why the stream ends; None before its end.
    """

    ids: tuple[int, ...] | None
    count: int | None
    has_text: bool
    finish: str | None


def read_chunk(data: str) -> Chunk:
    """Reads the data of an event of `/completions`, `/chat/completions` or llama.cpp's own API.

    Raises:
        EndpointError: no JSON object, or an error that the server reports in its stream.
    """
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EndpointError(f"streamed something that is not JSON: {_cut(data)}") from error
    if not isinstance(event, dict):
        raise EndpointError(f"streamed something that is not a JSON object: {_cut(data)}")
    if event.get("error"):
        raise EndpointError(f"ended its stream with an error: {_error_text(event)}")
    choice = (event.get("choices") or [event])[0]
    parts = {**choice, **(choice.get("delta") or {})}
    ids = parts.get("token_ids", parts.get("tokens"))
    return Chunk(
        ids=None if ids is None else tuple(ids),
        count=_count(event),
        has_text=any(parts.get(field) for field in _TEXT_FIELDS),
        finish=event.get("stop_type") if event.get("stop") else choice.get("finish_reason"),
    )


def _count(event: Mapping[str, Any]) -> int | None:
    for field, name in (("usage", "completion_tokens"), ("timings", "predicted_n")):
        count = (event.get(field) or {}).get(name)
        if count is not None:
            return int(count)
    count = event.get("tokens_predicted")
    return None if count is None else int(count)


class TokenCount:
    """The tokens of a stream, chunk by chunk.

    Attributes:
        total: tokens so far.
        source: what told them: "ids", "running count" or, at the end, "usage"; "chunks" for as long
            as nothing else has, "" before the first.
    """

    def __init__(self) -> None:
        self.total = 0
        self.source = ""
        self._told: int | None = None

    def add(self, chunk: Chunk) -> list[int]:
        """The chunk's tokens; `UNKNOWN_TOKEN` for one without an id.

        Raises:
            EndpointError: fewer tokens than chunks with text.
        """
        tokens = list(chunk.ids or ())
        if tokens:
            self.source = "ids"
        if chunk.count is not None:
            self._told = chunk.count
            missing = chunk.count - self.total - len(tokens)
            if missing < 0:
                raise EndpointError(
                    f"counted {chunk.count} tokens behind {self.total + len(tokens)} that it "
                    "streamed; its counts cannot be used"
                )
            tokens += [UNKNOWN_TOKEN] * missing
            self.source = "usage" if self.source == "chunks" else self.source or "running count"
        elif chunk.has_text and chunk.ids is None:
            tokens = [UNKNOWN_TOKEN]
            self.source = "chunks"
        self.total += len(tokens)
        return tokens

    def check(self) -> None:
        """Raises `EndpointError` where nothing but chunks was there to be counted."""
        if self.source == "chunks" and self._told is None:
            raise EndpointError(
                "told neither token ids nor usage, and chunks are no tokens; use a server that "
                "knows stream_options.include_usage"
            )


class Stream:
    """One request, read by a thread of its own.

    Attributes:
        finish: the server's reason, once its stream has ended.
        error: why it failed instead.
        source: see `TokenCount`.
    """

    def __init__(self, send: Callable[[], httpx2.Response], arrival: threading.Condition) -> None:
        """Sends at once.

        Args:
            send: posts the request; its response is read here.
            arrival: notified of whatever arrives; shared by the streams of a decoder.
        """
        self.finish: str | None = None
        self.error: EndpointError | None = None
        self._send, self._arrival = send, arrival
        self._response: httpx2.Response | None = None
        self._tokens: list[int] = []
        self._count = TokenCount()
        self._ended = self._abandoned = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `take` has something to say at once."""
        return bool(self._tokens) or self._ended

    @property
    def source(self) -> str:
        """See `TokenCount`."""
        return self._count.source

    def take(self, longest_s: float) -> list[int]:
        """The tokens since the last call; waits for one. Empty when the stream ends without.

        Raises:
            EndpointError: no token came for so long (signs of life do not count); or whatever
                else went wrong, once the tokens before it have been taken.
        """
        with self._arrival:
            if not self._arrival.wait_for(lambda: self.ready, longest_s):
                raise too_slow("no token")
            tokens, self._tokens = self._tokens, []
        if not tokens and self.error is not None:
            raise self.error
        return tokens

    @property
    def ended(self) -> bool:
        """Whether nothing follows what has been taken."""
        return self._ended and not self._tokens and self.error is None

    def settle(self, longest_s: float) -> None:
        """Waits for the server's count where chunks stood in for it.

        Raises:
            EndpointError: there is none, or not for so long; or whatever else went wrong.
        """
        if self.source != "chunks":
            return
        with self._arrival:
            if not self._arrival.wait_for(lambda: self._ended, longest_s):
                raise too_slow("no end")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Abandons the stream; one that is not answered yet is left to its thread."""
        self._abandoned = True
        if self._response is not None:
            connection = self._response.extensions["network_stream"].get_extra_info("socket")
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_LONGEST_CLOSE_S)

    def _read(self) -> None:
        error = None
        try:
            self._response = self._send()
            try:
                self._read_events(self._response)
            finally:
                self._response.close()
        except EndpointError as failure:
            error = failure
        except httpx2.TimeoutException as failure:
            error = too_slow(type(failure).__name__)
        except (httpx2.HTTPError, httpx2.SSEError) as failure:
            error = EndpointError(f"broke the stream: {type(failure).__name__}: {_cut(failure)}")
        except Exception as failure:  # noqa: BLE001 - a malformed chunk; raised where it is awaited
            error = EndpointError(f"streamed something unexpected: {failure!r}")
        with self._arrival:
            self.error, self._ended = error, True
            self._arrival.notify_all()

    def _read_events(self, response: httpx2.Response) -> None:
        for event in httpx2.EventSource(response):
            if self._abandoned:
                return
            if event.data == "[DONE]":
                self.finish = self.finish or "stop"
                break
            if event.data:
                self._add(read_chunk(event.data))
        if self.finish is None:
            raise EndpointError("cut the stream before its end")
        self._count.check()

    def _add(self, chunk: Chunk) -> None:
        tokens = self._count.add(chunk)
        with self._arrival:
            self.finish = chunk.finish or self.finish
            self._tokens += tokens
            if tokens:
                self._arrival.notify_all()


def too_slow(what: str) -> EndpointError:
    """The error of a server that was waited for in vain."""
    return EndpointError(
        f"sent nothing for too long ({what}); is it overloaded? endpoint.connect_timeout and "
        "endpoint.read_timeout say how long is too long"
    )


def check_status(response: httpx2.Response) -> httpx2.Response:
    """The response of a request that was accepted.

    Raises:
        EndpointError: any status but 200, with what the server says about it.
    """
    if response.status_code == httpx2.codes.OK:
        return response
    body = response.read().decode(errors="replace")
    response.close()
    hint = {
        400: "; endpoint.openai_only=true leaves out what only some servers know",
        401: "; set endpoint.api_key_env",
        403: "; set endpoint.api_key_env",
        404: "; check endpoint.url (it ends in /v1) and endpoint.model",
        422: "; endpoint.openai_only=true leaves out what only some servers know",
        429: "; it is busy: lower --batch-sizes or try later",
    }.get(response.status_code, "")
    reason = f"{response.status_code} {response.reason_phrase}"
    raise EndpointError(f"answered {reason}: {_error_text(_loaded(body))}{hint}")


def _loaded(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return re.sub(r"<[^>]*>", " ", body)  # an HTML page of some proxy


def _error_text(found: Any) -> str:
    """The message in an error's JSON, whatever its shape."""
    while isinstance(found, Mapping):
        names = ("error", "message", "detail")
        found = next((found[name] for name in names if found.get(name)), json.dumps(dict(found)))
    return _cut(found) or "no reason given"


def _cut(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _MOST_OF_A_MESSAGE else f"{line[:_MOST_OF_A_MESSAGE]}..."
