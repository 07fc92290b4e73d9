# SPDX-License-Identifier: Apache-2.0
"""Shows a run: refusals as sentences, once each; at the end a table that says how every host came out."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from ansible import constants as C  # noqa: N812 - as Ansible itself calls it
from ansible.plugins.callback.default import CallbackModule as Default
from ansible.utils.color import ANSIBLE_COLOR

from gpuready.rendering.summary import Summary, render, sentences

DOCUMENTATION = r"""
name: gpuready
type: stdout
short_description: Ansible's own output, with refusals as sentences and a table at the end
description:
  - What the default output shows, without the lines of steps that only look at values.
  - A refusal is printed once, one sentence a line; with -v also everything that the task returned.
  - At the end of the run a table names, by host and stage, changes, seconds, the problem and the next step.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
options:
  summary_file:
    description: Writes the table as JSON into this file, too.
    type: path
    env: [{name: GPUREADY_SUMMARY_FILE}]
    ini: [{section: callback_gpuready, key: summary_file}]
author:
  - gpuready authors
"""

QUIET = ("ansible.builtin.validate_argument_spec", "validate_argument_spec")
OURS = ("gpuready", "gpuready_plan", "gpuready_validate", "gpuready_verify")


class CallbackModule(Default):
    """The output of ansible-playbook."""

    CALLBACK_NAME = "gpuready"

    def __init__(self):
        super().__init__()
        self._summary = Summary()
        self._started = {}
        self._whole_job = False

    # ---------------------------------------------------------------------------------------- what is shown

    def v2_playbook_on_start(self, playbook):
        """Note whether this is the whole job."""
        super().v2_playbook_on_start(playbook)
        self._whole_job = Path(playbook._file_name).name == "site.yml"

    def v2_playbook_on_task_start(self, task, is_conditional):
        """Print the task's banner, unless it only checks arguments."""
        if task.action in QUIET:
            self._task_type_cache[task._uuid] = "TASK"
            self._last_task_name = task.get_name().strip()
            return
        super().v2_playbook_on_task_start(task, is_conditional)

    def v2_playbook_on_include(self, included_file):
        """Print nothing: the included tasks speak for themselves."""

    def v2_runner_on_ok(self, result):
        """Show a task that ended well, and what check mode could not know."""
        self._count(result, self._summary.ended)
        if result.task.action in QUIET:
            return
        super().v2_runner_on_ok(result)
        if result.task.action in OURS and not result.task.loop:
            for note in (result.result.get("data") or {}).get("notes") or []:
                self._display.display(f"  note: {note}", color=C.COLOR_WARN)
            for what in result.result.get("undecided") or []:
                self._display.display(f"  decided after install: {what}", color=C.COLOR_SKIP)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        """Show a failure of ours as sentences; of Ansible's own modules as Ansible does."""
        self._count(result, self._summary.failed)
        if result.task.action not in OURS or self._display.verbosity or result.task.loop:
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self._say(result, "FAILED!")

    def v2_runner_on_unreachable(self, result):
        """Show that a host cannot be reached."""
        self._count(result, self._summary.failed)
        if self._display.verbosity:
            super().v2_runner_on_unreachable(result)
            return
        self._say(result, "UNREACHABLE!")

    @staticmethod
    def host_label(result):
        """Name the host, and another one that does the task for it; never the template of its address."""
        host, other = result.host.get_name(), result.task.delegate_to
        return f"{host} -> {other}" if other and other != host else host

    def _say(self, result, word):
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._handle_warnings(result.result)
        said = sentences(result.result)
        head = f"fatal: [{self.host_label(result)}]: {word} => "
        text = said[0] if len(said) == 1 else "".join(f"\n  {sentence}" for sentence in said)
        self._display.display(head.rstrip() + (text if text[0] == "\n" else f" {text}"), color=C.COLOR_ERROR)

    # ---------------------------------------------------------------------------------------- what is counted

    def v2_runner_on_start(self, host, task):
        """Note when a task began on a host."""
        super().v2_runner_on_start(host, task)
        self._started[host.get_name(), task._uuid] = time.monotonic()

    def v2_runner_on_skipped(self, result):
        """Count a skipped task as nothing."""
        self._started.pop((result.host.get_name(), result.task._uuid), None)
        super().v2_runner_on_skipped(result)

    def _count(self, result, how):
        host = result.host.get_name()
        began = self._started.pop((host, result.task._uuid), None)
        seconds = time.monotonic() - began if began is not None else 0.0
        how(host, self._stage(), seconds, result.result)

    def _stage(self):
        return self._play.get_name().strip() if self._play else "-"

    def v2_playbook_on_stats(self, stats):
        """Print Ansible's recap, then the table."""
        for (host, stage), row in self._summary.rows.items():
            of_host = stats.summarize(host)
            if row.problem and not of_host["failures"] and not of_host["unreachable"]:
                self._summary.recovered(host, stage)
        super().v2_playbook_on_stats(stats)
        self._summary.check = bool(self._is_check())
        if self._summary.rows:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            self._display.display(render(self._summary, width, bool(ANSIBLE_COLOR)) + "\n")
            command = self._summary.next_command()
            if command and self._whole_job:
                self._display.display(f"Next, the audit from outside: {self._with_options(command)}\n")
        self._write_file()

    @staticmethod
    def _with_options(command):
        """Return the command with the inventory and the limit that this run was given."""
        from ansible import context

        given = [word for source in context.CLIARGS.get("inventory") or () for word in ("-i", source)]
        usual = [str(path) for path in C.config.get_config_value("DEFAULT_HOST_LIST")]
        words = [] if [str(Path(word).resolve()) for word in given[1::2]] == usual else given
        limit = context.CLIARGS.get("subset")
        if limit and " -l " not in command:
            words += ["-l", limit]
        return shlex.join([*shlex.split(command), *words])

    @staticmethod
    def _is_check():
        from ansible import context

        return context.CLIARGS.get("check")

    def _write_file(self):
        path = self.get_option("summary_file")
        if not path:
            return
        try:
            Path(path).write_text(json.dumps(self._summary.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            self._display.error(
                f"The summary cannot be written to {path}: {error.strerror}; name another summary_file."
            )
