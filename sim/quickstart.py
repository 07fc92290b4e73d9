"""From a fresh machine to a chat completion through the gateway of a simulated GPU server.

`scripts/quickstart` is the front; it finds a Python and runs this module.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from sim.machine import doctor, image, lifecycle, network, packages, pool, servers
from sim.machine.common import CHECKOUT, FAILED, REFUSED, Sim, SimError, read_json, run
from sim.machine.machine import ready

MACHINE, GROUP = "h100-sg-01", "h100-sg"
GATEWAY_PORT = 8080
LOGS = CHECKOUT / ".cache/log"
PLAYBOOK = [".venv/bin/ansible-playbook", "-i", "inventories/sim", "site.yml", "-l", GROUP]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STEPS = 6


def bold(text: str) -> str:
    """Return the text in bold where a person reads it on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def say(text: str = "") -> None:
    """Print a line now."""
    print(text, flush=True)


@contextlib.contextmanager
def step(number: int, text: str, *, own_lines: bool = False) -> Iterator[None]:
    """Print what is done, and the seconds that it took."""
    head = bold(f"[{number}/{STEPS}]") + f" {text} ..."
    print(head, end="\n" if own_lines else " ", flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say("" if own_lines else "failed")
        raise
    took = f"{time.monotonic() - started:.0f} s"
    say(f"{head} {took}" if own_lines else took)


def lacking() -> list[str]:
    """Return the packages that will be installed here."""
    names = packages.missing()
    if importlib.util.find_spec("ensurepip") is None:
        own = f"python{sys.version_info.major}.{sys.version_info.minor}"
        names.append("python3-venv" if os.path.realpath("/usr/bin/python3").endswith(own) else f"{own}-venv")
    return sorted(names)


def what_it_does(sim: Sim) -> list[str]:
    """Return, line by line, what happens to this machine."""
    names = lacking()
    forward = network.IP_FORWARD.read_text().strip()
    file = pool.pool_file(sim)
    size = file.stat().st_size if file.exists() else pool.pool_size(pool.disk_free(sim.state))
    return [
        f"install with apt: {' '.join(names)}" if names else "install no package, all that it needs are here",
        f"add the bridge {sim.bridge} with the address {sim.gateway}/{sim.subnet.prefixlen}",
        f"add one nftables table of its own, ip {sim.table}, which masquerades {sim.subnet}",
        "set net.ipv4.ip_forward from 0 to 1" if forward == "0" else "leave net.ipv4.ip_forward at 1, as it is",
        f"keep the simulated server in {sim.state}, a sparse file that may grow to {size / pool.GIB:.0f} GiB",
        "make .venv (Python packages) and .cache (downloads, logs) in this checkout",
    ]


def announce(sim: Sim) -> None:
    """Say what will happen."""
    say("This boots a simulated GPU server and makes it serve a language model. On this machine it will:")
    for line in what_it_does(sim):
        say(f"  - {line}")
    say("`./scripts/quickstart --down` takes it back, all but the packages, .venv and .cache.")
    say()


def refuse_if_unfit(sim: Sim) -> None:
    """Refuse before anything is changed."""
    doctor.refuse_if_unfit(sim)
    if not (CHECKOUT / "site.yml").exists():
        raise SimError(f"{CHECKOUT} has no site.yml", "run this from a whole checkout", REFUSED)


def play(log_name: str = "site.log") -> None:
    """Run site.yml on the simulated server, shown as it runs, and logged."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{CHECKOUT / '.venv/bin'}:{os.environ.get('PATH', os.defpath)}",
    }
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        environment["ANSIBLE_FORCE_COLOR"] = "1"
    LOGS.mkdir(parents=True, exist_ok=True)
    log_file = LOGS / log_name
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            PLAYBOOK,
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as ansible,
    ):
        for line in ansible.stdout or ():
            print(line, end="", flush=True)
            log.write(COLOURS.sub("", line))
    if ansible.returncode:
        raise SimError(
            f"ansible-playbook ended with {ansible.returncode}, its output is in {log_file.relative_to(CHECKOUT)}",
            f"go on with `./scripts/quickstart`, or only `{' '.join(PLAYBOOK)}`; look around with"
            f" `./scripts/gpusim ssh {MACHINE}`",
            FAILED,
        )


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = 60) -> Any:
    """Return the JSON that the gateway answers; it may need a moment after a boot."""
    data = None if body is None else json.dumps(body).encode()
    # The simulated server is next door: a proxy for the outside must not be asked for it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + seconds
    while True:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http, ours
        try:
            with opener.open(request, timeout=seconds) as answer:
                return json.load(answer)
        except (OSError, ValueError) as problem:
            refused = isinstance(problem, urllib.error.HTTPError) and problem.code < 500
            if refused or time.monotonic() > end:
                raise SimError(
                    f"the gateway does not answer {url} ({problem})",
                    f"look with `./scripts/gpusim ssh {MACHINE} -- journalctl -n 50`",
                    FAILED,
                ) from None
            time.sleep(1)


def chat(gateway: str) -> tuple[str, str, str]:
    """Return the model's name, a question, and the answer that came through the gateway."""
    models = ask(f"{gateway}/v1/models").get("data") or []
    if not models:
        raise SimError(f"{gateway}/v1/models names no model", f"run `{' '.join(PLAYBOOK)}` again", FAILED)
    model, question = str(models[0]["id"]), "Which GPU is this?"
    answer = ask(
        f"{gateway}/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 24,
        },
    )
    return model, question, str(answer["choices"][0]["message"]["content"])


def up(sim: Sim) -> None:
    """Do all the steps; each finds out by itself what is done already."""
    started = time.monotonic()
    with step(1, "Installing packages"):
        packages.install(lacking(), LOGS / "packages.log")
    with step(2, "Making the controller's environment"):
        run(["scripts/setup"], log=LOGS / "setup.log", env={**os.environ, "GPUREADY_PYTHON": sys.executable})
    with step(3, "Building the Debian image"), sim.lock():
        ready(sim)
        image.ensure(sim, servers.kind_of(MACHINE))
    with step(4, f"Booting {MACHINE}"):
        machine = lifecycle.up(sim, MACHINE)
    with step(5, f"Running {' '.join(PLAYBOOK)}", own_lines=True):
        play()
    gateway = f"http://{machine.address}:{GATEWAY_PORT}"
    with step(6, "Asking the model through the gateway"):
        model, question, answer = chat(gateway)
    say()
    say(f"{bold('Gateway')}   {gateway}/v1")
    say(f"{bold('Asked')}     {model}: {question}")
    say(f"{bold('Answered')}  {answer!r}")
    say("          (a tiny model with random weights: the path is real, the words are not)")
    say(f"{bold('Took')}      {time.monotonic() - started:.0f} s")
    say(f"{bold('Stop')}      ./scripts/quickstart --down")


def down(sim: Sim) -> None:
    """Take everything back, and say what was removed and what stays."""
    done = lifecycle.down(sim)
    for line in done or ["there was nothing to remove"]:
        say(line)
    if done:
        say("left here: the packages that apt installed, .venv and .cache in this checkout")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="./scripts/quickstart",
        description="Boot a simulated GPU server on this machine and make it serve a language model.",
    )
    parser.add_argument("--down", action="store_true", help="remove everything and restore the former settings")
    parser.add_argument("--check", action="store_true", help="only say what would happen to this machine")
    parser.add_argument("--yes", action="store_true", help="accepted for scripts; nothing is asked in any case")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; every problem ends as one sentence."""
    args = arguments(argv)
    try:
        sim = Sim.from_environment()
        if args.down and args.check:
            names = [file.stem for file in sorted((sim.state / "machines").glob("[a-z]*.json"))]
            former = read_json(sim.state / "network.json").get("ip_forward", "as it is")
            say(
                f"would remove: machines ({', '.join(names) or 'none'}), bridge {sim.bridge}, nftables table ip"
                f" {sim.table}, {sim.state}; net.ipv4.ip_forward: {former}"
            )
        elif args.down:
            down(sim)
        else:
            refuse_if_unfit(sim)
            announce(sim)
            if not args.check:
                up(sim)
    except SimError as problem:
        print(problem, file=sys.stderr)
        return problem.code
    except OSError as problem:
        print(f"this failed: {problem}.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(
            "interrupted; `./scripts/quickstart` goes on from here, with --down it takes everything back.",
            file=sys.stderr,
        )
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
