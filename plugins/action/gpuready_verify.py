# SPDX-License-Identifier: Apache-2.0
"""Audits one server: asks it once, over Ansible's own connection, and judges the answer with tests/verify."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from gpuready.spec.interpreter import interpreter
from gpuready.spec.reach import unreachable

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE = CHECKOUT / "tests" / "verify"
PACKAGE = "tests.verify.probe"
# In the order in which they need each other.
MODULES = ("reading", "host", "caches", "serving", "snapshot")
# Sent on standard input, so that nothing is written on the server.
LOADER = """\
import sys, types
for name in {parents!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in {sources!r}:
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[{package!r}], name.rpartition(".")[2], module)
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules[{package!r} + ".snapshot"].main()
"""


def program() -> str:
    """Return the probe as one program."""
    words = PACKAGE.split(".")
    parents = [".".join(words[: count + 1]) for count in range(len(words))]
    sources = [(f"{PACKAGE}.{name}", (SUITE / "probe" / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    return LOADER.format(parents=parents, sources=sources, package=PACKAGE)


class ActionModule(ActionBase):
    """`gpuready_verify:`; with `judge: false` it returns what the server said, and tests/verify judges it itself."""

    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        """Ask and judge; a failing test fails the task with its sentence."""
        result = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec={"judge": {"type": "bool", "default": True}})
        host = task_vars["inventory_hostname"]
        snapshot = self._ask(host, task_vars)
        if not options["judge"]:
            return {**result, "changed": False, "snapshot": snapshot}
        return {**result, "changed": False, **self._judge(host, snapshot)}

    def _ask(self, host: str, task_vars: dict) -> dict:
        python = interpreter(self._templar.template(task_vars.get("ansible_python_interpreter")))
        try:
            answer = self._low_level_execute_command(f"{python} -I -", in_data=program().encode())
        except AnsibleConnectionFailure as error:
            address = self._templar.template(task_vars.get("ansible_host", host))
            # Without the cause: it would be said twice.
            raise AnsibleConnectionFailure(unreachable(host, address, str(error))) from None
        try:
            # A login banner may come before it.
            snapshot = json.loads(answer["stdout"].strip().splitlines()[-1])
        except (ValueError, IndexError):
            snapshot = None
        if isinstance(snapshot, dict):
            return snapshot
        said = (answer["stderr"] or answer["stdout"]).strip().splitlines()
        return {"refused": f"{python} did not answer ({said[-1] if said else 'no output'}, exit {answer['rc']})"}

    def _judge(self, host: str, snapshot: dict) -> dict:
        with tempfile.TemporaryDirectory(prefix="gpuready-verify-") as folder:
            Path(folder, f"{host}.json").write_text(json.dumps(snapshot), encoding="utf-8")
            report = Path(folder, "report.xml")
            words = [f"--hosts=ssh://{host}", f"--snapshots={folder}", f"--junitxml={report}"]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", *words],
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode not in (0, 1) or not report.exists():
                said = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
                return {"failed": True, "msg": f"host {host}: tests/verify did not run: {said}"}
            cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))  # noqa: S314 - pytest's own report
        return self._as_ansible(host, cases)

    def _as_ansible(self, host: str, cases: list) -> dict:
        bad = [found.get("message", "") for case in cases for found in (*case.iter("failure"), *case.iter("error"))]
        skipped = [found.get("message", "") for case in cases for found in case.iter("skipped")]
        sentences = [message.removeprefix("Failed: ") for message in bad]
        reasons = list(dict.fromkeys(skipped))
        not_judged = sum(reason.startswith("not judged") for reason in skipped)
        words = ("passed", "failed", "not judged", "skipped")
        counts = (len(cases) - len(bad) - len(skipped), len(bad), not_judged, len(skipped) - not_judged)
        told = ", ".join(f"{count} {word}" for count, word in zip(counts, words, strict=True) if count)
        msg = "\n".join([*sentences, *reasons, f"{host}: {told}"])
        # The callback shows notes where all is well, and the message where it is not.
        return {"failed": bool(bad), "msg": msg, "data": {"notes": [f"{host}: {told}", *reasons]}}
