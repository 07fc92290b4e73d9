"""`gpuready completion`: what a shell needs to complete this command line, made from the same tables as its help."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping

from gpuready.cli.verb import Call, Verb
from gpuready.outcome import Result

_BASH = """\
_gpuready() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} choice=
    # bash takes a word apart at its colons.
    case "${COMP_WORDS[1]} ${COMP_WORDS[2]} $before" in
%(values)s
    *)
        case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
        "1 "*) choice=%(nouns)s ;;
%(verbs)s
%(options)s
        esac
        ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$choice" -- "$word")
}
complete -o default -F _gpuready gpuready
"""

_ZSH = """\
#compdef gpuready
_gpuready() {
    local -a choice
    case "${words[2]} ${words[3]} ${words[CURRENT-1]}" in
%(values)s
    *)
        case "$((CURRENT - 1)) ${words[2]} ${words[3]}" in
        "1 "*) choice=(%(nouns)s) ;;
%(verbs)s
%(options)s
        esac
        ;;
    esac
    if (( $#choice )); then
        _describe -V gpuready choice && return
    fi
    _files
}
compdef _gpuready gpuready
"""


def _tables() -> dict[str, Mapping[str, Verb]]:
    from gpuready.cli.main import NOUNS

    return {noun: importlib.import_module(f"gpuready.cli.{noun}").VERBS for noun in NOUNS}


def _flags(verb: Verb) -> dict[str, str]:
    """Return the options of a verb with what they mean."""
    found = {f"--{option.name}": option.help for option in verb.options}
    if verb.takes_input:
        found["--input"] = "read the input from a file"
    found["--json"] = "print the result as one JSON object"
    if verb.changes:
        found["--check"] = "say what would change, change nothing"
    return found


def script(shell: str) -> str:
    """Return what a shell, bash or zsh, is to read."""
    from gpuready.cli.main import NOUNS

    def listed(words: Mapping[str, str]) -> str:
        if shell == "bash":
            return shlex.quote(" ".join(words))
        return " ".join(shlex.quote(f"{word.replace(':', chr(92) + ':')}:{text}") for word, text in words.items())

    def line(pattern: str, words: Mapping[str, str]) -> str:
        chosen = listed(words) if shell == "bash" else f"({listed(words)})"
        return f"{pattern}) choice={chosen} ;;"

    values, verbs, options = [], [], []
    for noun, table in _tables().items():
        verbs.append("        " + line(f'"2 {noun} "*', {name: verb.help for name, verb in table.items()}))
        for name, verb in table.items():
            options.append("        " + line(f'*" {noun} {name}"', _flags(verb)))
            for option in verb.options:
                offered = option.choices or option.known
                if option.metavar:
                    known = dict.fromkeys(offered() if offered else (), option.metavar)
                    values.append("    " + line(f'"{noun} {name} --{option.name}"', known))
    form = _BASH if shell == "bash" else _ZSH
    return form % {
        "nouns": listed(NOUNS),
        "values": "\n".join(values),
        "verbs": "\n".join(verbs),
        "options": "\n".join(options),
    }


def _verb(shell: str, how: str) -> Verb:
    def run(_: Call) -> Result:
        text = script(shell)
        return Result(summary=f"completion for {shell}", page=text.rstrip("\n"), data={"script": text})

    return Verb(f"print the completion for {shell}: {how}", run)


VERBS = {
    "bash": _verb("bash", "source <(gpuready completion bash)"),
    "zsh": _verb("zsh", "source <(gpuready completion zsh), after compinit"),
}
