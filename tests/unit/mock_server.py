"""A small OpenAI-compatible server that plays scripted streams, for the endpoint's tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """What the server does with a request.

    Attributes:
        events: sent one after the other: a dict as JSON, a str as it is, a callable is called (to
            wait for something).
        status, body, content_type: the answer instead, where the status is not 200.
        done: whether `[DONE]` follows.
    """

    events: Iterable[dict[str, Any] | str | Callable[[], object]] = ()
    status: int = 200
    body: str = ""
    content_type: str = "text/event-stream"
    done: bool = True


@dataclass
class MockServer:
    """A running server.

    Attributes:
        script: request body -> what to do with it.
        url: of its API.
        models: names that it lists.
        requests: (path, headers, body) of every POST so far.
        clients: the other end of every connection so far.
    """

    script: Callable[[dict[str, Any]], Script]
    models: tuple[str, ...] = ("mock",)
    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    clients: set[tuple[str, int]] = field(default_factory=set)


@contextmanager
def serve(script: Script | Callable[[dict[str, Any]], Script], **settings: Any) -> Iterator[Any]:
    """Runs a server in threads of this process."""
    mock = MockServer(script if callable(script) else lambda _: script, **settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            mock.clients.add(self.client_address)
            data = {"object": "list", "data": [{"id": name} for name in mock.models]}
            self._answer(Script(status=200, body=json.dumps(data), content_type="application/json"))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            mock.clients.add(self.client_address)
            mock.requests.append((self.path, dict(self.headers), body))
            script = mock.script(body)
            if script.status != 200:
                self._answer(script)
                return
            self.send_response(200)
            self.send_header("Content-Type", script.content_type)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for event in script.events:
                if callable(event):
                    event()
                    continue
                text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
                self.wfile.write(text.encode())
                self.wfile.flush()
            if script.done:
                self.wfile.write(b"data: [DONE]\n\n")

        def _answer(self, script: Script) -> None:
            self.send_response(script.status)
            self.send_header("Content-Type", script.content_type)
            self.send_header("Content-Length", str(len(script.body.encode())))
            self.end_headers()
            self.wfile.write(script.body.encode())

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", 0), Handler)
    mock.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield mock
    finally:
        server.shutdown()
        server.server_close()
