"""The Pythons of a server on which engines can be built: those of its distribution, and one that an operator names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from gpuready.outcome import Failure, MachineCannot
from gpuready.serving.packages import last_line

PLACE = Path("/usr/bin")
_SECONDS = 30
_VERSION = "import platform; print(platform.python_version())"
# An environment is made by venv, and uv comes by the pip that ensurepip brings.
_WHOLE = f"import ctypes, ensurepip, ssl, venv; {_VERSION}"


def version(python: str) -> str:
    """Return the full version of a Python, e.g. 3.12.3.

    Raises:
        MachineCannot: when it does not run.
    """
    found, problem = _ask(python, _VERSION)
    if problem:
        fix = "repair it: engines are built on this Python, whichever one Ansible uses"
        raise MachineCannot(Failure("engine.python", f"{python} does not run on this server", problem, fix))
    return found


def minor(full: str) -> str:
    """Return the version that locks are made for: 3.12 of 3.12.3."""
    return ".".join(full.split(".")[:2])


def of_distribution(place: Path = PLACE) -> dict[str, str]:
    """Return the paths of the distribution's Pythons by version, e.g. `{"3.12": "/usr/bin/python3.12"}`."""
    named = {path.name[len("python") :]: path for path in place.glob("python3.*")}
    names = {name: str(path) for name, path in named.items() if re.fullmatch(r"3\.\d+", name)}
    return {name: path for name, path in sorted(names.items()) if minor(_ask(path, _VERSION)[0]) == name}


def look(python: str) -> dict[str, str]:
    """Return version and problem of a Python that an operator named; the problem is empty where it can be used."""
    found, problem = _ask(python, _WHOLE)
    return {"version": minor(found), "problem": problem}


def _ask(python: str, code: str) -> tuple[str, str]:
    """Return what a Python prints, and why it prints nothing."""
    try:
        done = subprocess.run(
            [python, "-I", "-B", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_SECONDS} s"
    except (OSError, ValueError) as error:
        return "", str(getattr(error, "strerror", None) or error)
    if done.returncode:
        return "", last_line(done.stderr or f"exit code {done.returncode}")
    return done.stdout.strip(), ""
