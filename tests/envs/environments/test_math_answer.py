"""Is an answer right? Numbers at once, everything else by a child process that cannot be made to hang."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_envs.gsm8k import math_answer
from lachesis_envs.gsm8k.environment import final_answer
from lachesis_envs.gsm8k.math_answer import (
    MAX_LENGTH,
    MathVerifier,
    as_number,
    boxed,
    last_number,
    without_separators,
)


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
        (r"\boxed{ \boxed {5} }", "5"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"),
        (r"\boxed{1} \boxed{\boxed{2}", "2"),
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
        ("2 1/2", Fraction(5, 2)),
        ("1/0", None),
        ("x", None),
        ("", None),
        ("1e5", 100000),
        ("1e500", None),
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


RIGHT = {
    "18": r"""
        18.0  18.  18.000  +18  018  １８  \$18  $18$  £18  18 €  18¢  18%  18\%  18°  18^\circ  (18)
        18^{\circ}  \(18\)  \{18\}  \text{18}  \textbf{18}  \mathbf{18}  18\\  \quad 18  18\;  \boxed{18}
        18 \text{ dollars}  18\,\text{USD}  \text{USD } 18  18\text{ km}^2  18\text{ m}^{3}  18 \text{ km²}
        18\ \mathrm{km/h}  18 \mathrm{~cm}  18~\text{m}  18 dollars  \text{18 dollars}
        18 \text{ square units}  18 \text{ more apples}  18 \text{ times as many}
        18 \text{ left over}  \$18.00 \text{ per day}  1.8e1  1.8 \times 10^1  10+8
        \frac{36}{2}  \dfrac{36}{2}  \frac{36}2  36/2  \sqrt{324}  3!\cdot 3  2 \cdot 3^2  \left(18\right)
        \binom{18}{1}  \log_2 262144  \lfloor 18.5 \rfloor  |-18|  \left|-18\right|  |3-21|
        36 \cdot 50\%  \$\frac{36}{2}
        x = 3 \cdot 6 = 18  x = \frac{36}{2} = 18  m + n = 10 + 8 = 18  x+y = 18  f^{-1}(2) = 18  18 kg  18 cm
        x=18  x = 18  = 18  3 \cdot 6 = 18  a_{10} = 18  f(3) = 18  AB = 18
        \angle ABC = 18^\circ  x \approx 18  \approx 18  $x=18$
    """,
    "-5": "\u20135  \u22125  - 5  -\\$5  x = \u22125",
    "3.5": r"3 1/2  3½  3\frac{1}{2}  \frac72  7/2  3 \dfrac12",
    "0.5": r"½  1/2  .5  \frac{1}{2}  5e-1",
    "-18": r"-\frac{36}{2}  \frac{-36}{2}",
    r"2\pi": r"2\pi \approx 6.28  C = 2\pi",
    "10000": r"10,\!000  10,000",
    "1234": "1,234  1{,}234  1\\,234  1 234  1\u202f234  1\u00a0234  1'234  1234\u200b  1,234.00",
    "18000": r"18 \text{ thousand}  18 thousand dollars  18{,}000",
    "24": r"2 \text{ dozen}  2 dozen  24",
    "50%": r"50  50\%",
    "yes": r"Yes  \text{yes}  \textbf{Yes.}",
    "New York": r"new york  \text{New York}",
    "A": r"\text{A}  (A)  \text{(A)}",
    "(3, 4)": "(3,4)  x = (3,4)  \\left(3, 4\\right)",
    r"\{1, 2\}": r"\{2,1\}  \{1,2\}",
    "[0,1]": "[0, 1]",
    "x=4": "4  x = 4",
    "2x+1": "1+2x  y = 2x+1",
    "10:30": "10:30",
    r"\frac{\sqrt{3}}{2}": r"\frac12\sqrt3  \sqrt{3}/2",
}
WRONG = {
    "18": r"""
        19  180  1.8  0.18  -18  18.004  18.0000001  17.9999999  18!  18!!  18x  18k  18 M  18\text{k}  18_{16}
        18, 19  17,18  18 or 19  17\text{ or }18  \text{17 or 18}  17 and 18  17 \text{ to } 18  17;18  (17, 18)
        17-18  17--18  17|18  17 \; | \; 18  |17|18|  17/18  17 18  1 8  1,8  {1}8  1{8}  1\text{ }8
        1$8  18°18  1\%8  17 \vee 18  17 \lor 18  17 \cup 18  17 \\ 18  16\\17\\18  17 \quad 18  17 \to 18
        \{17,18\}  \{17\} \cup \{18\}  [17,19]  17 \pm 1  \pm 18  18 \pm 0  x \in \{17, 18\}
        17 < 18  x < 18  x \le 18  >18  x \neq 18  x \ne 18  x != 18  17=18  18=17  1=2=3=18  x=17=18  18=2=3=4
        x=17, y=18  x=17 \text{ or } x=18  2x = 18  -x = 18  x^2 = 18  \sqrt{x} = 18  3 \cdot 5 = 18  18 =
        17 \approx 18  \text{17 or } x = 18  $1$ $2$ $3$ $18$  \$17 $18$  $17$, $18$  \$17 \$18  \$ 17 $ 18
        \text{\$17}, $18$  \boxed{17}\boxed{18}  18 \text{ thousand}  18 million  18 \text{ hundred}  18\text{ M}
        \text{not } 18  not 18  \text{negative }18  \text{half of } 18  \text{at least } 18
        18 \text{ or more}  18 \text{ and a half}  18 dollars and nineteen cents  18 \text{ tenths}
        18 \text{ dollars } 50 \text{ cents}  18 \text{ out of } 20  18 \text{ squared}  \frac{1}{2} \text{ and } 36
        18:1  18:00  \frac{18}{0}  \frac{18}{100}  \infty  x  ?  eighteen  18 \ldots  \mathbf{18}^2  18 \% 19
        \begin{cases}18\end{cases}  12_{16}  0x12  18.0.0  \text{The answer is }17\text{, not }18
    """,
    "-18": "|3-21|  18",
    "-1": "17\u201318",
    "2": r"2 \text{ dozen}  2 dozen  2 \text{ thousand}",
    "3.5": "31/2  3 2/1  3 5",
    "3": r"\$1$ $2$ $3$  3:1",
    "1": "1e400  1e-400  [0,1]",
    "0.0000001": "0",
    "0.75": "3:4",
    "1/3": "10:30  0.333",
    "50%": r"0.5  \frac{1}{2}",
    "10:30": "1/3  9:27",
    "1:00": "2:00",
    "on": "no  o n  n \\cdot o",
    "Monday": "dayMon  Mondya",
    "None": "No",
    "A": "B  AA",
    "(3,4)": "34  (34)  (4,3)",
    "1,2": "12  1.2",
    r"\{1,2\}": "12  \\{12\\}  (1,3)",
    "[0,1]": "[01]  1  (0,1)",
    "x=4": "3=4  y=4  x=3  x^2=16",
    r"\sqrt3": r"\sqrt2 \vee \sqrt3  \sqrt2 \text{ or } \sqrt3  $\sqrt2$ $\sqrt3$  3",
    "x+2": r"x+1 \text{ or } x+2  $x+1$ $x+2$  x+1 \; | \; x+2",
}


def forms(text: str) -> list[str]:
    """Of a table, where two spaces or more are between them."""
    return [form for form in re.split(r" {2,}|\n", text) if form.strip()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("table", "earns"), [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
async def test_the_forms_in_which_people_and_models_write_answers(
    table: dict[str, str], earns: bool, verifier: MathVerifier
) -> None:
    assert sum(map(len, map(forms, table.values()))) > 100
    for truth, texts in table.items():
        for form in forms(texts):
            answer = final_answer(rf"so \boxed{{{form}}}.")
            assert (answer is not None and await verifier.equal(answer, truth)) is earns, (form, truth)


@given(st.text(alphabet="123,. \\{}()|=-+/$xt"), st.integers(0, 99))
def test_no_text_stops_the_reader(text: str, number: int) -> None:
    as_number(boxed(rf"\boxed{{{text}}}") or text)
    assert without_separators(f"{number},000") == f"{number}000" or not number
    assert without_separators(f"({number},000)") == f"({number},000)"


def test_long_and_deep_texts_are_read_in_no_time() -> None:
    began = time.thread_time()
    for text in ("\\boxed{" * 50_000, "\\boxed{" * 50_000 + "}" * 50_000, "\\boxed" + " " * 200_000, "{" * 200_000):
        boxed(text)
    for text in ("1 " * 150, " " * 300, "a " * 149 + "!", "1" * 300, "$" * 300, "\\text{" * 50, "1" + " ab" * 99 + "!"):
        as_number(text)
        math_answer._contradicts(text, Fraction(1))
        math_answer._words(text)
    assert time.thread_time() - began < 30, "what takes quadratic time takes minutes"


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
