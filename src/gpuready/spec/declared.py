"""What one host's variables declare: evaluated, checked as a whole, every mistake at once. Asks no server."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure
from gpuready.spec import connection, knobs
from gpuready.spec.check import CORRECT, PREFIX, Locate, check_declaration, nowhere, problem_failure, where
from gpuready.spec.inventory import role_defaults, role_options
from gpuready.spec.model import HostSpec
from gpuready.spec.options import problems as type_problems
from gpuready.spec.values import shown, whole

_ANSWERS = {"true": True, "yes": True, "false": False, "no": False}
_UNSHOWN = {"gpuready_proxy", *knobs.ADDRESSES, *connection.SECRETS}
Evaluate = Callable[[Any], Any]
"""Evaluates the templates in a value, and returns plain data; what cannot be evaluated is an exception."""


class Declared:
    """The variables of one host, as the checks see them."""

    def __init__(
        self,
        roles: Path,
        host: str,
        variables: Mapping[str, Any],
        evaluate: Evaluate = lambda value: value,
        locate: Locate = nowhere,
        command_line: Container[str] = (),
    ) -> None:
        self.options = role_options(roles)
        self.defaults = {role: role_defaults(roles, role) for role in self.options}
        self._host = host
        self._variables = variables
        self._evaluate = evaluate
        self._locate = locate
        # There every value that is not JSON is a text: true and false are taken for what they say, for these alone.
        self._command_line = command_line

    def shared(self) -> tuple[HostSpec | None, list[Failure]]:
        """Return the checked shared variables, and every mistake in them and in the names of all variables."""
        ours = [name for name in self._variables if name.startswith(PREFIX)]
        values, failures = self._read(ours)
        broken = set(ours) - set(values)
        # Of the others only the names count here; a role's own values are read with the role.
        names = {name: values.get(name) for name in self._variables if name not in broken}
        spec, found = check_declaration(self._host, names, self.options, self._locate)
        said = {f"{where(self._host, (name,), self._locate)} is not set" for name in broken}
        failures += [failure for failure in found if failure.what not in said]
        return (None if broken else spec), failures

    def knobs(self, role: str) -> tuple[dict[str, Any], list[Failure]]:
        """Return what the operator set of a role's variables, each good by itself, and every mistake in them.

        A default that a play's roles bring is not what the operator wrote, and may need the plan.
        """
        options, defaults = self.options[role], self.defaults[role]
        names = [name for name in options if name in self._variables and self._variables[name] != defaults[name]]
        values, failures = self._read(names)
        good = {}
        for name, value in values.items():
            rule = knobs.RULES.get(name)
            found = list(type_problems((name,), options[name], value, null=rule is not None and rule.null))
            found = found or list(knobs.problems(name, value))
            failures += [problem_failure(self._host, problem, self._locate) for problem in found]
            if not found:
                good[name] = value
        return good, failures

    def all_knobs(self) -> tuple[dict[str, dict[str, Any]], list[Failure]]:
        """Return what the operator set of every role's variables, by role, and every mistake and contradiction."""
        found = {role: self.knobs(role) for role in self.options}
        values = {role: good for role, (good, _) in found.items()}
        failures = [failure for _, some in found.values() for failure in some]
        if not failures:
            failures = list(self._contradictions(values))
        return values, failures

    def one_role(self, role: str) -> list[Failure]:
        """Return every mistake in one role's variables, and what contradicts them."""
        _, failures = self.knobs(role)
        if not failures:
            _, found = self.all_knobs()
            failures = [one for one in found if re.search(rf"(, | ){role}_", one.what)]
        return failures

    def effective(self, role: str, knobs_by_role: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return all of a role's variables: what the operator set, in its type, over the defaults."""
        values = {**self.defaults[role], **knobs_by_role[role]}
        kinds = {name: option.get("type") for name, option in self.options[role].items()}
        return {name: whole(value) if kinds[name] == "int" else value for name, value in values.items()}

    def connection(self) -> list[Failure]:
        """Return every mistake in templates of the variables that say how the host is reached; others were reviewed."""
        names = [name for name in connection.RULES if "{{" in str(self._variables.get(name, ""))]
        values, failures = self._read(names)
        problems = connection.connection_problems(values)
        return failures + [problem_failure(self._host, problem, self._locate) for problem in problems]

    def _contradictions(self, values: Mapping[str, Mapping[str, Any]]) -> Iterator[Failure]:
        defaults = {name: value for some in self.defaults.values() for name, value in some.items()}
        known = {name: value for name, value in defaults.items() if "{{" not in str(value)}
        together = {**known, **{name: value for some in values.values() for name, value in some.items()}}
        for problem in knobs.contradictions(together, self._variables.get("ansible_port", 22)):
            yield problem_failure(self._host, problem, self._locate)

    def _answer(self, name: str, value: Any) -> Any:
        if name not in self._command_line or not isinstance(value, str):
            return value
        role = name.partition("_")[0]
        field = HostSpec.model_fields.get(name)
        kind = field.annotation if field else self.options.get(role, {}).get(name, {}).get("type")
        return _ANSWERS.get(value.lower(), value) if kind in (bool, "bool") else value

    def _read(self, names: Iterable[str]) -> tuple[dict[str, Any], list[Failure]]:
        values, failures = {}, []
        for name in sorted(names):
            raw = self._variables[name]
            try:
                values[name] = self._answer(name, self._evaluate(raw))
            except Exception as error:
                value = "" if name in _UNSHOWN else f" = {shown(raw)}"
                what = f"{where(self._host, (name,), self._locate)}{value} cannot be evaluated"
                failures.append(Failure("spec.template", what, _said(error), CORRECT))
        return values, failures


def _said(error: Exception) -> str:
    """Return what Ansible or Python say about a value, as part of a sentence."""
    if isinstance(error, RecursionError) or "recursi" in str(error).lower():
        return "it refers to itself"
    said = " ".join(str(error).split())
    return (said[:1].lower() + said[1:])[:200].rstrip(".")
