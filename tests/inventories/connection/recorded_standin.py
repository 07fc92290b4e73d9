"""A stand-in for SSH in tests: answers `facts show` with what was recorded of a server, and takes nothing else.

$GPUREADY_RECORDED is a folder with HOST.json, or default.json; asked.log there notes every command. It never changes
anything: a command that is not `facts show` fails, and is noted.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: recorded_standin
short_description: A recorded server
description: [Answers facts show alone, for tests.]
author: gpuready authors
options: {}
"""


class Connection(ConnectionBase):  # type: ignore[misc]
    """One host's recorded facts."""

    transport = "ansible.legacy.recorded_standin"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Answer one command."""
        del in_data, sudoable
        host = self._play_context.remote_addr
        folder = Path(os.environ["GPUREADY_RECORDED"])
        is_facts = "facts show --json" in cmd
        with (folder / "asked.log").open("a", encoding="utf-8") as log:
            log.write(f"{host} {'facts' if is_facts else cmd}\n")
        if not is_facts:
            return 1, b"", b"not recorded"
        own = folder / f"{host}.json"
        facts = json.loads((own if own.exists() else folder / "default.json").read_text(encoding="utf-8"))
        # Whatever was recorded, a server's clock goes on.
        facts["clock"] = time.time()
        answer = {"changed": False, "summary": "", "diff": [], "failures": [], "data": facts}
        return 0, json.dumps(answer).encode() + b"\n", b""

    def put_file(self, in_path: str, out_path: str) -> None:
        """Refuse: nothing is ever placed."""
        raise NotImplementedError(out_path)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Refuse: nothing is ever fetched."""
        raise NotImplementedError(in_path)

    def close(self) -> None:
        """Do nothing."""
        self._connected = False
