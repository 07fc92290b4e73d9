# SPDX-License-Identifier: Apache-2.0
"""Runs one command of gpuready's server part on the server, in as few round trips as there can be."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from gpuready.outcome import Failure, mask
from gpuready.rendering import zipapp
from gpuready.spec.interpreter import DEFAULT, interpreter
from gpuready.spec.reach import unreachable

INSTALLED = "/opt/gpuready"
NEVER_BEGAN = (
    "can't open file", "can't find '__main__'", "zipimport.ZipImportError", "zlib.error", "null bytes", zipapp.DAMAGED,
)  # fmt: skip
KILLED = (-9, 137, -15, 143)
"""What a shell answers for a command that ended by SIGKILL or SIGTERM."""
ASKS_HUBS = (("facts", "show"), ("model", "bring"))
PAUSE_SECONDS = 2
TELL_AGAIN_SECONDS = 60
# Built here, because Ansible loads this file before it forks a worker for each task and host.
zipapp.build()


class ActionModule(ActionBase):
    """`gpuready: {noun: ..., verb: ..., input: {...}}`."""

    # Else Ansible makes and removes a temporary folder around every task: two round trips for what is seldom sent.
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp=None, task_vars=None):
        """Run the command and give its result in Ansible's words."""
        super().run(tmp, task_vars)
        del tmp
        self._host = (task_vars or {}).get("inventory_hostname", "the server")
        self._done_before = []  # what the parts of a long command changed before its last one
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
        given = self._with_proxy(options["input"], task_vars or {})
        if (options["noun"], options["verb"]) in ASKS_HUBS:
            given = self._with_token(given, task_vars or {})
        given = json.dumps(given)
        try:
            answer = self._ask_patiently(words, given, task_vars or {})
        except AnsibleConnectionFailure as error:
            address = self._templar.template((task_vars or {}).get("ansible_host", self._host))
            # Without the cause: it would be said twice.
            raise AnsibleConnectionFailure(unreachable(self._host, address, str(error))) from None
        python = self._python(task_vars or {})
        return self._as_ansible(answer, options["noun"], options["verb"], python)

    def _with_proxy(self, given: dict, task_vars: dict) -> dict:
        """Return the input with the server's proxy, which every program that the command starts then uses."""
        proxy = None if self._task.delegate_to else self._templar.template(task_vars.get("gpuready_proxy"))
        return {**given, "proxy": proxy} if proxy else given

    def _with_token(self, given: dict, task_vars: dict) -> dict:
        """Return the input with the token for a hub of models, where one is asked: it is in no task's arguments."""
        if not any(one.get("source") for one in given.get("models") or ()):
            return given
        token = self._templar.template(task_vars.get("models_token") or "")
        path = self._templar.template(task_vars.get("models_token_file") or "")
        if path and not token:
            try:
                token = Path(path).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is no text"
                what = f"models_token_file = {path} cannot be read on this machine: {why}"
                raise AnsibleActionFail(f"{what}; name a file that holds the hub's token alone.") from None
        token = token.strip()
        if not token:
            return given
        if not (token.isascii() and token.isprintable()) or " " in token:
            where = "models_token" if task_vars.get("models_token") else f"models_token_file = {path}"
            raise AnsibleActionFail(f"{where} is refused: a token is one word of ASCII letters, digits and signs.")
        return {**given, "models_token": token}

    def _ask_patiently(self, words: list[str], stdin: str, task_vars: dict) -> dict:
        """Ask again while somebody else is at work on the server, or a command answers in parts how far it is."""
        began, told = {}, {}
        while True:
            answer = self._ask_server(words, stdin, task_vars)
            part = (self._result(answer) or {"data": {}}) if answer["rc"] else {"data": {}}
            if part["data"].get("progress"):
                self._done_before += part["diff"]
                self._display.display(f"  {self._host}: {part['data']['progress']}")
                continue
            busy = self._busy(answer)
            if busy is None:
                return answer
            sentence, seconds = busy
            now = time.monotonic()
            if now - began.setdefault(sentence, now) + PAUSE_SECONDS > seconds:
                return answer
            if now - told.get(sentence, -TELL_AGAIN_SECONDS) >= TELL_AGAIN_SECONDS:
                told[sentence] = now
                self._display.display(f"  {self._host} waits at most {seconds} s: {sentence}")
            time.sleep(PAUSE_SECONDS)

    def _busy(self, answer: dict) -> tuple[str, float] | None:
        """Return who keeps the server busy and how long to ask again; None where nobody does."""
        result = self._result(answer) if answer["rc"] else None
        seconds = result["data"].get("wait_seconds") if result else None
        if not seconds:
            return None
        return "; ".join(failure["what"] for failure in result["failures"]), seconds

    def _ask_server(self, words: list[str], stdin: str, task_vars: dict) -> dict:
        part = zipapp.build()
        python = self._python(task_vars)
        answer = self._run_part(f"{INSTALLED}/gpuready-{part.digest}.pyz", python, words, stdin)
        # Absent on a blank server, and perhaps damaged after a power cut: then it is carried along. A command that
        # began and was killed must not run twice.
        empty = answer["rc"] == 0 and not answer["stdout"].strip()
        if empty or (answer["rc"] != 0 and any(mark in answer["stderr"] for mark in NEVER_BEGAN)):
            answer = self._carry_and_run(part, python, words, stdin)
        return answer

    def _python(self, task_vars: dict) -> str:
        """Return the interpreter of the machine that the task really runs on."""
        if self._task.delegate_to:
            delegated = (task_vars.get("ansible_delegated_vars") or {}).get(self._task.delegate_to) or {}
            default = sys.executable if getattr(self._connection, "_remote_is_local", False) else DEFAULT
            declared = delegated.get("ansible_python_interpreter")
        else:
            default = DEFAULT
            declared = task_vars.get("ansible_python_interpreter")
        return interpreter(self._templar.template(declared), default)

    def _result(self, answer: dict) -> dict | None:
        """Return the result that the command printed; None when it printed none."""
        try:
            # The last line is the result; a login banner or a warning may come before it.
            result = json.loads(answer["stdout"].strip().splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return result if isinstance(result, dict) and "failures" in result else None

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

    def _as_ansible(self, answer: dict, noun: str, verb: str, python: str) -> dict:
        result = self._result(answer)
        if result is None:
            said = (answer["stderr"] or answer["stdout"]).strip().splitlines()
            what = f"gpuready {noun} {verb} did not answer on {self._host}"
            if answer["rc"] in KILLED:
                raise AnsibleActionFail(
                    f"{what}: it was killed there, by somebody or, for lack of memory, by the kernel (journalctl -k); "
                    "run again: the next run finishes it."
                )
            raise AnsibleActionFail(
                f"{what}: {mask(said[-1]) if said else 'no output'} (exit {answer['rc']}); "
                f"see that {python} (3.10 or newer, ansible_python_interpreter) works on the server."
            )
        if self._done_before:
            result["diff"] = [*self._done_before, *result["diff"]]
            result["changed"] = True
        if answer["rc"] != 0:
            result["failed"] = True
            result["changed"] = bool(result.get("changed"))
            result["msg"] = (
                " ".join(Failure(**failure).sentence() for failure in result["failures"]) or result["summary"]
            )
        return result
