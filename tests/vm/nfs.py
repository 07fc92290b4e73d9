"""A real NFS server in user space, nfs-ganesha, that can be stopped in the middle of a word: the kernel here has none.

It speaks NFS 4.0 and 4.1: in the version that Debian 12 has, 4.2's READ_PLUS returns zeros for what it reads.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_CONFIGURATION = """\
NFS_CORE_PARAM { Protocols = 4; NFS_Port = %(port)s; Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false; }
NFSV4 { Grace_Period = 1; Lease_Lifetime = 5; Minor_Versions = 0,1; Only_Numeric_Owners = true; RecoveryBackend = fs; }
EXPORT_DEFAULTS { SecType = sys; }
EXPORT {
  Export_Id = 1; Path = %(folder)s; Pseudo = /models; Access_Type = RW; Squash = No_Root_Squash; FSAL { Name = VFS; }
}
"""


class Server:
    """Exports a folder as /models on a port of loopback, which a virtual machine sees as 10.0.2.2."""

    def __init__(self, work: Path) -> None:
        self.folder = work / "export"
        self.folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        (work / "ganesha.conf").write_text(_CONFIGURATION % {"port": self.port, "folder": self.folder})
        words = ["ganesha.nfsd", "-F", "-f", str(work / "ganesha.conf"), "-L", str(work / "ganesha.log")]
        program = shutil.which(words[0]) or words[0]
        self._process = subprocess.Popen([program, *words[1:], "-p", str(work / "ganesha.pid")])
        limit = time.monotonic() + 30
        while not self._listens():
            assert time.monotonic() < limit, (work / "ganesha.log").read_text()
            time.sleep(0.2)

    def _listens(self) -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", self.port)) == 0

    def freeze(self) -> None:
        """Have it take connections and never answer, as a server that hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Have it answer again."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
        self.thaw()
        self._process.kill()
        self._process.wait()
