"""The table at the end of a run."""

from __future__ import annotations

from gpuready.rendering.summary import GO_ON, Row, Summary, problem_of, render, table_rows

REFUSED = {
    "msg": "host a, gpuready_gpu_count = 9 is refused: no; set 8.\nhost a, x: no such key; did you mean y?",
    "failures": [
        {"code": "c", "what": "host a, gpuready_gpu_count = 9 is refused", "why": "no", "fix": "set 8"},
        {"code": "d", "what": "host a, x: no such key", "why": "", "fix": "did you mean y?"},
    ],
}


def test_a_row_counts_the_stage_and_names_problem_and_next_step() -> None:
    summary = Summary()
    summary.ended("a", "Base", 1.25, {"changed": True})
    summary.ended("a", "Base", 0.5, {"changed": False})
    summary.failed("a", "CUDA", 2.0, {"msg": "nvcc is gone.", "failures": []})
    base, cuda = summary.rows.values()
    assert (base.changed, base.tasks, base.seconds, base.problem) == (1, 2, 1.75, "")
    assert (cuda.problem, cuda.next_step) == ("nvcc is gone.", GO_ON)


def test_of_several_refusals_the_first_is_named_and_the_others_are_counted() -> None:
    problem, next_step = problem_of(REFUSED)
    assert problem == "host a, gpuready_gpu_count = 9 is refused: no (and 1 more, above)"
    assert next_step == "set 8"


def test_a_task_without_a_word_still_has_a_problem() -> None:
    assert problem_of({}) == ("failed without a word", GO_ON)


def test_a_sentence_without_parts_ends_with_what_to_do() -> None:
    said = "Task failed: host a (10.0.0.9) cannot be reached: no route; start it, or leave it out with --limit."
    problem, next_step = problem_of({"msg": said})
    assert problem == "host a (10.0.0.9) cannot be reached: no route"
    assert next_step == "start it, or leave it out with --limit"


def test_of_a_loop_the_item_that_failed_speaks_and_of_an_include_its_reason() -> None:
    loop = {"msg": "One or more items failed", "results": [{"msg": "fine"}, {"msg": "no space left", "failed": True}]}
    assert problem_of(loop) == ("no space left", GO_ON)
    assert problem_of({"reason": "Could not find the file"}) == ("Could not find the file", GO_ON)


def test_a_problem_that_the_play_dealt_with_is_none() -> None:
    summary = Summary()
    summary.failed("a", "Base", 1.0, {"msg": "the new rules shut us out"})
    summary.recovered("a", "Base")
    assert summary.row("a", "Base").problem == ""


def test_off_a_terminal_no_line_is_broken_long_cells_are_cut_and_there_is_no_colour() -> None:
    summary = Summary()
    text = " ".join(["word"] * 200)
    summary.failed("a", "Base", 1.0, {"msg": text})
    shown = render(summary, None, colour=False)
    assert f"{text[:159]}\u2026" in shown
    assert text not in shown
    assert summary.row("a", "Base").problem == text, "machines get it whole"
    assert "\x1b" not in shown


def test_brackets_in_a_problem_are_not_taken_for_mark_up() -> None:
    summary = Summary()
    summary.failed("a", "Base", 1.0, {"msg": "gpuready_deployments[0].flags [red] is refused"})
    assert "gpuready_deployments[0].flags [red] is refused" in render(summary, None, colour=True)


def test_check_mode_has_a_column_for_what_is_unknown() -> None:
    summary = Summary(check=True)
    summary.ended("a", "CUDA", 1.0, {"changed": True, "undecided": ["whether nvcc compiles", "whether it loads"]})
    head, _, line = render(summary, None, colour=False).splitlines()
    assert head.split() == ["host", "stage", "would", "change", "unknown", "seconds", "problem", "next", "step"]
    assert line.split() == ["a", "CUDA", "1", "2", "1.0", "-", "-"]


def test_what_changed_is_to_be_proved_next() -> None:
    summary = Summary()
    summary.ended("a", "Base", 1.0, {"changed": True})
    assert summary.next_command() == "ansible-playbook playbooks/verify.yml"
    summary.ended("b", "Base", 1.0, {"changed": False})
    summary.ended("c", "Base", 1.0, {"changed": True})
    summary.failed("c", "CUDA", 1.0, REFUSED)
    assert summary.next_command() == "ansible-playbook playbooks/verify.yml -l a"
    summary.check = True
    assert summary.next_command() == ""


def test_a_problem_shows_no_credentials_and_nothing_that_a_terminal_acts_on() -> None:
    failure = {"code": "c", "what": "http://me:secret@proxy refuses \x1b[2J", "why": "", "fix": "ask http://a:b@c"}
    problem, next_step = problem_of({"msg": "", "failures": [failure]})
    assert "secret" not in problem
    assert "\x1b" not in problem
    assert next_step == "ask http://***@c"


def fleet(count: int) -> Summary:
    summary = Summary()
    for number in range(count):
        for stage in ("Preflight", "Base", "Gateway"):
            summary.ended(f"gpu-{number:03d}", stage, 1.0, {})
    return summary


def test_few_hosts_have_a_row_per_stage_and_more_have_one_each() -> None:
    assert len(table_rows(fleet(4).rows.values())) == 12
    rows = table_rows(fleet(5).rows.values())
    assert [row.host for row in rows] == [f"gpu-{number:03d}" for number in range(5)]
    assert {row.stage for row in rows} == {"all 3"}
    assert {row.seconds for row in rows} == {3.0}


def test_of_two_hundred_hosts_those_with_news_stand_alone() -> None:
    summary = fleet(200)
    summary.failed("gpu-007", "Base", 1.0, REFUSED)
    summary.ended("gpu-150", "Base", 1.0, {"changed": True})
    rows = table_rows(summary.rows.values())
    assert [row.host for row in rows] == ["gpu-007", "gpu-150", "198 others"]
    assert rows[0] == Row("gpu-007", "Base", 0, 0, 4, 4.0, *problem_of(REFUSED))
