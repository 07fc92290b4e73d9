"""The gateway: HAProxy brought to its files, then proved by one token of every deployment through it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuready.operations.service import Service, bring
from gpuready.outcome import Failed, Failure, Result
from gpuready.serving.readiness import NotReady, wait_for_token

UNIT = "gpuready-gateway.service"
TOKEN_SECONDS = 30


def apply(plan: Mapping[str, Any], files: Mapping[str, str], unit_text: str, check: bool) -> Result:
    """Bring the gateway to its files and unit; every deployment must answer through it."""
    gateway = plan["gateway"]
    service = Service(
        unit=UNIT,
        unit_text=unit_text,
        folder=Path(gateway["folder"]),
        files=files,
        runtime=Path("/run/gpuready-gateway"),
        check_words=("haproxy", "-c", "-q", "-f"),
        main_file="haproxy.cfg",
    )
    result = bring(service, check)
    if check:
        return result
    address = "127.0.0.1" if gateway["bind"] in ("*", "0.0.0.0", "") else gateway["bind"]  # noqa: S104 - compared
    for deployment in plan["deployments"]:
        try:
            wait_for_token(gateway["port"], deployment["model"], None, TOKEN_SECONDS, address)
        except NotReady as error:
            what = f"{deployment['name']} does not answer through the gateway ({address}:{gateway['port']})"
            fix = f"the gateway runs; see journalctl -u {UNIT} and gpuready deployment status"
            raise Failed(Failure("gateway.no_token", what, str(error), fix)) from error
    return result
