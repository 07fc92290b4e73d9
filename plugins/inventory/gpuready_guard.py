# SPDX-License-Identifier: Apache-2.0
"""Looks at the run before anything else does: is this our environment, is there an inventory, can it be read."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback
from pathlib import Path
from urllib.parse import unquote, urlparse

from ansible import constants, context
from ansible.errors import AnsibleError, AnsibleParserError
from ansible.inventory.data import InventoryData
from ansible.inventory.manager import IGNORED
from ansible.parsing.vault import is_encrypted
from ansible.plugins.inventory import BaseInventoryPlugin
from ansible.plugins.loader import inventory_loader
from ansible.utils.display import Display

DOCUMENTATION = r"""
name: gpuready_guard
short_description: Refuses a run from another environment, without an inventory, or with one that is not read as meant
description:
  - Reads no inventory itself. It refuses before any inventory is read when ansible-playbook is not the one of
    gpuready's environment, and says how to make inventories/production until the operator has one.
  - It reviews every file that Ansible would read, and refuses what Ansible would stumble over or pass over.
options: {}
author:
  - gpuready authors
"""

CHECKOUT = Path(__file__).resolve().parents[2]
PRODUCTION = CHECKOUT / "inventories" / "production"
YAML = (".yml", ".yaml", ".json")


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


def in_words(path: Path) -> str:
    """Return a path as sentences name it."""
    return str(path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path)


class InventoryModule(BaseInventoryPlugin):
    """Takes a source only to refuse it."""

    NAME = "gpuready_guard"
    _reviewed = False

    def verify_file(self, path):
        """Say whether there is something to look at; a syntax check needs no servers, so it gets none."""
        return bool(self._refusal(path)) or self._is_missing(path) or not InventoryModule._reviewed

    def parse(self, inventory, loader, path, cache=True):  # noqa: ARG002 - the signature is Ansible's
        """Refuse, one sentence each; an exception would be wrapped in three."""
        refusal = self._refusal(path)
        if refusal:
            self._refuse([refusal])
        if self._is_missing(path):
            return
        InventoryModule._reviewed = True
        sources = [Path(one).absolute() for one in context.CLIARGS.get("inventory") or [path] if "," not in one]
        try:
            sentences = Review(loader).sentences([one for one in sources if one.exists()])
        except Exception as error:
            # Ansible would go on with the next plugin, and the inventory would count as reviewed.
            if os.environ.get("GPUREADY_TRACE"):
                traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            sentences = [
                f"gpuready has a defect: {said}; set GPUREADY_TRACE=1, run it again and report what it prints."
            ]
        if sentences:
            self._refuse(sentences)
        raise AnsibleParserError("nothing is wrong that can be seen before the inventory is read")

    def _refuse(self, sentences: list[str]) -> None:
        for sentence in sentences:
            Display().error(sentence, wrap_text=False)
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


class Review:
    """Reviews every file of an inventory that Ansible would read."""

    def __init__(self, loader) -> None:
        # Imported here: another environment does not have them, and is to be told so.
        from gpuready.spec.check import PREFIX
        from gpuready.spec.inventory import role_options

        self._loader = loader
        self._prefixes = (PREFIX, *(f"{role}_" for role in role_options(CHECKOUT / "roles")))
        self._sentences: list[str] = []

    def sentences(self, sources: list[Path]) -> list[str]:
        """Return every mistake in the files of these sources; each file's own first, then what joins them."""
        for source in sources:
            for path in self._inventory_files(source):
                if path.suffix in YAML:
                    self._review(path, of_hosts=True)
        if not self._sentences:
            known = self._read(sources)
            for source in dict.fromkeys(sources):
                # Beside a single file, or behind a link, lie files of other inventories too.
                folder = source if source.is_dir() else source.parent
                for name, owners, kind in (("group_vars", known.groups, "group"), ("host_vars", known.hosts, "host")):
                    read = self._review_variables(folder / name, sorted(owners))
                    if source.is_dir() and not (folder / name).is_symlink():
                        self._review_unread(folder / name, read, sorted(owners), kind)
        return self._sentences

    def _inventory_files(self, source: Path) -> list[Path]:
        if not source.is_dir():
            return [source]
        entries = [entry for entry in sorted(source.iterdir()) if not IGNORED.search(os.fsencode(entry.name))]
        return [path for entry in entries for path in self._inventory_files(entry)]

    def _review(self, path: Path, *, of_hosts: bool) -> None:
        from gpuready.spec.review import review

        try:
            content = path.read_bytes()
            if is_encrypted(content):
                content = self._loader.get_text_file_contents(str(path)).encode()
        except OSError as error:
            self._sentences.append(f"{in_words(path)}: the file cannot be read: {error.strerror}; see who may read it.")
            return
        except AnsibleError as error:
            fix = "give the password with --vault-password-file or --ask-vault-pass"
            self._sentences.append(f"{in_words(path)}: the file cannot be decrypted: {_said(error)}; {fix}.")
            return
        _, failures = review(in_words(path), content, self._prefixes, self._why_sealed, of_hosts=of_hosts)
        self._sentences += [failure.sentence() for failure in failures]

    def _why_sealed(self, text: str) -> str:
        try:
            self._loader._vault.decrypt(text.encode())
        except AnsibleError as error:
            return _said(error)
        return ""

    def _read(self, sources: list[Path]) -> InventoryData:
        """Read the sources with Ansible's own plugins, to know which groups and hosts there are."""
        found = InventoryData()
        for path in (path for source in sources for path in self._inventory_files(source)):
            for name in constants.INVENTORY_ENABLED:
                plugin = None if name == InventoryModule.NAME else inventory_loader.get(name)
                if plugin and plugin.verify_file(str(path)):
                    try:
                        plugin.parse(found, self._loader, str(path), cache=False)
                    except AnsibleError:
                        continue  # said by Ansible itself, for a source that no plugin can read
                    break
        return found

    def _review_variables(self, folder: Path, names: list[str]) -> set[Path]:
        """Review the files that Ansible reads for groups or hosts, and return them."""
        found = [one for name in names for one in self._loader.find_vars_files(str(folder), name) if folder.is_dir()]
        read = {Path(os.fsdecode(one)).absolute() for one in found}
        for path in sorted(read):
            self._review(path, of_hosts=False)
        return read

    def _review_unread(self, folder: Path, read: set[Path], names: list[str], kind: str) -> None:
        """Name the files that lie there for a group or host, and are read for none."""
        for path in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if path.is_file() and path not in read and not hidden and not IGNORED.search(os.fsencode(path.name)):
                self._sentences.append(self._unread(path, folder, names, kind))

    def _unread(self, path: Path, folder: Path, names: list[str], kind: str) -> str:
        from gpuready.spec.check import meant
        from gpuready.spec.values import shown

        owner = path.relative_to(folder).parts[0]
        stem = owner.removesuffix(path.suffix) if owner == path.name else owner
        if stem in names:
            return (
                f"{in_words(path)}: nobody reads this file beside the others of {stem}; end it with .yml, or remove it."
            )
        fix = meant(stem, names)
        return f"{in_words(path)}: no {kind} is named {shown(stem)}, so nobody reads this file; {fix}".rstrip(".") + (
            "" if fix.endswith("?") else "."
        )


def _said(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]
