# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of one host, once per run: declaration, facts, preflight, plan, rendered files.

Every refusal is said at once and nothing is changed. It returns the facts that later stages read: `gpuready_facts`,
`gpuready_plan` and `gpuready_files`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

from gpuready.operations import firewall
from gpuready.outcome import Failure, Refusal
from gpuready.planning.host import decide, keep_or_renew, needs_of
from gpuready.planning.plan import SIMULATED_MODELS, effective_stack
from gpuready.rendering.templates import Renderer, render_host
from gpuready.serving.models import read_model
from gpuready.spec.check import PREFIX, check_declaration, with_place
from gpuready.spec.inventory import locator, role_defaults, role_options

CHECKOUT = Path(__file__).resolve().parents[2]
GENERATOR = CHECKOUT / "sim" / "tiny_model.py"


def _remedy(said: str) -> str:
    """Return what to do about an SSH failure."""
    if "Host key verification failed" in said:
        return "check its host key and add it to known_hosts (ssh to it once by hand)"
    if "Permission denied" in said:
        return "check ansible_user and its key"
    return "start it, or leave it out with --limit"


class ActionModule(ActionBase):
    """`gpuready_plan:` takes no options; everything comes from the inventory and the server."""

    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        """Return the facts of this host, or fail with every refusal at once."""
        result = super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        task_vars = task_vars or {}
        host = task_vars["inventory_hostname"]
        locate = self._locator(host, task_vars)
        spec, failures = self._declaration(host, task_vars, locate)
        failures += self._knob_failures(host, task_vars, locate)
        if spec is None:
            return self._refuse(result, failures)
        cuda = self._set_by_operator("cuda", task_vars)
        stack = effective_stack(spec, cuda)
        if any(failure.code == "spec.knob" for failure in failures):
            return self._refuse(result, failures)
        gateway = self._knobs("gateway", task_vars)
        try:
            closed = self._firewall_failures(host, gateway, task_vars)
            failures += [with_place(failure, host, locate) for failure in closed]
            facts = self._facts(host, needs_of(spec, stack), task_vars)
            generated = self._generated_models(spec)
            plan, refused = decide(host, spec, gateway, facts, generated, cuda)
            failures += [with_place(failure, host, locate) for failure in refused]
            if failures or plan is None:
                return self._refuse(result, failures)
            plan, note = keep_or_renew(plan, facts["stored_plan"], spec["gpuready_replan"])
            files = render_host(Renderer(self._template_folders(task_vars)), spec, plan, facts)
        except Refusal as refusal:
            return self._refuse(result, failures + refusal.failures)
        for line in self._explain(plan, note):
            self._display.display(f"  {host}: {line}")
        result["ansible_facts"] = {"gpuready_facts": facts, "gpuready_plan": plan, "gpuready_files": files}
        return result

    def _locator(self, host: str, task_vars: dict):
        """Return a function that says where a variable of this host is set; the command line wins over files."""
        sources = [Path(source) for source in task_vars.get("ansible_inventory_sources") or []]
        folders = [source if source.is_dir() else source.parent for source in sources if source.exists()]
        in_files = locator(folders, task_vars.get("group_names", []), host, CHECKOUT, task_vars)
        on_command_line = load_extra_vars(self._loader)
        return lambda name: "on the command line (-e)" if name in on_command_line else in_files(name)

    def _declaration(self, host: str, task_vars: dict, locate) -> tuple[dict | None, list[Failure]]:
        roles = role_options(CHECKOUT / "roles")
        prefixes = (PREFIX, *(f"{role}_" for role in roles))
        names = [name for name in task_vars if name.startswith(prefixes)]
        # Only the shared variables are read here; a role's own are templated when the role runs.
        declared = {
            name: self._templar.template(task_vars[name]) if name.startswith(PREFIX) else None for name in names
        }
        spec, failures = check_declaration(host, declared, roles, locate)
        # The proxy is the carrier's matter and may hold a password: neither plan nor template sees it.
        return (spec.model_dump(exclude={"gpuready_proxy"}) if spec else None), failures

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
        try:
            answer = action.run(task_vars=task_vars)
        except AnsibleConnectionFailure as error:
            # Without the cause: it would be said twice.
            said = str(error).strip().splitlines()[-1]
            address = self._templar.template(task_vars.get("ansible_host", host))
            raise AnsibleConnectionFailure(
                f"host {host} ({address}) cannot be reached: {said}; {_remedy(said)}."
            ) from None
        if answer.get("failed"):
            said = answer["failures"]
            raise Refusal(Failure(one["code"], f"host {host}: {one['what']}", one["why"], one["fix"]) for one in said)
        return answer["data"]

    def _knob_failures(self, host: str, task_vars: dict, locate) -> list[Failure]:
        """Check the roles' own variables now: Ansible itself would do so only when a role's turn comes."""
        failures = []
        for role, options in role_options(CHECKOUT / "roles").items():
            for short, value in sorted(self._set_by_operator(role, task_vars).items()):
                name = f"{role}_{short}"
                checked = ArgumentSpecValidator({name: options[name]}).validate({name: value})
                for message in checked.error_messages:
                    place = f"{locate(name)}, " if locate(name) else ""
                    what = f"host {host}, {place}{name} = {value!r} is refused"
                    failures.append(Failure("spec.knob", what, message.rstrip("."), "correct it in the inventory"))
        return failures

    def _set_by_operator(self, role: str, task_vars: dict) -> dict:
        """Return a role's public variables that differ from its defaults, without the role's prefix.

        A default that this play's roles bring is not what the operator wrote, and may need the plan.
        """
        options = role_options(CHECKOUT / "roles")[role]
        defaults = role_defaults(CHECKOUT / "roles", role) if options else {}
        names = [name for name in options if name in task_vars and task_vars[name] != defaults[name]]
        return {name.removeprefix(f"{role}_"): self._templar.template(task_vars[name]) for name in names}

    def _knobs(self, role: str, task_vars: dict) -> dict:
        """Return a role's public variables for this host, without the role's prefix."""
        values = role_defaults(CHECKOUT / "roles", role)
        values = {name: self._templar.template(task_vars.get(name, default)) for name, default in values.items()}
        checked = ArgumentSpecValidator(role_options(CHECKOUT / "roles")[role]).validate(values)
        return {name.removeprefix(f"{role}_"): checked.validated_parameters[name] for name in values}

    def _firewall_failures(self, host: str, gateway: dict, task_vars: dict) -> list[Failure]:
        """Check the packet filter's openings now, not when the stage base has already changed things."""
        base = self._knobs("base", task_vars)
        # Its port has a range of its own, checked with the other knobs of the gateway.
        port = min(max(gateway["port"], 1), 65535)
        gate = {"port": port, "source": base["firewall_gateway_sources"], "where": "base_firewall_gateway_sources"}
        asked = {
            "open": [*base["firewall_open"], gate],
            "ssh_source": base["firewall_ssh_sources"],
            "revert_seconds": base["firewall_revert_seconds"],
        }
        try:
            firewall.wanted_from(asked)
        except Refusal as refusal:
            return [Failure(one.code, f"host {host}, {one.what}", one.why, one.fix) for one in refusal.failures]
        return []

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

    def _explain(self, plan: dict, note: str) -> list[str]:
        lines = [
            line for one in plan["deployments"] for line in (f"{one['name']}:", *(f"  {x}" for x in one["explain"]))
        ]
        return [*lines, note] if note else lines

    def _refuse(self, result: dict, failures: list[Failure]) -> dict:
        result["failed"] = True
        result["msg"] = "\n".join(failure.sentence() for failure in failures)
        return result
