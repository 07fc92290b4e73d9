"""`gpuready host`: settings of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpuready.cli.verb import Call, Verb
from gpuready.operations import cuda, firewall, host, packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Failure, Refusal, Result

_T = TypeVar("_T")


def _read(what: str, read: Callable[[], _T]) -> _T:
    """Read the input of a verb; a key that is missing or of another kind is refused in one sentence."""
    try:
        return read()
    except KeyError as error:
        raise Refusal(Failure("input.missing", f"the input of host {what} lacks {error}")) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise Refusal(Failure("input.shape", f"the input of host {what} has a wrong shape", str(error))) from error


def _files(call: Call) -> Result:
    files = _read("files", lambda: [host.File(**entry) for entry in call.input["files"]])
    return host.place_files(Machine(), files, call.check)


def _sysctl(call: Call) -> Result:
    def setting(entry: dict[str, Any]) -> host.Setting:
        return host.Setting(str(entry["key"]), str(entry["value"]), str(entry.get("reason", "")))

    settings = _read("sysctl", lambda: [setting(entry) for entry in call.input["settings"]])
    return host.set_parameters(Machine(), settings, call.check)


def _shm(call: Call) -> Result:
    return host.set_shm(Machine(), _read("shm", lambda: int(call.input["percent"])), call.check)


def _time(call: Call) -> Result:
    return host.keep_time(Machine(), call.check)


def _packages(call: Call) -> Result:
    wanted = _read("packages", lambda: packages.Wanted(**call.input))
    return packages.ensure(Machine(), wanted, call.check)


def _firewall(call: Call) -> Result:
    wanted = _read("firewall", lambda: firewall.wanted_from(call.input))
    return firewall.apply(Machine(), wanted, call.check)


def _firewall_confirm(call: Call) -> Result:
    return firewall.confirm(Machine(), call.check)


def _cuda(call: Call) -> Result:
    wanted = _read("cuda", lambda: cuda.Wanted(str(call.input["version"]), str(call.input["sm"])))
    return cuda.verify(Machine(), wanted, call.check)


VERBS = {
    "packages": Verb(
        "install packages, after repairing an interrupted dpkg", _packages, changes=True, takes_input=True
    ),
    "files": Verb(
        "place small files, each validated by the program that reads it", _files, changes=True, takes_input=True
    ),
    "sysctl": Verb(
        "place kernel parameters and apply those that the kernel allows", _sysctl, changes=True, takes_input=True
    ),
    "shm": Verb("give /dev/shm a share of the RAM", _shm, changes=True, takes_input=True),
    "time": Verb("adopt or start the service that keeps the time", _time, changes=True),
    "firewall": Verb("put the packet filter's rules on trial", _firewall, changes=True, takes_input=True),
    "firewall-confirm": Verb("keep the rules that are on trial", _firewall_confirm, changes=True),
    "cuda": Verb("prove the CUDA toolkit: version, and a kernel for the card", _cuda, changes=True, takes_input=True),
}
