"""Where stages must be able to write, the server's clock, its locales: read, judged, said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuready.hardware import surroundings as read
from gpuready.operations import facts
from gpuready.operations import packages as apt
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Failed
from gpuready.planning import clock, preflight, surroundings
from gpuready.serving import packages

NOW = 1796065560.0  # 2026-11-30 19:06 UTC
DAY = 86400
GOOD = {"mount": "/", "place": "/", "problem": "", "noexec": False}


def judged(**targets: dict[str, Any]) -> list[str]:
    return judged_with(True, targets)


def judged_with(places_models: bool, targets: dict[str, dict[str, Any]]) -> list[str]:
    facts = {"targets": {path: {**GOOD, **found} for path, found in targets.items()}}
    return [failure.sentence() for failure in surroundings.target_failures("h1", facts, places_models)]


# ------------------------------------------------------------------------------------------------ reading


def test_a_folder_that_will_be_made_is_judged_by_what_is_above_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    found = read.target("/etc/gpuready/gateway", tmp_path)
    assert (found.path, found.place, found.problem) == ("/etc/gpuready/gateway", "/etc", "")


def test_a_file_or_a_link_to_nothing_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "opt").write_text("")
    (tmp_path / "srv").symlink_to("/nowhere/at/all")
    assert (read.target("/opt/gpuready", tmp_path).place, read.target("/opt/gpuready", tmp_path).problem) == (
        "/opt",
        "no folder",
    )
    assert (read.target("/srv/models", tmp_path).place, read.target("/srv/models", tmp_path).problem) == (
        "/srv",
        "no folder",
    )


@pytest.mark.parametrize(
    ("flags", "problem", "noexec"),
    [(os.ST_RDONLY, "read-only", False), (os.ST_NOEXEC, "", True), (0, "", False)],
)
def test_mount_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, problem: str, noexec: bool) -> None:
    monkeypatch.setattr(read, "_mount_flags", lambda _: flags)
    found = read.target("/usr", tmp_path)
    assert (found.problem, found.noexec) == (problem, noexec)


def test_a_filesystem_that_does_not_say_is_not_taken_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_mount_flags", lambda _: None)
    assert read.target("/usr", tmp_path).noexec is None


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "etc"
    folder.mkdir()
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("the filesystem of the tests has no immutable attribute, or this is not root")
    yield folder
    subprocess.run(["chattr", "-i", str(folder)], check=True)


def test_an_immutable_folder(immutable: Path) -> None:
    found = read.target("/etc/gpuready", immutable.parent)
    assert (found.problem, found.place) == ("immutable", "/etc")


def test_locales_that_are_named_and_not_there() -> None:
    login = b"LANG=C.UTF-8\0LC_ALL=xx_YY.UTF-8\0LC_NUMERIC=xx_YY\0LANGUAGE=en_GB:de\0PATH=/bin\0LC_TIME=\0"
    assert read.unknown_locales(login) == {"LC_ALL": "xx_YY.UTF-8", "LC_NUMERIC": "xx_YY"}


# ------------------------------------------------------------------------------------------------ judging


def test_one_sentence_per_cause_names_all_that_is_hit() -> None:
    usr = {"problem": "read-only", "mount": "/usr", "place": "/usr"}
    etc = {"problem": "read-only", "mount": "/etc", "place": "/etc"}
    said = judged(**{"/usr": usr, "/etc/gpuready": etc, "/etc/sysctl.d": {**etc, "place": "/etc/sysctl.d"}, "/run": {}})
    assert len(said) == 2
    assert said[0].startswith("host h1: /usr is mounted read-only: gpuready writes to /usr; mount it writable, or take")
    assert said[1].startswith("host h1: /etc is mounted read-only: gpuready writes to /etc/gpuready, /etc/sysctl.d; ")


@pytest.mark.parametrize(
    ("path", "found", "sentence"),
    [
        (
            "/etc/gpuready",
            {"problem": "immutable", "place": "/etc"},
            "host h1: /etc is immutable: gpuready writes to /etc/gpuready; chattr -ia /etc.",
        ),
        ("/srv/models", {"problem": "no folder", "place": "/srv"}, "host h1: /srv is no folder: gpuready writes to"),
        (
            "/run",
            {"problem": "denied", "place": "/run"},
            "host h1: /run may not be written: gpuready writes to /run; run",
        ),
        (
            "/opt/gpuready",
            {"noexec": True, "mount": "/opt"},
            "host h1: /opt is mounted noexec: gpuready runs programs from /opt/gpuready; mount -o remount,exec /opt,",
        ),
    ],
)
def test_the_sentence_of_a_cause(path: str, found: dict[str, Any], sentence: str) -> None:
    (said,) = judged(**{path: found})
    assert said.startswith(sentence)


def test_noexec_matters_only_where_programs_run() -> None:
    elsewhere: dict[str, Any] = {"/srv/models": {"noexec": True}, "/etc/gpuready": {"noexec": True}}
    assert judged(**elsewhere, **{"/usr": {"noexec": None}}) == []


def test_a_share_of_weights_need_not_be_writable() -> None:
    share = {"problem": "read-only", "mount": "/srv/models", "place": "/srv/models"}
    above = {"problem": "read-only", "mount": "/srv", "place": "/srv"}
    assert judged_with(False, {"/srv/models": share}) == []
    assert "gpuready writes to /srv/models" in judged_with(True, {"/srv/models": share})[0]
    # The folder is not there, and the stage agent would make it.
    assert "gpuready writes to /srv/models" in judged_with(False, {"/srv/models": above})[0]


def test_a_share_on_which_root_is_nobody_is_for_reading_alone() -> None:
    share = {"/srv/models": {"problem": "denied", "place": "/srv/models", "mount": "/srv/models"}}
    assert judged_with(False, share) == []
    (said,) = judged_with(True, share)
    assert "/srv/models may not be written" in said
    assert said.endswith("an NFS share needs no_root_squash.")


@pytest.mark.parametrize("problem", ["no folder", "immutable", "denied"])
def test_anything_else_that_is_wrong_with_the_models_folder_is_refused(problem: str) -> None:
    (said,) = judged_with(False, {"/srv/models": {"problem": problem, "place": "/srv/models"}})
    assert said.startswith("host h1: /srv/models ")


# ------------------------------------------------------------------------------------------------ clock


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            NOW - 17 * DAY,
            "its clock is 17 days behind this machine's (2026-11-13 19:06 UTC there, 2026-11-30 19:06 UTC",
        ),
        (NOW + 3 * 365.25 * DAY, "its clock is 1096 days ahead of this machine's (2029-11-30"),
        (NOW + 600, "its clock is 10 minutes ahead of"),
        (NOW - 3 * 3600, "its clock is 3 hours behind"),
        (NOW, ""),
        (NOW + 299, ""),
        (NOW - 40 - 299, ""),
    ],
)
def test_a_difference_of_clocks_is_told_and_stops_nothing(server: float, words: str) -> None:
    found = surroundings.notes({"clock": server, "unknown_locales": {}}, NOW - 40, NOW)
    assert len(found) == (1 if words else 0)
    assert words in "".join(found)
    if words:
        assert "one of both is wrong" in found[0]


def test_a_slow_answer_is_no_difference() -> None:
    assert clock.difference(NOW - 900, NOW - 1000, NOW) == ""


def test_a_locale_that_is_not_there_is_told() -> None:
    facts = {"clock": NOW, "unknown_locales": {"LANG": "xx_YY.UTF-8", "LC_ALL": "xx_YY.UTF-8"}}
    (said,) = surroundings.notes(facts, NOW, NOW)
    assert said.startswith("the locale xx_YY.UTF-8 (LANG, LC_ALL) is not generated there: we work without it")
    assert "locale-gen" in said


# As apt, its TLS, gpgv and sqv, uv (rustls) and pip (OpenSSL) say it.
OF_TIME = [
    "E: Release file for http://deb.debian.org/debian/dists/trixie/InRelease is not valid yet (invalid for another 16d"
    " 23h 59min 30s). Updates for this repository will not be applied.",
    "E: Release file for http://security.debian.org/dists/x/InRelease is expired (invalid since 1095d 4h 2min"
    " 10s). Updates for this repository will not be applied.",
    "E: Failed to fetch https://m/InRelease  Certificate verification failed: The certificate is NOT trusted. The"
    " certificate chain uses not yet valid certificate.  Could not handshake: Error in the certificate verification.",
    "E: Failed to fetch https://m/InRelease  SSL connection failed: certificate verify failed: certificate has expired",
    "E: The following signatures were invalid: EXPKEYSIG 0E98404D386FA1D9 Debian Archive",
    "Error: Verifying signature: Not live until 2026-11-30T08:00:00Z",
    "error: client error (Connect): invalid peer certificate: certificate not valid yet: verification time 1795000000",
    "error: client error (Connect): invalid peer certificate: certificate expired: verification time 1890000000 (UNIX)",
    "SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid')",
]
NOT_OF_TIME = [
    "E: Failed to fetch http://m/InRelease  Could not connect to m:80 (10.0.0.1), connection timed out",
    "E: The repository 'http://m trixie Release' is not signed.",
    "SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
    "",
]


@pytest.mark.parametrize("said", OF_TIME)
def test_what_speaks_of_time_names_the_clock(said: str) -> None:
    assert clock.hint(said, NOW).startswith("the server's clock says 2026-11-30 19:06 UTC: where that is wrong, set it")


@pytest.mark.parametrize("said", NOT_OF_TIME)
def test_what_does_not_speak_of_time_does_not(said: str) -> None:
    assert clock.hint(said, NOW) == ""


@pytest.mark.parametrize("said", OF_TIME[:5])
def test_the_package_lists_and_packages_name_the_clock(tmp_path: Path, said: str) -> None:
    machine = Machine(tmp_path, lambda argv: Done(100, "", said) if argv[-1] == "update" else Done(0, "", ""))
    machine.write("/usr/bin/apt-get", "")
    with pytest.raises(Failed, match=r"could not read the package lists: E: .*; the server's clock says 20"):
        apt.ensure(machine, apt.Wanted(["b"]), check=False)


@pytest.mark.parametrize("said", OF_TIME[6:])
def test_engines_name_the_clock(said: str) -> None:
    assert packages.explain("vllm 1", said).fix.startswith("the server's clock says")


def test_preflight_names_the_clock() -> None:
    source = {"uri": "https://m", "suite": "s", "problem": OF_TIME[2]}
    (failure,) = preflight.repository_failures("h1", {"repositories": [source], "clock": NOW})
    assert "the package source https://m (s) does not answer" in failure.what
    assert failure.fix.startswith("the server's clock says 2026-11-30 19:06 UTC")
    facts = {"candidates": {"cuda-toolkit-12-8": None}, "candidates_problem": OF_TIME[0], "clock": NOW}
    (failure,) = preflight.candidate_failures("h1", {"source": "configured"}, facts)
    assert failure.fix.startswith("the server's clock says")
    assert "not valid yet" in failure.why


def test_preflight_names_what_apt_could_not_read_before_it_asks_for_another_source() -> None:
    candidates = {"candidates": {"cuda-toolkit-12-8": None}, "clock": NOW}
    refused = "Failed to fetch http://n/InRelease  Connection refused"
    (failure,) = preflight.candidate_failures(
        "h1", {"source": "configured"}, {**candidates, "candidates_problem": refused}
    )
    assert failure.why == refused
    assert failure.fix.startswith("see the server's network, gpuready_proxy and /etc/apt/sources.list.d; where none is")
    (failure,) = preflight.candidate_failures("h1", {"source": "configured"}, {**candidates, "candidates_problem": ""})
    assert failure.fix.startswith("add NVIDIA's CUDA repository")


WARNED = (
    "W: Failed to fetch http://n/InRelease  Could not connect to n:80 (10.0.0.1). - connect (111: Connection refused)\n"
    "W: Some index files failed to download. They have been ignored, or old ones used instead.\n"
)


def apt_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, update: str = "", printed: str = "") -> None:
    """Put programs on the PATH that know no package, warn while they update, and print what they would fetch."""
    said = {"said": update, "printed": printed}
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    programs = {
        "apt-cache": "#!/bin/sh\nprintf 'cuda-toolkit-12-8:\\n  Candidate: (none)\\n'\n",
        "apt-get": f"#!/bin/sh\ncat {tmp_path}/said >&2\ncase $* in *--print-uris*) cat {tmp_path}/printed;; esac\n",
        "apt-helper": '#!/bin/sh\necho "E: Failed to fetch $4  The method driver could not be found" >&2\nexit 100\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "APT_HELPER", f"{tmp_path}/apt-helper")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (WARNED, WARNED.splitlines()[0][3:]),
        (f"E: {OF_TIME[0][3:]}\n", OF_TIME[0][3:]),
        ("W: http://n/InRelease: Key is stored in legacy trusted.gpg keyring\n", ""),
    ],
)
def test_a_source_that_apt_only_warns_of_is_the_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, problem: str
) -> None:
    apt_that(tmp_path, monkeypatch, update=said)
    assert facts.candidates(["cuda-toolkit-12-8"]) == ({"cuda-toolkit-12-8": None}, problem)


def test_a_source_that_only_apt_itself_can_ask_is_unknown_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (
        "mirror+file:/etc/apt/m.list",
        "mirror+http://m/list",
        "tor+http://m",
        "cdrom:[x]",
        "http://m",
        "file:/no/d",
    )
    printed = "".join(f"'{place}/dists/s/InRelease' m_InRelease 0 \n" for place in places)
    apt_that(tmp_path, monkeypatch, printed=printed)
    found = facts.repositories()
    assert {one["uri"]: one["problem"] for one in found} == {
        **dict.fromkeys(places[:4]),
        "http://m": "The method driver could not be found",
        "file:/no/d": "/no/d/dists/s does not exist",
    }
    failures = preflight.repository_failures("h1", {"repositories": found, "clock": NOW})
    assert [failure.what.split()[5] for failure in failures] == ["file:/no/d", "http://m"]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (
            "E: Failed to fetch http://127.0.0.1:9/InRelease  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect"
            " (111: Connection refused)\nE: Download Failed\n",
            "Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection refused)",
        ),
        ("E: Download Failed\n", "Download Failed"),
        (f"{OF_TIME[2]}\nE: Download Failed\n", OF_TIME[2].partition("  ")[2]),
        ("W: something\n", ""),
    ],
)
def test_the_reason_why_a_source_does_not_answer_is_kept(said: str, problem: str) -> None:
    assert facts.fetch_problem(said) == problem
    assert bool(clock.hint(facts.fetch_problem(said), NOW)) == ("certificate" in said)
