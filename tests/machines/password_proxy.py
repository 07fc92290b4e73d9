"""A small real proxy for tests: HTTP and CONNECT, with a password. Usage: ADDRESS PORT USER:PASSWORD LOG.

Each line of the log: whether the password was right, the method, what was asked for.
"""

from __future__ import annotations

import base64
import http.server
import select
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

SECONDS = 120


class Proxy(http.server.BaseHTTPRequestHandler):
    """One client's connection."""

    wanted = ""
    log = Path()

    def _allowed(self) -> bool:
        good = self.headers.get("Proxy-Authorization") == self.wanted
        with self.log.open("a") as log:
            log.write(f"{good} {self.command} {self.path}\n")
        if not good:
            self.send_response(407)
            self.send_header("Proxy-Authenticate", "Basic realm=tests")
            self.send_header("Content-Length", "0")
            self.end_headers()
        return good

    def do_CONNECT(self) -> None:
        self.close_connection = True
        if not self._allowed():
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as other:
            self.send_response(200)
            self.end_headers()
            self._pump(other)

    def _pump(self, other: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([self.connection, other], [], [], SECONDS)
            for one in ready:
                data = one.recv(1 << 16)
                if not data:
                    return
                (other if one is self.connection else self.connection).sendall(data)
            if not ready:
                return

    def do_GET(self) -> None:
        self.close_connection = True
        if not self._allowed():
            return
        parts = urlsplit(self.path)
        kept = [
            (name, value) for name, value in self.headers.items() if not name.lower().startswith(("proxy-", "conn"))
        ]
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=SECONDS) as other:
            path = f"{parts.path}?{parts.query}" if parts.query else parts.path
            lines = [
                f"{self.command} {path} HTTP/1.1",
                "Connection: close",
                *(f"{name}: {value}" for name, value in kept),
            ]
            other.sendall("\r\n".join([*lines, "", ""]).encode())
            while data := other.recv(1 << 16):
                self.wfile.write(data)

    do_HEAD = do_GET  # noqa: N815 - the name is the library's

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        pass


def main(address: str, port: str, credentials: str, log: str) -> None:
    Proxy.wanted = f"Basic {base64.b64encode(credentials.encode()).decode()}"
    Proxy.log = Path(log)
    with http.server.ThreadingHTTPServer((address, int(port)), Proxy) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
