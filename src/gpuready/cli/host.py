"""`gpuready host`: settings of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpuready.cli.verb import Call, Verb
from gpuready.operations import base, cuda, firewall_rules, host, packages
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


def _wanted_base(given: dict[str, Any]) -> base.Wanted:
    def setting(entry: dict[str, Any]) -> host.Setting:
        return host.Setting(str(entry["key"]), str(entry["value"]), str(entry.get("reason", "")))

    percent, rules = given.get("shm_percent"), given.get("firewall")
    return base.Wanted(
        packages=packages.Wanted(**given["packages"]),
        files=[host.File(**entry) for entry in given["files"]],
        parameters=[setting(entry) for entry in given["parameters"]],
        shm_percent=None if percent is None else int(percent),
        firewall=None if rules is None else firewall_rules.wanted_from(rules),
    )


def _settle(call: Call) -> Result:
    return base.settle(Machine(), _read("settle", lambda: _wanted_base(call.input)), call.check)


def _confirm(call: Call) -> Result:
    return base.confirm(Machine(), call.check)


def _cuda(call: Call) -> Result:
    wanted = _read("cuda", lambda: cuda.Wanted(str(call.input["version"]), str(call.input["sm"])))
    needed = _read("cuda", lambda: packages.Wanted(**call.input["packages"]))
    return cuda.install(Machine(), needed, wanted, call.check)


VERBS = {
    "settle": Verb(
        "bring packages, clock, files, kernel parameters, /dev/shm and packet filter to what is declared",
        _settle,
        changes=True,
        takes_input=True,
    ),
    "confirm": Verb("keep the packet filter's rules that are on trial", _confirm, changes=True),
    "cuda": Verb(
        "install the CUDA toolkit and prove it: version, and a kernel for the card",
        _cuda,
        changes=True,
        takes_input=True,
    ),
}
