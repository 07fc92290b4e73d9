"""What is said of a host that cannot be reached, whichever task notices it."""

from __future__ import annotations

import re


def unreachable(host: str, address: object, said: str) -> str:
    """Return the sentence for a connection that failed, from what Ansible and ssh said about it."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    last = re.sub(r"^Data could not be sent to remote host .*? over ssh:\s*", "", lines[-1] if lines else "")
    return f"host {host} ({address}) cannot be reached: {last.rstrip('.') or 'the connection broke'}; {_remedy(said)}."


def _remedy(said: str) -> str:
    if "Host key verification failed" in said:
        return "check its host key and add it to known_hosts (ssh to it once by hand)"
    if "Permission denied" in said:
        return "check ansible_user and its key"
    return "start it, or leave it out with --limit"
