"""Where a host of the inventory answers: its address and its gateway's port, as Ansible itself resolves them."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure, MachineCannot, Refusal
from gpuready.spec.inventory import role_defaults

# Variables may be templates, which only Ansible can fill in; debug does so without contacting the host.
_QUESTION = {
    "address": "{{ ansible_host | default(inventory_hostname) }}",
    "port": "{{ gateway_port | default(none) }}",
    "bind": "{{ gateway_bind | default(none) }}",
    "stack": "{{ gpuready_stack | default('') }}",
}
_ANSWER = " | SUCCESS => "
WILDCARDS = ("*", "", "0.0.0.0", "::")  # noqa: S104 - compared


def gateway_of(limit: str, inventory: str | None, root: Path, ansible: Path) -> dict[str, Any]:
    """Return address, port and stack of the one host that a pattern names; `root` is the checkout.

    Raises:
        Refusal: when it names none or several, or its gateway cannot be asked from here.
        MachineCannot: when Ansible cannot read the inventory.
    """
    words = [str(ansible), "-m", "ansible.builtin.debug", "-a", json.dumps({"msg": _QUESTION})]
    words += ["-i", str(Path(inventory).resolve())] if inventory else []
    done = subprocess.run(
        [*words, "--", limit],
        cwd=root,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = _answers(done.stdout)
    if len(found) > 1:
        raise Refusal(_failure(limit, f"names {len(found)} hosts", f"name one of them: {', '.join(sorted(found)[:8])}"))
    if not found and done.returncode == 0:
        raise Refusal(_failure(limit, "names no host of the inventory", "`ansible-inventory --graph` shows them"))
    if not found:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())[-400:].rstrip(".")
        raise MachineCannot(_failure(limit, f"Ansible cannot resolve it: {said}", "correct the inventory"))
    ((name, page),) = found.items()
    defaults = role_defaults(root / "roles", "gateway")
    port = page["port"] or defaults["gateway_port"]
    bind = str(defaults["gateway_bind"] if page["bind"] is None else page["bind"])
    return {"address": _address(limit, name, page["address"], bind, port), "port": port, "stack": page["stack"]}


def _address(limit: str, name: str, host: str, bind: str, port: int) -> str:
    """Return where a gateway is asked from here: at the address that it binds, else at the host's."""
    address = bind.strip("[]")
    if address in WILDCARDS:
        return host
    if address == "localhost" or (_is_address(address) and ipaddress.ip_address(address).is_loopback):
        fix = f"open a tunnel (ssh -L {port}:{bind}:{port} {name}) and measure http://127.0.0.1:{port} instead"
        raise Refusal(_failure(limit, f"gateway_bind = {bind} is reached from {name} itself alone", fix))
    return address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _answers(text: str) -> dict[str, dict[str, Any]]:
    """Return by host what Ansible printed: a name, a word, and JSON over several lines."""
    found = {}
    for number, line in enumerate(lines := text.splitlines(keepends=True)):
        name, sign, _ = line.partition(_ANSWER)
        if sign and not name.startswith(" "):
            rest = "".join(lines[number:]).partition(_ANSWER)[2]
            found[name] = json.JSONDecoder().raw_decode(rest)[0]["msg"]
    return found


def _failure(limit: str, why: str, fix: str) -> Failure:
    return Failure("benchmark.limit", f"--limit {limit!r}", why, fix)
