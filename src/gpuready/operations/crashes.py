"""An engine that ends again and again before a token: longer pauses between its starts, and an end to them.

What is waited for (a driver, a GPU, a filesystem) fails in the first step of the unit and counts nothing. An engine
that was started and ended without a token counts, until one gives a token or somebody asks for a start. The record
lies in /run, so a reboot begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuready.outcome import Failure, Result
from gpuready.serving import last_words, units
from gpuready.serving.files import as_json, make_folder, read_json, write_text
from gpuready.serving.layout import Layout

STEADY_SECONDS = 600
LONGEST_PAUSE_SECONDS = 60
GIVEN_UP_STATUS = 78
"""Exit status of a main process that systemd must not start again (RestartPreventExitStatus= of the unit)."""
_KEPT_STARTS = 10
_KEPT_ENDS = 100
_JOURNAL_LINES = 400


@dataclass(frozen=True)
class Limit:
    """How many starts without a token in a row, within how long, end in a failed unit."""

    starts: int = 5
    seconds: int = 6 * 3600


USUAL = Limit()


def _record(layout: Layout, replica: str) -> dict[str, Any]:
    return read_json(layout.starts(replica)) or {}


def _keep(layout: Layout, replica: str, record: Mapping[str, Any]) -> None:
    path = layout.starts(replica)
    make_folder(path.parent)
    write_text(path, as_json(record))


def _restarts(replica: str) -> int:
    """Return how often systemd itself started the unit again; a start that somebody asked for counts 0."""
    known = units.properties(units.unit_of(replica), "NRestarts").get("NRestarts", "")
    return int(known) if known.isdigit() else 0


# ------------------------------------------------------------------------------------------------ before a start


def gives_up(layout: Layout, replica: str, limit: Limit) -> bool:
    """Say whether this start is one too many; what is known of the others is forgotten when somebody asked for it."""
    record = _record(layout, replica)
    if not _restarts(replica):
        if record.get("ends") or record.get("given_up"):
            _keep(layout, replica, {**record, "ends": [], "given_up": None})
        return False
    now = time.monotonic()
    ends = [one for one in record.get("ends", ()) if now - one["began"] < limit.seconds]
    if len(ends) < limit.starts:
        return False
    given_up = {
        "starts": len(ends),
        "seconds": round(now - ends[0]["began"]),
        "last_error": ends[-1]["error"],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    _keep(layout, replica, {**record, "given_up": given_up})
    return True


def pause(layout: Layout, replica: str) -> None:
    """Wait longer from one failing start to the next.

    systemd can do so itself from 254 on (RestartSteps=), which Ubuntu 22.04 and Debian 12 do not have.
    """
    now = time.monotonic()
    record = _record(layout, replica)
    recent = [start for start in record.get("starts", []) if 0 <= now - start < STEADY_SECONDS]
    _keep(layout, replica, {**record, "starts": [*recent[1 - _KEPT_STARTS :], now]})
    failing = min(_restarts(replica), len(recent))
    if failing > 1:
        time.sleep(min(LONGEST_PAUSE_SECONDS, 2**failing))


# ------------------------------------------------------------------------------------------------ after an end


def note_end(layout: Layout, replica: str, result: str, invocation: str) -> Result:
    """Take down how a start ended; `result` and `invocation` are systemd's own words for both.

    A token clears what was known. A stop that was asked for, and a start that never came to its engine, say nothing.
    """
    folder = layout.run(replica)
    record = _record(layout, replica)
    if (folder / "ready.json").exists():
        if record.get("ends"):
            _keep(layout, replica, {**record, "ends": []})
        return Result()
    if result == "success" or not (folder / "devices.env").exists():
        return Result()
    said = last_words.of_lines(units.words_of(invocation, _JOURNAL_LINES))
    error = _named(result, said.cause or said.verdict or "".join(said.last[-1:]))
    ends = [*record.get("ends", ()), {"began": record.get("starts", [time.monotonic()])[-1], "error": error}]
    _keep(layout, replica, {**record, "ends": ends[-_KEPT_ENDS:]})
    return Result(summary=f"{replica} ended without a token, {_times(len(ends))} in a row: {error}")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


_RESULTS = {
    "oom-kill": "the kernel ended it for want of memory",
    "signal": "it was ended by a signal",
    "core-dump": "it crashed and left a core dump",
    "timeout": "it did not end in time and was killed",
}


def _named(result: str, error: str) -> str:
    """Return the last error, with how the process ended where its own words need not tell."""
    return "; ".join(part for part in (_RESULTS.get(result, ""), error) if part) or f"its result is {result}"


# ------------------------------------------------------------------------------------------------ for people


def given_up(layout: Layout, replica: str) -> dict[str, Any] | None:
    """Return why a replica is not started any more: starts, seconds, last_error, at; None where it is."""
    known = _record(layout, replica).get("given_up")
    return known if isinstance(known, dict) else None


def failure(replica: str, known: Mapping[str, Any]) -> Failure:
    """Return the one sentence about a replica that was given up."""
    minutes = max(1, round(known["seconds"] / 60))
    what = f"{replica} is not started again after {known['starts']} starts without a token in {minutes} min"
    fix = f"correct the deployment and run site.yml, or mend it and systemctl restart {units.unit_of(replica)}"
    return Failure("replica.given_up", what, f"the last one ended with: {known['last_error']}", fix)
