# SPDX-License-Identifier: Apache-2.0
"""Refuses what an operator set of one role's variables, before anything is asked of the server."""

from __future__ import annotations

from ansible.plugins.loader import action_loader

# How variables are evaluated and found in files is the same as when the whole host is planned.
Plan = action_loader.get("gpuready_plan", class_only=True)


class ActionModule(Plan):
    """`gpuready_validate: {role: base}`; the role preflight stands for the shared variables."""

    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        """Fail with every mistake at once; contradictions with other roles' variables are among them."""
        result = super(Plan, self).run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec={"role": {"type": "str", "required": True}})
        task_vars = task_vars or {}
        host = task_vars["inventory_hostname"]
        declared = self._declared(host, task_vars, self._locator(host, task_vars))
        if options["role"] == "preflight":
            _, failures = declared.shared()
        else:
            failures = declared.one_role(options["role"])
        return self._refuse(result, failures) if failures else result
