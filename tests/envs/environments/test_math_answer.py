"""Is an answer right? Numbers at once, everything else by a child process that cannot be made to hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_envs.gsm8k import math_answer
from lachesis_envs.gsm8k.math_answer import MAX_LENGTH, MathVerifier, as_number, boxed, last_number


@pytest.fixture
async def verifier() -> AsyncIterator[MathVerifier]:
    made = MathVerifier()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{\boxed{5}}", "5"),
        ("42", None),
    ],
)
def test_the_last_box_counts_with_its_braces_balanced(text: str, content: str | None) -> None:
    assert boxed(text) == content


@given(st.text(alphabet="a1{}\\ "))
def test_a_box_with_balanced_braces_is_found_whole(text: str) -> None:
    depth, balanced = 0, True
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert boxed(f"x \\boxed{{{text}}} y") == text.strip()
    else:
        boxed(f"x \\boxed{{{text}}} y")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", 1234),
        ("1 234 567", 1234567),
        ("$5", 5),
        (r"\$5.50", Fraction(11, 2)),
        ("3/4", Fraction(3, 4)),
        ("0.75", Fraction(3, 4)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"50\%", 50),
        ("50%", 50),
        ("18.", 18),
        ("-3", -3),
        (r"18\text{ dollars}", 18),
        (r"1\,234", 1234),
        ("€1,000.5", Fraction(2001, 2)),
        ("1,2", None),
        ("1 2", None),
        (r"42\text{ or 43}", None),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-2 \dfrac{100}{3}\text{ cm}", Fraction(-106, 3)),
        (r"\frac{1}{0}", None),
        (r"-\$5", -5),
        (r"5\text{ h}30\text{ min}", None),
        ("1$50", None),
        ("2 1/2", None),
        ("1/0", None),
        ("x", None),
        ("", None),
        ("1e5", None),
        ("9" * 5000, None),
    ],
)
def test_a_number_is_read_as_people_write_it(text: str, number: Fraction | int | None) -> None:
    assert as_number(text) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_separators_do_not_change_a_number(whole: int, cents: int) -> None:
    assert as_number(f"{whole:,}") == whole
    assert last_number(f"that is {whole:,}.{cents:02} in all") == f"{whole}.{cents:02}"


@pytest.mark.parametrize(
    ("text", "number"),
    [("10-5", "5"), ("it is -5.", "-5"), ("so 3 and 1,234.", "1234"), ("none", None), ("1, 2", "2"), (".5", ".5")],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == number


async def test_a_percentage_is_its_number_and_no_share(verifier: MathVerifier) -> None:
    assert await verifier.equal("50%", "50")
    assert not await verifier.equal("0.5", "50")


async def test_what_is_no_plain_number_is_judged_as_mathematics(verifier: MathVerifier) -> None:
    assert await verifier.equal(r"\frac{\sqrt{4}}{4}", r"\frac12")
    assert await verifier.equal("x^2 + 2x + 1", "(x+1)^2")
    assert await verifier.equal("the same  words", "the same words")
    assert not await verifier.equal("x+1", "x+2")
    assert not await verifier.equal("", "5")
    assert not await verifier.equal("x" * (MAX_LENGTH + 1), "5")
    answers = [verifier.equal(f"x+{number}", f"{number}+x" if number % 2 else "y") for number in range(8)]
    assert await asyncio.gather(*answers) == [bool(number % 2) for number in range(8)], "each gets its own answer"


async def test_a_hostile_answer_is_wrong_within_bounds_and_the_next_question_works(verifier: MathVerifier) -> None:
    assert await verifier.equal("x+1", "1+x"), "its child has started"
    began = time.monotonic()
    assert not await verifier.equal("9^{9^{9^{9}}}", "x")
    assert time.monotonic() - began < 60
    assert await verifier.equal("x+1", "1+x")


async def test_a_question_that_is_given_up_does_not_answer_the_next(verifier: MathVerifier) -> None:
    """At every moment: while the child starts, too, when its first word is `ready` and not a result."""
    for delay in (0.05, 0.3):
        asked = asyncio.create_task(verifier.equal("x", "y+1"))
        await asyncio.sleep(delay)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert not await verifier.equal("x", "x+1")


async def test_no_child_is_left_after_close(verifier: MathVerifier) -> None:
    await verifier.equal("x+1", "1+x")
    assert verifier._child is not None
    pid = verifier._child.pid
    assert Path(f"/proc/{pid}").exists()
    await verifier.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_folder_of_the_same_name_where_the_user_stands_does_not_matter(
    tmp_path: Path, verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert await verifier.equal("x+1", "1+x")


async def test_texts_are_compared_where_math_verify_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = tmp_path / "math_child.py"
    child.write_text("import no_such_module\n")
    monkeypatch.setattr(math_answer, "_CHILD", child)
    verifier = MathVerifier()
    assert await verifier.equal("x = 42", "x=42")
    assert not await verifier.equal("x + 1", "1 + x")
    assert await verifier.equal("42.0", "42")
    assert sum("math-verify does not start" in record.message for record in caplog.records) == 1
    await verifier.close()
