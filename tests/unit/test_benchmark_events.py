"""Server-sent events in pieces of any size, and what a chunk of a chat completion means."""

from __future__ import annotations

import json

import pytest

from gpuready.benchmark.events import (
    MAX_EVENT_BYTES,
    Chunk,
    EventReader,
    StreamProblem,
    Usage,
    error_sentence,
    read_chunk,
)

TEXT = ': keep-alive\n\ndata: {"a": "é€𝄞"}\n\nevent: x\nid: 3\ndata: one\ndata: two\n\ndata:[DONE]\n\n'
EVENTS = ['{"a": "é€𝄞"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_lines_and_letters_may_be_torn_anywhere(size: int, line_end: str) -> None:
    data = TEXT.replace("\n", line_end).encode()
    reader = EventReader()
    found = [event for start in range(0, len(data), size) for event in reader.feed(data[start : start + size])]
    assert found + reader.close() == EVENTS


def test_an_event_is_given_as_soon_as_it_is_complete() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n") == []
    assert reader.feed(b"\ndata: tw") == ["one"]
    assert reader.close() == ["tw"]
    assert reader.close() == []


def test_a_line_without_end_is_refused() -> None:
    reader = EventReader()
    assert reader.feed(b"x" * MAX_EVENT_BYTES) == []
    with pytest.raises(StreamProblem, match="longer than"):
        reader.feed(b"x")


def choice(**delta: object) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("data", "chunk"),
    [
        (choice(role="assistant", content=""), Chunk(has_choice=True)),
        (choice(role="assistant"), Chunk(has_choice=True)),
        (choice(content=None), Chunk(has_choice=True)),
        (choice(content="x"), Chunk(has_choice=True, has_text=True)),
        (choice(content="", reasoning_content="x"), Chunk(has_choice=True, has_text=True, is_reasoning=True)),
        (choice(reasoning="x"), Chunk(has_choice=True, has_text=True, is_reasoning=True)),
        ('{"choices": [{"delta": null, "finish_reason": "length"}]}', Chunk(has_choice=True, finish_reason="length")),
        ('{"choices": []}', Chunk()),
        ('{"choices": null}', Chunk()),
        ('{"choices": [3]}', Chunk()),
        ('{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 0}}', Chunk(usage=Usage(4, 0, None))),
        (
            '{"usage": {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}}',
            Chunk(usage=Usage(4, 2, 3)),
        ),
        # What is not a count is unknown.
        ('{"usage": {"prompt_tokens": "4", "completion_tokens": true}}', Chunk(usage=Usage(None, None, None))),
        ('{"usage": {"prompt_tokens": -1, "prompt_tokens_details": 7}}', Chunk(usage=Usage(None, None, None))),
        ('{"error": {"message": "EngineCore\\n died", "code": 500}}', Chunk(error="EngineCore died")),
    ],
)
def test_meaning_of_a_chunk(data: str, chunk: Chunk) -> None:
    assert read_chunk(data) == chunk


@pytest.mark.parametrize(("data", "text"), [("<html>", "not JSON: '<html>'"), ("[1]", "not a JSON object")])
def test_what_is_no_chunk_is_refused(data: str, text: str) -> None:
    with pytest.raises(StreamProblem, match=text):
        read_chunk(data)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ({"error": {"message": "no such model"}}, "no such model"),
        ({"error": "busy"}, "busy"),
        ({"detail": "Not Found"}, "{'detail': 'Not Found'}"),
        ("plain", "plain"),
    ],
)
def test_errors_of_all_forms_give_a_sentence(page: object, text: str) -> None:
    assert error_sentence(page) == text
