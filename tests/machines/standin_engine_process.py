"""A stand-in of an engine, for tests of the units alone: it has vLLM's module name, gives a token, and does as told.

The file `behaviour` beside its model says what it does: `serve`; `die` before a token; `look` around from inside the
unit's sandbox, write what it saw to its folder that stays, and serve.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import mmap
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

MODEL = pathlib.Path("/srv/models/standin")
SEEN: dict[str, Callable[[], object]] = {}


def seen(look: Callable[[], object]) -> Callable[[], object]:
    SEEN[look.__name__] = look
    return look


@seen
def environment() -> object:
    return dict(os.environ)


@seen
def compiled_kernel() -> object:
    """Compile and load a module as Triton does its launcher: gcc, a file below the temporary folder, dlopen."""
    return _compiled(pathlib.Path(tempfile.mkdtemp()))


@seen
def compiled_kernel_in_the_cache() -> object:
    return _compiled(pathlib.Path(tempfile.mkdtemp(dir=os.environ["HOME"])))


def _compiled(folder: pathlib.Path) -> int:
    source, library = folder / "k.c", folder / "k.so"
    source.write_text("int answer(void) { return 42; }\n")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    return int(ctypes.CDLL(str(library)).answer())


@seen
def writable_code() -> object:
    return len(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))


@seen
def memory_policy() -> object:
    return pathlib.Path("/proc/self/numa_maps").read_text().split()[1]


@seen
def memory_policy_by_numactl() -> object:
    return subprocess.run(["numactl", "--membind=0", "true"], check=True).returncode


@seen
def own_cpus() -> object:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return len(os.sched_getaffinity(0))


@seen
def pidfd() -> object:
    return os.pidfd_open(os.getpid()) > 0


@seen
def loopback() -> object:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        return True


@seen
def interfaces() -> object:
    return [name for _, name in socket.if_nameindex()]


@seen
def netlink() -> object:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).fileno() > 0


@seen
def shared_memory() -> object:
    path = pathlib.Path("/dev/shm/standin-left-behind")
    path.write_bytes(b"x")
    return path.stat().st_size


@seen
def processes_of_others() -> object:
    pids = [path for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
    return sum(path.stat().st_uid != os.getuid() for path in pids)


@seen
def memory_of_the_server() -> object:
    return "MemTotal" in pathlib.Path("/proc/meminfo").read_text()


@seen
def locked_memory() -> object:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


@seen
def raw_packets() -> object:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)


@seen
def own_namespace() -> object:
    return subprocess.run(["unshare", "--user", "true"], check=True, capture_output=True).returncode


@seen
def name_of_the_server() -> object:
    socket.sethostname("mine")
    return "mine"


@seen
def tracing() -> object:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 0


@seen
def others_files() -> object:
    return len(list(pathlib.Path("/root").iterdir()))


@seen
def files_are_mine_alone() -> object:
    path = pathlib.Path(os.environ["HOME"]) / "made"
    path.touch()
    return oct(path.stat().st_mode & 0o777)


def look_around() -> None:
    told = {}
    for name, look in SEEN.items():
        try:
            told[name] = look()
        except Exception as error:  # what is refused is what the tests want to know
            told[name] = f"{type(error).__name__}: {error}"
    home = pathlib.Path(os.environ["HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "seen.json").write_text(json.dumps(told))


SERVED = "standin/model"


class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": SERVED}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"model": SERVED, "choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})

    def answer(self, reply: object) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    behaviour = (MODEL / "behaviour").read_text().strip()
    if behaviour == "die":
        raise ValueError("this model cannot be loaded")
    if behaviour == "look":
        pathlib.Path(os.environ["HOME"]).mkdir(parents=True, exist_ok=True)
        look_around()
    port = int(" ".join(sys.argv).replace("--port=", "--port ").split("--port ")[1].split()[0])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine).serve_forever()


if __name__ == "__main__":
    main()
