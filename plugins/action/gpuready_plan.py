# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of one host, once per run: declaration, facts, preflight, plan, rendered files.

Every refusal is said at once and nothing is changed. It returns the facts that later stages read: `gpuready_facts`,
`gpuready_plan` and `gpuready_files`.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible._internal._datatag._tags import Origin, VaultedValue
from ansible.parsing.vault import EncryptedString, is_encrypted
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

from gpuready.cli.plan_page import bullets, of_plan
from gpuready.cli.screen import Screen
from gpuready.outcome import Failure, Refusal, Result
from gpuready.planning import surroundings
from gpuready.planning.difference import sentences
from gpuready.planning.host import decide, keep_or_renew, needs_of
from gpuready.planning.plan import SIMULATED_MODELS, effective_stack
from gpuready.rendering.templates import Renderer, render_host
from gpuready.serving.models import read_model
from gpuready.spec.check import with_place
from gpuready.spec.declared import Declared
from gpuready.spec.inventory import locator
from gpuready.spec.values import Sealed, Secret

CHECKOUT = Path(__file__).resolve().parents[2]
GENERATOR = CHECKOUT / "sim" / "tiny_model.py"


@functools.cache
def _is_sealed(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return is_encrypted(file.read(64))
    except OSError:
        return False


def _is_in_a_vault(text: Any) -> bool:
    """Return whether a text stands in a file that is encrypted as a whole."""
    origin = Origin.get_tag(text)
    return bool(origin and origin.path and _is_sealed(origin.path))


def _is_from_a_vault(text: str) -> bool:
    """Return whether a text was encrypted by itself, or stands in a file that is encrypted as a whole."""
    return VaultedValue.is_tagged_on(text) or _is_in_a_vault(text)


def _uses_a_vault(raw: Any, variables: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> bool:
    """Return whether a text that an operator wrote reads a text out of a vault, if by way of other variables.

    What a template puts together from a secret and something else has lost Ansible's mark.
    """
    if isinstance(raw, EncryptedString):
        return True
    if not isinstance(raw, str):
        return False
    names = set(re.findall(r"[A-Za-z_]\w*", raw)) & set(variables) - seen if "{{" in raw or "{%" in raw else set()
    return _is_from_a_vault(raw) or any(_uses_a_vault(variables[name], variables, seen | names) for name in names)


def sealed(value: Any, raw: Any, variables: Mapping[str, Any]) -> Any:
    """Return plain data in which every text is marked that a template put together from something out of a vault."""
    if isinstance(value, dict) and isinstance(raw, Mapping):
        return {key: sealed(one, raw.get(key), variables) for key, one in value.items()}
    if isinstance(value, list) and isinstance(raw, list | tuple) and len(value) == len(raw):
        return [sealed(one, other, variables) for one, other in zip(value, raw, strict=True)]
    if not isinstance(value, str) or not _uses_a_vault(raw, variables):
        return value
    return Sealed(value) if _is_in_a_vault(raw) else Secret(value)


def plain(value: Any) -> Any:
    """Return plain data without Ansible's tags and laziness; what came out of a vault stays marked."""
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, str):
        text = "".join(value)
        if VaultedValue.is_tagged_on(value):
            return Secret(text)
        return Sealed(text) if _is_in_a_vault(value) else text
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


class ActionModule(ActionBase):
    """`gpuready_plan:` takes everything from the inventory and the server.

    With `show: true` it only shows the plan, also what is planned but not served yet, and how it differs from the
    server's; no later stage sees it.
    """

    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        """Return the facts of this host, or fail with every refusal at once."""
        result = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec={"show": {"type": "bool", "default": False}})
        task_vars = task_vars or {}
        host = task_vars["inventory_hostname"]
        locate = self._locator(host, task_vars)
        declared = self._declared(host, task_vars, locate)
        spec, failures = declared.shared()
        knobs, refused = declared.all_knobs()
        refused += declared.connection()
        failures += refused
        if spec is None or refused:
            return self._refuse(result, failures)
        # The proxy is the carrier's matter and may hold a password: neither plan nor template sees it.
        spec = spec.model_dump(exclude={"gpuready_proxy"})
        gateway = {name.removeprefix("gateway_"): value for name, value in declared.effective("gateway", knobs).items()}
        cuda = {name.removeprefix("cuda_"): value for name, value in knobs["cuda"].items()}
        engines = {name.removeprefix("engines_"): value for name, value in knobs["engines"].items()}
        try:
            asked = time.time()
            models = declared.effective("models", knobs)
            hubs = {"endpoints": models["models_endpoint"], "token_hub": models["models_token_hub"]}
            store = {"mount": models["models_mount"], "disk": models["models_disk"]}
            facts = self._facts(host, needs_of(spec, effective_stack(spec, cuda), hubs, engines, store), task_vars)
            for note in surroundings.notes(facts, asked, time.time()):
                self._display.display(f"  {host}: note: {note}")
            generated = self._generated_models(spec)
            plan, refused = decide(
                host, spec, gateway, facts, generated, cuda, serve=not options["show"], engines=engines
            )
            names = [one["name"] for one in spec["gpuready_deployments"]]
            failures += [with_place(failure, host, locate, names) for failure in refused]
            if options["show"] and plan is not None:
                return self._show(result, host, plan, facts["stored_plan"], failures)
            if failures or plan is None:
                return self._refuse(result, failures)
            plan, note = keep_or_renew(plan, facts["stored_plan"], spec["gpuready_replan"])
            files = render_host(Renderer(self._template_folders(task_vars)), spec, plan, facts)
        except Refusal as refusal:
            return self._refuse(result, failures + refusal.failures)
        for line in self._explain(plan, note):
            self._display.display(f"  {host}: {line}")
        # With -v Ansible prints what a task returns; the whole plan, with what flags hold, is nothing for a screen.
        result["_ansible_verbose_override"] = True
        result["ansible_facts"] = {"gpuready_facts": facts, "gpuready_plan": plan, "gpuready_files": files}
        return result

    def _declared(self, host: str, task_vars: dict, locate) -> Declared:
        """Return what the variables of this host declare, with their templates evaluated by Ansible."""
        return Declared(
            CHECKOUT / "roles",
            host,
            task_vars,
            lambda value: sealed(plain(self._templar.template(value)), value, task_vars),
            locate,
            command_line=load_extra_vars(self._loader),
        )

    def _locator(self, host: str, task_vars: dict):
        """Return a function that says where a variable of this host is set; the command line wins over files."""
        sources = [Path(source) for source in task_vars.get("ansible_inventory_sources") or []]
        folders = [source if source.is_dir() else source.parent for source in sources if source.exists()]
        on_command_line = load_extra_vars(self._loader)

        def origin(name: str) -> tuple[Path | None, int | None]:
            found = Origin.get_tag(task_vars.get(name))
            return (Path(found.path), found.line_num) if found and found.path else (None, None)

        in_files = locator(folders, task_vars.get("group_names", []), host, CHECKOUT, task_vars, origin)

        def locate(keys: tuple) -> str:
            from_file = in_files(keys) if keys[0] not in on_command_line or origin(keys[0])[0] else ""
            return from_file or ("on the command line (-e)" if keys[0] in on_command_line else "")

        return locate

    def _facts(self, host: str, needs: dict, task_vars: dict) -> dict:
        task = self._task.copy()
        task.args = {"noun": "facts", "verb": "show", "input": needs}
        action = self._shared_loader_obj.action_loader.get(
            "gpuready",
            task=task,
            connection=self._connection,
            play_context=self._play_context,
            loader=self._loader,
            templar=self._templar,
            shared_loader_obj=self._shared_loader_obj,
        )
        answer = action.run(task_vars=task_vars)
        if answer.get("failed"):
            said = answer["failures"]
            raise Refusal(Failure(one["code"], f"host {host}: {one['what']}", one["why"], one["fix"]) for one in said)
        return answer["data"]

    def _generated_models(self, spec: dict) -> dict[str, dict]:
        """Make the simulated models on the controller and return what their files say."""
        wanted = {one["model"] for one in spec["gpuready_deployments"] if one["model"].startswith(SIMULATED_MODELS)}
        found = {}
        for model in sorted(wanted):
            folder = CHECKOUT / ".cache" / "models"
            made = subprocess.run(
                [sys.executable, str(GENERATOR), "--store", str(folder), model],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode != 0 and "is not known" not in made.stderr:
                said = made.stderr.strip().splitlines()
                what = f"the simulated model {model} could not be made on this machine"
                raise Refusal(Failure("plan.model_made", what, said[-1] if said else "", "repair that"))
            if made.returncode == 0:
                path = Path(made.stdout.strip().splitlines()[-1])
                found[model] = {**read_model(path), "revision": path.name.rpartition("@")[2], "source": str(path)}
        return found

    def _template_folders(self, task_vars: dict) -> list[Path]:
        own = Path(task_vars.get("inventory_dir") or CHECKOUT) / "templates"
        return [folder for folder in (own, CHECKOUT / "templates") if folder.is_dir()]

    def _show(self, result: dict, host: str, plan: dict, stored: dict | None, failures: list[Failure]) -> dict:
        """Show the plan of a host, and what keeps it from being brought there; nothing is kept."""
        screen = Screen.of(sys.stdout)
        lines = [f"Plan of {host}", "", of_plan(plan, screen), "", *screen.heading("Beside what the server has")]
        lines += bullets(sentences(plan, stored), screen)
        if failures:
            lines += ["", "What has to be settled before site.yml brings it:"]
            lines += bullets([failure.sentence() for failure in failures], screen)
        # In one piece, because hosts are planned side by side.
        self._display.display("\n".join(["", *lines, ""]))
        result["_ansible_verbose_override"] = True
        result["plan"] = plan
        return result

    def _explain(self, plan: dict, note: str) -> list[str]:
        lines = [
            line for one in plan["deployments"] for line in (f"{one['name']}:", *(f"  {x}" for x in one["explain"]))
        ]
        return [*lines, note] if note else lines

    def _refuse(self, result: dict, failures: list[Failure]) -> dict:
        result["failed"] = True
        result["failures"] = Result(failures=failures).as_dict()["failures"]
        result["msg"] = "\n".join(failure.sentence() for failure in failures)
        return result
