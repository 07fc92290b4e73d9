# SPDX-License-Identifier: Apache-2.0
"""Looks at the run before anything else does: is this our environment, is there an inventory."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

from ansible import context
from ansible.plugins.inventory import BaseInventoryPlugin
from ansible.utils.display import Display

DOCUMENTATION = r"""
name: gpuready_guard
short_description: Refuses a run from another environment, or without an inventory, in one sentence
description:
  - Reads no inventory itself. It refuses before any inventory is read when ansible-playbook is not the one of
    gpuready's environment, and says how to make inventories/production until the operator has one.
options: {}
author:
  - gpuready authors
"""

CHECKOUT = Path(__file__).resolve().parents[2]
PRODUCTION = CHECKOUT / "inventories" / "production"


def foreign_environment() -> str:
    """Return why this Python is not gpuready's environment; empty when it is."""
    try:
        found = importlib.metadata.distribution("gpuready")
    except importlib.metadata.PackageNotFoundError:
        return "it does not have gpuready"
    url = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    origin = unquote(urlparse(url).path)
    if not origin or Path(origin).resolve() != CHECKOUT:
        return f"its gpuready belongs to {origin or 'an installed package'}"
    have = importlib.metadata.version("ansible-core")
    wanted = [need for need in found.requires or [] if need.startswith("ansible-core==")]
    if wanted != [f"ansible-core=={have}"]:
        return f"it has ansible-core {have}, not {wanted[0].split('==')[1] if wanted else 'the pinned one'}"
    return ""


class InventoryModule(BaseInventoryPlugin):
    """Takes a source only to refuse it."""

    NAME = "gpuready_guard"

    def verify_file(self, path):
        """Say whether there is something to refuse; a syntax check needs no servers, so it gets none."""
        return bool(self._refusal(path)) or self._is_missing(path)

    def parse(self, inventory, loader, path, cache=True):  # noqa: ARG002 - the signature is Ansible's
        """Refuse in one sentence; an exception would be wrapped in three."""
        refusal = self._refusal(path)
        if refusal:
            Display().error(refusal, wrap_text=False)
            sys.exit(2)

    def _refusal(self, path) -> str:
        why = foreign_environment()
        if why:
            return (
                f"ansible-playbook runs in {sys.prefix}, which is not gpuready's environment ({why}); "
                f"make it with {CHECKOUT}/scripts/setup and run {CHECKOUT}/.venv/bin/ansible-playbook."
            )
        if self._is_missing(path) and not context.CLIARGS.get("syntax"):
            return (
                "inventories/production does not exist yet; copy inventories/example to inventories/production, "
                "name your servers in it, and run the command again (no GPU server at hand: ./scripts/quickstart)."
            )
        return ""

    def _is_missing(self, path) -> bool:
        return Path(path) == PRODUCTION and not PRODUCTION.exists()
