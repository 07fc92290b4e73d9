"""Wrong clocks: what can be said about them, and which refusals of others come from one."""

from __future__ import annotations

import re
from datetime import datetime, timezone

TOLERATED_SECONDS = 300

_OF_TIME = re.compile(
    r"not valid yet|not yet valid|not yet activated|not live until|NotValidYet|in the future"
    r"|(?:is|has) expired|expired certificate|certificate expired|certificate: expired|EXPKEYSIG|KEYEXPIRED|EXPSIG",
    re.IGNORECASE,
)


def show(clock: float) -> str:
    """Return a time as people read it."""
    return f"{datetime.fromtimestamp(clock, timezone.utc):%Y-%m-%d %H:%M} UTC"


def hint(said: str, now: float) -> str:
    """Return what to do about a refusal that speaks of validity in time; empty when it does not."""
    if not _OF_TIME.search(said):
        return ""
    return (
        f"the server's clock says {show(now)}: where that is wrong, set it (timedatectl set-ntp true, or date -s); "
        "where it is right, the other side is out of date"
    )


def _span(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = round(seconds / size)
        if count >= 2 or unit == "minute":
            return f"{count} {unit}{'s' if count != 1 else ''}"
    return ""


def difference(server: float, asked: float, answered: float) -> str:
    """Say how a server's clock differs from this machine's, on which it was asked; empty when it hardly does.

    Which of both is wrong cannot be known from here.
    """
    off = server - answered if server > answered else min(server - asked, 0.0)
    if abs(off) <= TOLERATED_SECONDS:
        return ""
    return (
        f"its clock is {_span(abs(off))} {'ahead of' if off > 0 else 'behind'} this machine's ({show(server)} there, "
        f"{show(answered)} here); one of both is wrong, and package sources and TLS refuse what is not valid yet or "
        "expired: compare them with `timedatectl`"
    )
