"""What a process sees of a store that is not mounted yet: a real device, and shares that do not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import storage_view
from gpuready.outcome import Refusal
from gpuready.planning.storage import declared

SEEING = """
import json, os, sys
from gpuready.operations import storage_view
from gpuready.planning.storage import declared
storage_view.STORE = sys.argv[1]
storage_view.enter(declared({"source": "LABEL=models"}, {}), {"blocks": json.loads(sys.argv[2])})
try:
    open(sys.argv[1] + "/new", "w")
    written = "written"
except OSError as error:
    written = error.strerror
above = os.path.dirname(sys.argv[1])
print(json.dumps({"store": sorted(os.listdir(sys.argv[1])), "above": sorted(os.listdir(above)), "written": written,
    "other": sorted(os.listdir(above + "/other")), "link": os.readlink(above + "/link")}))
"""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with one file, on a loop device."""
    content = tmp_path / "content"
    content.mkdir()
    (content / "config.json").write_text("{}")
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 8 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-L", "models", "-d", str(content), str(image)], check=True)
    done = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    yield Path(done.stdout.strip())
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_device_is_seen_by_the_process_that_asks_alone_and_nothing_is_written(
    device: Path, tmp_path: Path, there: bool
) -> None:
    above = tmp_path / "srv"
    (above / "other/deep").mkdir(parents=True)
    (above / "link").symlink_to("/nowhere")
    if there:
        (above / "models").mkdir()
    before = device.read_bytes()
    blocks: list[dict[str, Any]] = [{"path": str(device), "fstype": "ext4", "label": "models"}]
    words = [sys.executable, "-c", SEEING, str(above / "models"), json.dumps(blocks)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "store": ["config.json", "lost+found"],
        "above": ["link", "models", "other"],
        "other": ["deep"],
        "link": "/nowhere",
        "written": "Read-only file system",
    }
    assert sorted(one.name for one in above.iterdir()) == (["link", "models", "other"] if there else ["link", "other"])
    assert not there or list((above / "models").iterdir()) == []
    assert device.read_bytes() == before


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Keep the test's own process where it is; return what is mounted."""
    mounted: list[list[str]] = []
    monkeypatch.setattr(storage_view, "_leave_the_others", lambda: None)
    monkeypatch.setattr(storage_view, "STORE", str(tmp_path))
    monkeypatch.setattr(storage_view, "_mount", mounted.append)
    return mounted


def enter(source: str, options: str = "") -> None:
    wanted = declared({"source": source, "options": options}, {})
    assert wanted is not None
    storage_view.enter(wanted, {})


def refused(source: str, options: str = "") -> str:
    with pytest.raises(Refusal) as caught:
        enter(source, options)
    return str(caught.value)


def test_a_share_without_an_address_or_a_listener_is_refused(unshared: list[list[str]]) -> None:
    assert "models_mount.source = nas.invalid:/m cannot be mounted: nas.invalid has no address: " in refused(
        "nas.invalid:/m"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert refused("127.0.0.1:/m", f"port={port}") == (
        f"models_mount.source = 127.0.0.1:/m cannot be mounted: 127.0.0.1, port {port} (127.0.0.1): Connection refused"
        "; see the share's address and exports, the network and its server's firewall."
    )
    assert unshared == []


def test_versions_of_nfs_are_tried_from_the_newest_down(
    unshared: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(words: list[str]) -> None:
        unshared.append(words)
        if "vers=4.0" not in words[4]:
            raise storage_view._Unmounted("Protocol not supported")

    monkeypatch.setattr(storage_view, "_mount", mount)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        enter("127.0.0.1:/m", f"ro,port={port}")
        tried = [words[4] for words in unshared]
        assert tried[-1] == f"ro,port={port},vers=4.0,addr=127.0.0.1,clientaddr=127.0.0.1,soft,timeo=50,retrans=2"
        assert [one.split(",")[2] for one in tried] == ["vers=4.2", "vers=4.1", "vers=4.0"]
        unshared.clear()
        assert "cannot be mounted: Protocol not supported; " in refused("127.0.0.1:/m", f"port={port},nfsvers=3")
        assert [words[4].split(",")[2] for words in unshared] == ["vers=3"]


def test_a_refusal_that_takes_long_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage_view, "CONNECT_SECONDS", 0)
    (tmp_path / "mount").write_text(
        "#!/bin/sh\necho 'mount: /x: NFS4: Couldn'\\''t follow remote path.' >&2; exit 32\n"
    )
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(storage_view._Unmounted, match=r"^no answer within 0 s$"):
        storage_view._mount(["x"])
    monkeypatch.setattr(storage_view, "CONNECT_SECONDS", 60)
    with pytest.raises(storage_view._Unmounted, match=r"^NFS4: Couldn't follow remote path$"):
        storage_view._mount(["x"])


def test_a_mount_that_hangs_is_ended_and_no_other_version_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(storage_view, "_leave_the_others", lambda: None)
    monkeypatch.setattr(storage_view, "STORE", str(tmp_path))
    monkeypatch.setattr(storage_view, "MOUNT_SECONDS", 0.2)
    (tmp_path / "mount").write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\nexec sleep 60\n")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sentence = refused("127.0.0.1:/m", f"port={server.getsockname()[1]}")
    assert "cannot be mounted: no answer within 0.2 s; " in sentence
    assert (tmp_path / "asked").read_text() == "x\n"
