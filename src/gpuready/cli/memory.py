"""`gpuready memory ...`: what became of GPU and host memory."""

from __future__ import annotations

from gpuready.cli.reading import called, log_of
from gpuready.cli.verb import Call, Option, Verb
from gpuready.memory import lines
from gpuready.operations import memory
from gpuready.outcome import Failure, Refusal, Result
from gpuready.serving.layout import Layout


def _diagnose(call: Call) -> Result:
    replica, log = "".join(call.arguments), call.options["log"]
    if bool(replica) == (log is not None):
        what = "gpuready memory diagnose wants either a replica or a log"
        raise Refusal(Failure("command.line", what, "", "give a replica, e.g. chat.0, or --log FILE (- for stdin)"))
    return memory.of_replica(Layout(), replica) if replica else memory.of_text(log_of(log, lines.LONGEST), called(log))


VERBS = {
    "diagnose": Verb(
        "say which kind of out-of-memory it was, and the one flag that cures it",
        _diagnose,
        optional_argument="replica",
        options=[Option("log", "an engine's log, from anywhere; - is standard input", "FILE")],
        more=(
            "Of a replica it reads the journal of its last start, the kernel's log, NVML and the plan.\n"
            "It ends with 0 whether it was a lack of memory or not; --json says which in data.diagnosis.\n\n"
            "examples:\n  gpuready memory diagnose chat.0\n  journalctl -u vllm | gpuready memory diagnose --log -"
        ),
    ),
}
