"""What the audit plays beside the reference: answers and calls that are made of the reference's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lachesis_console.auditing.forms import form_of
from lachesis_console.auditing.repeating import changed_calls, guesses, negative_amounts

PROMPT = "Answer with one JSON object with the keys sum and sure."


def turn(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"text": "", "calls": [{"name": name, "arguments": json.dumps(arguments)}]}


DONE = {"text": "Done.", "calls": []}


def test_objects_of_json_are_emptied_laid_out_anew_and_renamed() -> None:
    form = form_of('{"sum": 12, "sure": 0.9}')
    assert form is not None
    wrong = {name: json.loads(text) for name, text in form.wrong(PROMPT).items() if name.startswith("wrong: only ")}
    assert wrong["wrong: only zeros"] == {"sum": 0, "sure": 0} and len(wrong) == 3
    (layout,) = [text for name, text in form.equal(PROMPT).items() if "layout" in name]
    assert "\n" in layout and json.loads(layout) == {"sum": 12, "sure": 0.9}
    assert not any("layout" in name for name in form.equal(f"{PROMPT} Write it in one line."))
    assert form.renamed(PROMPT) == {}
    (renamed,) = form.renamed("Answer with an object that has the sum.").values()
    assert json.loads(renamed) == {"sum": 12, "the_sure": 0.9}


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (turn("buy", good="salt", amount=3), 1),
        (turn("buy", good="salt"), 0),
        (turn("buy", amount=True), 0),
        (turn("get_price", amount=3), 0),
        (turn("terminal", command="pytest", timeout=60), 0),
    ],
)
def test_amounts_of_calls_that_change_something_become_negative(call: dict[str, Any], count: int) -> None:
    found = negative_amounts([turn("look"), call, turn("sail"), DONE])
    assert len(found) == count
    for without, negative in found.values():
        assert without == [turn("look"), DONE]
        assert negative == [turn("look"), turn("buy", good="salt", amount=-300), DONE]


def test_wrong_submissions_are_around_the_right_one() -> None:
    turns = [turn("ask", about="hat"), turn("accuse", name="Rosa"), DONE]
    a, b = turn("accuse", name="Udo"), turn("accuse", name="Max")
    assert guesses(turns, ["Udo", "Rosa", "Max", "Udo"]) == [a, b, *turns[:2], a, DONE]
    assert guesses(turns, ["Rosa"]) is None and guesses([turn("ask", about="hat"), DONE], ["Udo"]) is None
    # What is only asked for may be garbage where a call says the answer.
    assert not any("garbage" in name for name in changed_calls(turns))
    assert any("garbage" in name for name in changed_calls([turn("write", text="a"), DONE]))
