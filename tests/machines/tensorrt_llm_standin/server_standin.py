"""The stand-in's command and its HTTP server: paths and answers of TensorRT-LLM's OpenAI server."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .arguments_standin import merged, parse
from .model_standin import Model, Refused

VERSION = "1.0.0"
MARKER = Path("/etc/gpuready-simulated-machine")
TOKEN_SECONDS = 0.005


class Server(ThreadingHTTPServer):
    """Waits at its end for the answers that are under way, as uvicorn does."""

    daemon_threads = False
    model: Model


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server_version = "tensorrt-llm-standin"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log a request as uvicorn does."""
        print(f"INFO:     {self.address_string()} - {format % args}", flush=True)

    def do_GET(self) -> None:
        """Answer what only asks."""
        model = self.server.model
        if self.path in ("/health", "/health_generate"):
            self._send(200, None)
        elif self.path == "/version":
            self._send(200, {"version": VERSION})
        elif self.path == "/v1/models":
            card = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "tensorrt_llm"}
            self._send(200, {"object": "list", "data": [card]})
        elif self.path == "/metrics":
            self._send(200, model.statistics())
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Answer what asks for tokens; the model's name in a request is not looked at."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        kind = {"/v1/completions": "text", "/v1/chat/completions": "chat"}.get(self.path)
        if kind is None:
            self._send(404, {"detail": "Not Found"})
            return
        try:
            asked = json.loads(body)
            prompt = asked["prompt"] if kind == "text" else "\n".join(str(one["content"]) for one in asked["messages"])
        except (ValueError, KeyError, TypeError) as error:
            self._send(400, {"error": str(error)})
            return
        tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        try:
            self._answer(kind, str(prompt), int(tokens), asked)
        except Refused as refused:
            said = {"object": "error", "message": str(refused), "type": "BadRequestError", "param": None, "code": 400}
            self._send(400, said)

    def _answer(self, kind: str, prompt: str, tokens: int, asked: dict[str, Any]) -> None:
        model = self.server.model
        words = model.answer(prompt, tokens)
        used = len(prompt.encode())
        usage = {"prompt_tokens": used, "total_tokens": used + tokens, "completion_tokens": tokens}
        frame = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        with model.seats:
            if asked.get("stream"):
                self._stream(kind, list(words), frame)
            else:
                time.sleep(tokens * TOKEN_SECONDS)
                text = "".join(words)
                part = {"text": text} if kind == "text" else {"message": {"role": "assistant", "content": text}}
                choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
                name = "text_completion" if kind == "text" else "chat.completion"
                self._send(200, {**frame, "object": name, "choices": [choice], "usage": usage})
        model.count(used + tokens)

    def _stream(self, kind: str, words: list[str], frame: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        name = "text_completion" if kind == "text" else "chat.completion.chunk"
        for number, word in enumerate(words, 1):
            time.sleep(TOKEN_SECONDS)
            part = {"text": word} if kind == "text" else {"delta": {"role": "assistant", "content": word}}
            end = "length" if number == len(words) else None
            self._event(json.dumps({**frame, "object": name, "choices": [{"index": 0, **part, "finish_reason": end}]}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, code: int, answer: Any) -> None:
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def listen(host: str, port: int) -> Server:
    """Take the address, before anything is loaded."""
    try:
        return Server((host, port), Handler)
    except OSError as error:
        sys.exit(f"RuntimeError: Failed to bind socket to {host}:{port}: {error}")


def main() -> None:
    """Serve until SIGTERM or SIGINT; then end the answers that are under way, and take no more."""
    if not MARKER.exists():
        sys.exit(f"this trtllm-serve is a stand-in for simulated machines alone: {MARKER} is not there")
    given = parse(sys.argv[1:])
    arguments = merged(given)
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    wanted = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    if not visible or wanted > len(visible):
        sys.exit(f"ValueError: {len(visible)} GPU devices found on the node, {wanted} are needed")
    server = listen(given.host, given.port)
    try:
        server.model = Model(arguments)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"RuntimeError: {given.model} cannot be loaded: {error!r}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"stand-in of TensorRT-LLM {VERSION}: {server.model.name} on http://{given.host}:{given.port}", flush=True)
    server.serve_forever(poll_interval=0.1)
    server.socket.close()
    server.server_close()
