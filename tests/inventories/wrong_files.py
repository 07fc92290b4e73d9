"""Files that Ansible would stumble over, or read otherwise than meant: each is an inventory of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import yaml
from tests.inventories.case import DECLARED, WORKLOAD, Case, as_yaml

HOSTS = b"all:\n  children:\n    h100-sg:\n      hosts:\n        h100-sg-01:\n          ansible_host: 192.0.2.11\n"
VARIABLES = "group_vars/h100-sg.yml"
GOOD = {"hosts.yml": HOSTS, VARIABLES: as_yaml(DECLARED).encode()}
VAULT = "$ANSIBLE_VAULT;1.1;AES256\n" + "\n".join(["3" * 80] * 3)


def file(kind: str, line: int, *says: str, **changes: bytes | None) -> Case:
    """Return an inventory in which files are changed; `VARIABLES` and `HOSTS_YML` name the two of the good one."""
    names = {"variables": VARIABLES, "hosts": "hosts.yml"}
    files = {**GOOD, **{names.get(name, name): content for name, content in changes.items() if content is not None}}
    named = next(iter(names.get(name, name) for name in changes))
    return Case(kind, f"{named}:{line}" if line else named, says, files=files)


def appended(kind: str, text: str, *says: str, line: int = 0) -> Case:
    """Return an inventory whose file of variables ends with more text; its first line is meant, or another."""
    good = as_yaml(DECLARED)
    return file(kind, good.count("\n") + 1 + line, *says, variables=(good + text).encode())


def broken(_: random.Random) -> Iterator[Case]:
    """Yield files that are no YAML."""
    for text in ("gpuready_replan: [1, 2\n", "gpuready_replan: {a: 1\n", 'gpuready_replan: "yes\n'):
        yield appended("a bracket or quote that nobody closes", text, "this is no YAML", line=1)
    yield appended("a wrong indentation", " gpuready_replan: true\n", "this is no YAML")
    yield appended("a wrong indentation", "a:\n   - b\n  - c\n", "this is no YAML", line=2)
    yield appended("a tab", "a:\n\tb: 1\n", "this is no YAML", "not with tabs", line=1)
    yield appended(
        "a template without quotes", "gpuready_replan: {{ x }} y\n", "this is no YAML", "quote the whole value"
    )
    yield appended("a template without quotes", "gpuready_replan: {{ x }}\n", "where a key has to be", "quote a value")
    yield appended("an alias of nothing", "gpuready_replan: *nowhere\n", "this is no YAML", "undefined alias")
    yield appended("two documents in a file", "---\na: 1\n", "this is no YAML")
    yield appended("two colons", "gpuready_replan: a: b\n", "this is no YAML")
    yield appended("a raw control character", "a: b\x1b[2Jc\n", "this is no YAML", "remove the character")
    yield appended("a raw control character", "a: b\x00c\n", "this is no YAML")
    yield file("another encoding", 1, "is no UTF-8", variables=as_yaml(DECLARED).encode("utf-16"))
    latin = as_yaml(DECLARED).encode() + "note: Z\u00fcrich\n".encode("latin-1")
    yield file("another encoding", latin.count(b"\n"), "byte 0xfc is no UTF-8", variables=latin)
    yield file("another encoding", 1, "is no UTF-8", hosts=HOSTS.decode().encode("utf-16"))
    yield file("a list for variables", 1, "the file is a list", variables=b"- gpuready_stack: cu128\n")
    yield file("a text for variables", 1, "the file is a single value", variables=b"gpuready_stack cu128\n")
    yield file("an empty inventory", 1, "the file is empty", hosts=b"# nothing yet\n")


def misread(_: random.Random) -> Iterator[Case]:
    """Yield files that are YAML, and are read otherwise than meant."""
    yield appended("a variable twice", "gpuready_stack: cpu\n", "gpuready_stack stands twice, first in line 4")
    twice = as_yaml(DECLARED).replace("  engine: vllm\n", "  engine: vllm\n  engine: sglang\n")
    yield file("a key twice", 10, "engine stands twice, first in line 9", variables=twice.encode())
    hosts_twice = HOSTS + b"        h100-sg-01: {}\n"
    yield file("a host twice", 7, "h100-sg-01 stands twice, first in line 5", hosts=hosts_twice)
    for spelling, number in (("010", 8), ("0x10", 16), ("1_0", 10), ("22:30", 1350), ("0b11", 3)):
        text = as_yaml(DECLARED).replace("gpuready_gpu_count: 8", f"gpuready_gpu_count: {spelling}")
        says = (f"reads {spelling} as another spelling", f"write {number} if that is meant")
        yield file("another spelling of a number", 3, "gpuready_gpu_count: YAML", *says, variables=text.encode())
    for digits in ("9" * 5001, "0x" + "f" * 5000, "1" + "0" * 4400):
        text = as_yaml(DECLARED).replace("gpuready_gpu_count: 8", f"gpuready_gpu_count: {digits}")
        yield file("a number of thousands of digits", 3, "digits", variables=text.encode())
    yield appended("an alias within itself", "loop: &loop\n  - *loop\n", "stands inside of what it names")
    yield appended("an alias within itself", "loop: &loop {a: {b: *loop}}\n", "stands inside of what it names")
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    yield appended("aliases of aliases of aliases", laughs, "more than 200000 values", line=5)
    for tag in ("!!binary aGk=", "!!set {a}", "!!python/object:os.system x", "!secret x", "!!omap [a: 1]", "!ENV x"):
        yield appended("an unknown tag", f"note: {tag}\n", "the tag ", tag.split()[0], "is not known here")
    for key in ("1", "true", "null", "2.5", "gpuready-stack", "gpur\u0435ady_replan", "a b", "\uff47puready"):
        yield appended("no name of a variable", f"{key}: x\n", "is no name of a variable")
    yield appended("a list for a key", "? [a, b]\n: x\n", "a list or mapping stands where a key has to be")
    sealed = "gpuready_replan: !vault |\n" + "".join(f"  {line}\n" for line in VAULT.splitlines())
    yield appended(
        "a text of a vault that cannot be opened", sealed, "gpuready_replan cannot be decrypted", "--ask-vault-pass"
    )
    yield file("a file of a vault that cannot be opened", 0, "cannot be decrypted", variables=VAULT.encode())


def unread(_: random.Random) -> Iterator[Case]:
    """Yield files and keys that Ansible passes over."""
    more = {
        "group_vars/h100sg.yml": (
            "a file of a group that there is not",
            "no group is named 'h100sg'",
            "did you mean h100-sg?",
        ),
        "group_vars/berlin.yml": ("a file of a group that there is not", "no group is named 'berlin'", "known are"),
        "host_vars/h100-sg-02.yml": (
            "a file of a host that there is not",
            "no host is named",
            "did you mean h100-sg-01?",
        ),
        "group_vars/h100-sg.yaml": ("two files of one group", "nobody reads this file beside", "end it with .yml"),
        "group_vars/h100-sg.txt": ("a file of another ending", "nobody reads this file beside", "end it with .yml"),
        "group_vars/h100-se/a.yml": (
            "a folder of a group that there is not",
            "no group is named 'h100-se'",
            "h100-sg?",
        ),
    }
    for name, (kind, *says) in more.items():
        yield Case(kind, name, tuple(says), files={**GOOD, name: b"gpuready_replan: true\n"})
    for name, fix in (
        ("host", "did you mean hosts?"),
        ("child", "did you mean children?"),
        ("variables", "did you mean vars?"),
        ("xyzzy", "known are hosts"),
    ):
        text = f"all:\n  {name}:\n    h100-sg-01: {{}}\n".encode()
        yield file("an unknown key of a group", 2, f"no key {name}", fix, hosts=text)
    for text in (b"all:\n  hosts: [a, b]\n", b"all:\n  hosts: a\n", b"all:\n  vars: [1]\n", b"all:\n  children: x\n"):
        yield file("no mapping in a group", 2, "of the group all is", "as a key of its own", hosts=text)
    yield file("no mapping for a group", 1, "the group all is", "hosts, children, vars", hosts=b"all: x\n")
    yield file(
        "no mapping for a host", 3, "host h1 is", "a mapping of variables", hosts=b"all:\n  hosts:\n    h1: 192.0.2.1\n"
    )
    yield file("a list for an inventory", 1, "begins with the name of a group", hosts=b"- all\n")
    for name in ("'-h1'", "'h1;reboot'", "'a b'", "'h\\u0430'", '"h\\e[2J"', "'.h1'", "h1/../h2", f"'{'h' * 300}'"):
        yield file("no name of a host", 3, "is no name of a host", hosts=f"all:\n  hosts:\n    {name}: {{}}\n".encode())
    for name in ("5", "true", "1.5"):
        yield file(
            "no text for the name of a host",
            3,
            "is no text",
            "quote",
            hosts=f"all:\n  hosts:\n    {name}: {{}}\n".encode(),
        )
    for name in ("'a b'", "'../x'", "-x"):
        yield file("no name of a group", 1, "is no name of a group", hosts=f"{name}: {{}}\n".encode())


def connections(_: random.Random) -> Iterator[Case]:
    """Yield connection variables that are malformed: Ansible reads them before any task of ours."""
    malformed: dict[str, list[object]] = {
        "ansible_host": ["a b", "-oProxyCommand=x", "h;reboot", 5, ["h"], None, "", "\u0430.example"],
        "ansible_port": ["22x", 0, 65536, "ssh", True, [22], None],
        "ansible_user": ["a b", "-l root", "root;id", 5, None],
        "ansible_become": ["maybe", 2, None],
        "ansible_connection": ["foo", "SSH", None],
        "ansible_python_interpreter": ["python3", "/usr/bin/python 3", 3],
        "ansible_ssh_common_args": [["-o"], "a\nb", 5],
    }
    for name, values in malformed.items():
        for value in values:
            shown = "null" if value is None else "true" if value is True else ""
            yield _connection("a malformed", name, value, "host h1, ", f"{name} = {shown}", "is refused: allowed ")
    for name, meant in (
        ("ansible_hsot", "ansible_host"),
        ("ansible_prot", "ansible_port"),
        ("ansible_becom", "ansible_become"),
    ):
        yield _connection("a misspelled", name, 1, "host h1, ", f"{name}: no such variable", f"did you mean {meant}?")
    yield appended("a malformed connection variable", "ansible_port: 99999\n", "ansible_port = 99999 is refused")
    yield _connection("a malformed", "ansible_become_password", ["hunter2"], "ansible_become_password is refused")


def _connection(kind: str, name: str, value: object, *says: str) -> Case:
    hosts = {"all": {"hosts": {"h1": {name: value}}}}
    return Case(f"{kind} connection variable", "hosts.yml:5", says, files={"hosts.yml": as_yaml(hosts).encode()})


def anchors(_: random.Random) -> Iterator[Case]:
    """Yield anchors and merge keys that bring something wrong to a host; these are said with the anchor's own line."""
    text = as_yaml({**DECLARED, "gpuready_deployments": "THE-PLACE"})
    merged = "load: &load\n  xyzzy: 1\n" + text.replace("---\n", "").replace(
        "THE-PLACE",
        "\n- name: chat\n  model: m\n  model_path: /data/llama\n  engine: vllm\n  gpus: 1\n  workload:\n    <<: *load\n"
        + "".join(f"    {line}\n" for line in yaml.safe_dump(WORKLOAD).splitlines()),
    )
    yield Case(
        "a merge key that brings an unknown key",
        "gpuready_deployments[0].workload.xyzzy",
        (".yml:2, ", "no such key"),
        merged,
    )
    aliased = "eight: &eight 'eight'\n" + text.replace("---\n", "").replace("THE-PLACE", "[]").replace(
        "gpuready_gpu_count: 8", "gpuready_gpu_count: *eight"
    )
    yield Case("an alias of a wrong value", "gpuready_gpu_count", ("'eight'", "whole number"), aliased)
