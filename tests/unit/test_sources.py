"""Sources of apt: our file is derived from the server's own ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuready.operations import sources
from gpuready.operations.machine import Machine
from gpuready.outcome import Refusal, Result

OWN = "/etc/apt/sources.list.d/gpuready-debian-non-free.sources"


def source_text(tmp_path: Path, files: dict[str, str], keyring: str = "/usr/share/keyrings/k.pgp") -> str:
    machine = Machine(tmp_path)
    for name, text in files.items():
        machine.write(name, text)
    found = sources.read_sources(machine)
    return sources.components_source(found, OWN, "trixie", ["contrib", "non-free"], keyring)


def test_mirror_of_a_one_line_source_is_reused(tmp_path: Path) -> None:
    text = source_text(
        tmp_path,
        {
            "/etc/apt/sources.list": "deb-src http://m/debian trixie main\n"
            "deb [arch=amd64 signed-by=/k.gpg] http://m/debian trixie main # ours\n"
            "deb http://m/debian-security trixie-security main\n"
        },
    )
    assert text.splitlines()[1:] == [
        "Types: deb",
        "URIs: http://m/debian",
        "Suites: trixie",
        "Components: contrib non-free",
        "Architectures: amd64",
        "Signed-By: /k.gpg",
    ]


def test_mirror_list_and_embedded_key_of_a_deb822_source_are_reused(tmp_path: Path) -> None:
    stanza = (
        "Types: deb deb-src\nURIs: mirror+file:/etc/apt/mirrors/debian.list\nSuites: trixie trixie-updates\n"
        "# a comment\nComponents: main\nSigned-By:\n -----BEGIN\n .\n KEY\n"
    )
    text = source_text(tmp_path, {"/etc/apt/sources.list.d/debian.sources": stanza})
    assert "URIs: mirror+file:/etc/apt/mirrors/debian.list\nSuites: trixie\n" in text
    assert "Signed-By:\n -----BEGIN\n .\n KEY\n" in text


def test_only_what_lacks_is_added(tmp_path: Path) -> None:
    assert "Components: non-free\n" in source_text(
        tmp_path, {"/etc/apt/sources.list": "deb http://m/debian trixie main contrib\n"}
    )


def test_nothing_is_added_where_another_source_offers_all(tmp_path: Path) -> None:
    files = {
        "/etc/apt/sources.list": "deb http://m/debian trixie main\n",
        "/etc/apt/sources.list.d/nf.sources": "Types: deb\nURIs: http://n/debian\nSuites: trixie\n"
        "Components: contrib non-free\n",
    }
    assert source_text(tmp_path, files) == ""


def test_our_own_and_disabled_sources_do_not_count(tmp_path: Path) -> None:
    whole = "Types: deb\nURIs: http://n/debian\nSuites: trixie\nComponents: main contrib non-free\n"
    files = {
        "/etc/apt/sources.list": "deb http://m/debian trixie main\n",
        OWN: whole,
        "/etc/apt/sources.list.d/off.sources": f"Enabled: no\n{whole}",
    }
    text = source_text(tmp_path, files)
    assert "URIs: http://m/debian\n" in text
    assert "Signed-By: /usr/share/keyrings/k.pgp" in text


def test_a_server_without_a_main_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no apt source of this server offers the main part of trixie"):
        source_text(tmp_path, {"/etc/apt/sources.list": "deb http://m/debian bookworm main\n"})


@pytest.mark.parametrize(("address", "mode"), [("http://u:secret@m/debian", 0o600), ("http://m/debian", 0o644)])
def test_credentials_of_the_servers_mirror_stay_with_root(tmp_path: Path, address: str, mode: int) -> None:
    machine = Machine(root=tmp_path)
    machine.write("/etc/os-release", "ID=debian\nVERSION_CODENAME=trixie\n")
    machine.write("/etc/apt/sources.list", f"deb {address} trixie main\n")
    changes = sources.offer_components(machine, OWN, ["contrib"], check=False)
    assert f"URIs: {address}\n" in (machine.read(OWN) or "")
    assert machine.path(OWN).stat().st_mode & 0o777 == mode
    assert "secret" not in str(Result(diff=changes).as_dict())
    assert sources.offer_components(machine, OWN, ["contrib"], check=False) == []
