# SPDX-License-Identifier: Apache-2.0
"""Documentation of the module `gpuready`; the action plugin of the same name does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuready
short_description: Runs one command of gpuready's server part on the server
description:
  - Carries gpuready.pyz to the server where it is not there yet, runs C(gpuready NOUN VERB) with the input on
    standard input, and returns what the command returns.
  - Ansible's check mode is the command's C(--check), its diff is Ansible's diff.
options:
  noun:
    description: The noun of the command, e.g. C(facts).
    type: str
    required: true
  verb:
    description: The verb of the command, e.g. C(show).
    type: str
    required: true
  arguments:
    description: Positional arguments of the verb.
    type: list
    elements: str
    default: []
  input:
    description: The input of the command, sent on standard input, never in argv.
    type: dict
    default: {}
author:
  - gpuready authors
"""

EXAMPLES = r"""
- name: Ask the server what it is
  gpuready:
    noun: facts
    verb: show
  register: __facts
"""

RETURN = r"""
summary:
  description: What the command did, in one sentence.
  type: str
  returned: always
data:
  description: What a reading verb was asked for.
  type: dict
  returned: always
failures:
  description: What is wrong, each with code, what, why and fix.
  type: list
  elements: dict
  returned: always
"""
