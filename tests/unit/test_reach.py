"""What is said of a host that cannot be reached."""

from __future__ import annotations

import pytest

from gpuready.spec.reach import unreachable

WRAPPED = (
    'Data could not be sent to remote host "10.0.0.9". Make sure this host can be reached over ssh: '
    "ssh: connect to host 10.0.0.9 port 22: No route to host"
)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            WRAPPED,
            "host a (10.0.0.9) cannot be reached: ssh: connect to host 10.0.0.9 port 22: No route to host; "
            "start it, or leave it out with --limit.",
        ),
        (
            'Data could not be sent to remote host "10.0.0.9". Make sure this host can be reached over ssh: ',
            "host a (10.0.0.9) cannot be reached: the connection broke; start it, or leave it out with --limit.",
        ),
        (
            "Warning: something\nops@10.0.0.9: Permission denied (publickey).\n",
            "host a (10.0.0.9) cannot be reached: ops@10.0.0.9: Permission denied (publickey); "
            "check ansible_user and its key.",
        ),
        (
            "Host key verification failed.",
            "host a (10.0.0.9) cannot be reached: Host key verification failed; "
            "check its host key and add it to known_hosts (ssh to it once by hand).",
        ),
    ],
)
def test_the_last_word_of_ssh_with_what_to_do(said: str, sentence: str) -> None:
    assert unreachable("a", "10.0.0.9", said) == sentence
