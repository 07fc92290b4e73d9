"""An engine of the tests' own: it streams as long as it is asked to, counts as vLLM does, and ends at once on SIGTERM.

python standin_engine.py PORT [rubbish]
"""

from __future__ import annotations

import contextlib
import http.server
import json
import sys
import threading
import time

running = 0
lock = threading.Lock()


class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._whole(
            f'# HELP x\nvllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting 0\n'.encode()
        )

    def do_POST(self) -> None:
        global running
        got = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            running += 1
        try:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(got.get("pieces", 1)):
                self._piece(f"data: {number}\n\n".encode())
                time.sleep(got.get("pause", 0))
            self._piece(b"data: [DONE]\n\n")
            self._piece(b"")
        finally:
            with lock:
                running -= 1

    def _piece(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()

    def _whole(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
