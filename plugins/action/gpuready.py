# SPDX-License-Identifier: Apache-2.0
"""Runs one command of gpuready's server part on the server, in as few round trips as there can be."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from gpuready.outcome import Failure
from gpuready.rendering import zipapp

INSTALLED = "/opt/gpuready"
ABSENT_MARKS = ("can't open file", "No such file or directory")


class ActionModule(ActionBase):
    """`gpuready: {noun: ..., verb: ..., input: {...}}`."""

    TRANSFERS_FILES = True
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp=None, task_vars=None):
        """Run the command and give its result in Ansible's words."""
        super().run(tmp, task_vars)
        del tmp
        self._host = (task_vars or {}).get("inventory_hostname", "the server")
        _, options = self.validate_argument_spec(
            argument_spec={
                "noun": {"type": "str", "required": True},
                "verb": {"type": "str", "required": True},
                "arguments": {"type": "list", "elements": "str", "default": []},
                "input": {"type": "dict", "default": {}},
            },
        )
        words = [options["noun"], options["verb"], *options["arguments"], "--json"]
        if self._task.check_mode:
            words.append("--check")
        answer = self._ask_server(words, json.dumps(options["input"]), task_vars or {})
        return self._as_ansible(answer, options["noun"], options["verb"])

    def _ask_server(self, words: list[str], stdin: str, task_vars: dict) -> dict:
        part = zipapp.build()
        python = task_vars.get("ansible_python_interpreter") or "/usr/bin/python3"
        answer = self._run_part(f"{INSTALLED}/gpuready-{part.digest}.pyz", python, words, stdin)
        if answer["rc"] == 2 and any(mark in answer["stderr"] for mark in ABSENT_MARKS):
            answer = self._carry_and_run(part, python, words, stdin)
        return answer

    def _carry_and_run(self, part: zipapp.ServerPart, python: str, words: list[str], stdin: str) -> dict:
        """Send the server part to the task's temporary folder and run it there."""
        folder = self._make_tmp_path()
        try:
            with tempfile.TemporaryDirectory() as local:
                path = part.write_to(Path(local))
                remote = self._connection._shell.join_path(folder, path.name)
                self._transfer_file(str(path), remote)
            self._fixup_perms2([folder, remote], execute=False)
            return self._run_part(remote, python, words, stdin)
        finally:
            self._remove_tmp_path(folder, force=True)

    def _run_part(self, path: str, python: str, words: list[str], stdin: str) -> dict:
        command = shlex.join([python, path, *words])
        return self._low_level_execute_command(command, in_data=stdin.encode())

    def _as_ansible(self, answer: dict, noun: str, verb: str) -> dict:
        try:
            # The last line is the result; a login banner or a warning may come before it.
            result = json.loads(answer["stdout"].strip().splitlines()[-1])
        except (ValueError, IndexError):
            said = (answer["stderr"] or answer["stdout"]).strip().splitlines()
            what = f"gpuready {noun} {verb} did not answer on {self._host}"
            raise AnsibleActionFail(
                f"{what}: {said[-1] if said else 'no output'} (exit {answer['rc']}); "
                "see that /usr/bin/python3 (3.10 or newer) works on the server."
            ) from None
        if answer["rc"] != 0:
            result["failed"] = True
            result["changed"] = bool(result.get("changed"))
            result["msg"] = (
                " ".join(Failure(**failure).sentence() for failure in result["failures"]) or result["summary"]
            )
        return result
