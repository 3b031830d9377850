"""Edits change exactly the intended text, or nothing."""

from __future__ import annotations

import difflib
import random
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lachesis_tools.edits import EditError, apply_hunks, parse_patch, replace_text, unified_diff


def as_v4a(old: list[str], new: list[str], context: int, header: str) -> str:
    """A V4A patch made by difflib. `header` is 'line' (unified headers) or 'plain' (a bare @@)."""
    body = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        first, last = group[0], group[-1]
        removed, added = last[2] - first[1], last[4] - first[3]
        span = f" -{first[1] + 1 if removed else first[1]},{removed} +{first[3] + 1},{added} @@"
        body.append("@@" + (span if header == "line" else ""))
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                body += [" " + line for line in old[i1:i2]]
            else:
                body += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
    return "\n".join(["*** Begin Patch", "*** Update File: f", *body, "*** End Patch"])


def apply(text: str, patch: str) -> str:
    (operation,) = parse_patch(patch)
    return apply_hunks(text, operation.hunks, operation.path)


def edited(lines: list[str], seed: int, alphabet: list[str]) -> list[str]:
    chance = random.Random(seed)
    result = list(lines)
    for _ in range(chance.randint(1, 5)):
        at = chance.randint(0, len(result))
        match chance.choice("iddr"):
            case "i":
                result.insert(at, chance.choice(alphabet))
            case "d" if at < len(result):
                del result[at]
            case "r" if at < len(result):
                result[at] = chance.choice(alphabet)
    return result


LINES = ["", "a", "b", "    a", "\ta", "-a", "+b", "*** b", "@@ c", "d  ", "é"]


@example([""], 2, 1)
@example([""], 200, 1)
@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=30), st.integers(), st.integers(0, 3))
def test_a_patch_with_line_numbers_gives_the_target_even_where_lines_repeat(
    old: list[str], seed: int, context: int
) -> None:
    new = edited(old, seed, LINES)
    if new and new != old:
        text = "\n".join(old) + "\n"
        assert apply(text, as_v4a(old, new, context, "line")) == "\n".join(new) + "\n"


@given(st.integers(1, 40), st.integers(), st.integers(1, 3))
def test_a_patch_with_unique_context_gives_the_target(size: int, seed: int, context: int) -> None:
    old = [f"line {number}" for number in range(size)]
    new = edited(old, seed, [f"new {number}" for number in range(99)])
    if new and new != old:
        assert apply("\n".join(old) + "\n", as_v4a(old, new, context, "plain")) == "\n".join(new) + "\n"


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=12), st.integers(), st.integers(0, 3))
def test_a_patch_without_line_numbers_gives_the_target_or_an_error_never_a_guess(
    old: list[str], seed: int, context: int
) -> None:
    new = edited(old, seed, ["a", "b"])
    patch = as_v4a(old, new, context, "plain")
    # An insertion without context is defined to go to the end.
    if not new or new == old or "\n@@\n+" in patch:
        return
    try:
        result = apply("\n".join(old) + "\n", patch)
    except EditError as error:
        assert "places" in str(error) or "nowhere" in str(error)
    else:
        assert result == "\n".join(new) + "\n"


def patch_of(*body: str) -> str:
    return "\n".join(["*** Begin Patch", *body, "*** End Patch"])


TEXT = "class A:\n    def f(self):\n        return 1\n\nclass B:\n    def f(self):\n        return 1\n"


def test_an_anchor_chooses_between_equal_places() -> None:
    changed = ["-        return 1", "+        return 2"]
    with pytest.raises(EditError, match=r"fits 2 places, at lines 3, 7; add lines of context"):
        apply(TEXT, patch_of("*** Update File: f", *changed))
    second = TEXT[::-1].replace("1 nruter", "2 nruter", 1)[::-1]
    assert apply(TEXT, patch_of("*** Update File: f", "@@ class B:", *changed)) == second
    assert apply(TEXT, patch_of("*** Update File: f", "@@ class B:", "@@     def f(self):", *changed)) == second
    assert apply(TEXT, patch_of("*** Update File: f", "@@ class B:", " class B:", "+    x = 0")) == TEXT.replace(
        "class B:\n", "class B:\n    x = 0\n"
    )


def test_changes_go_downwards() -> None:
    both = [
        "@@ class A:",
        "-        return 1",
        "+        return 2",
        "@@ class B:",
        "-        return 1",
        "+        return 3",
    ]
    assert apply(TEXT, patch_of("*** Update File: f", *both)).count("return 1") == 0
    with pytest.raises(EditError, match="change 2 of 2: there is no line 'class A:' from line 8 on"):
        apply(TEXT, patch_of("*** Update File: f", *both[3:], *both[:3]))


def test_only_new_lines_go_below_the_anchor_or_to_the_end() -> None:
    assert apply("a\nb\n", patch_of("*** Update File: f", "@@ a", "+x")) == "a\nx\nb\n"
    assert apply("a\nb\n", patch_of("*** Update File: f", "+x")) == "a\nb\nx\n"
    assert apply("", patch_of("*** Update File: f", "+x")) == "x\n"


def test_the_end_of_the_file_is_a_place() -> None:
    assert apply("a\na\n", patch_of("*** Update File: f", "-a", "+b", "*** End of File")) == "a\nb\n"


def test_lines_that_stay_keep_their_white_space_and_the_last_line_its_missing_newline() -> None:
    assert apply("a \nb\nc", patch_of("*** Update File: f", " a", "-b", "+x")) == "a \nx\nc"
    assert apply("a\n\nc\n", patch_of("*** Update File: f", " a", "", "-c", "+x")) == "a\n\nx\n"


def test_wrong_indentation_is_shown_not_repaired() -> None:
    with pytest.raises(EditError, match=r"Lines 3-3 differ from it only in white space:\n        return 1"):
        apply(TEXT, patch_of("*** Update File: f", "-  return 1", "+  return 2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with the line"),
        ("*** Begin Patch\n*** Update File: f\n-a", "ends with the line '\\*\\*\\* End Patch'"),
        (patch_of(), "changes no file"),
        (patch_of("hello"), "line 2: expected"),
        (patch_of("*** Update File: f"), "has no change"),
        (patch_of("*** Update File: f", "@@ a"), "without lines after it"),
        (patch_of("*** Update File: f", "text"), "line 3: a line of a change begins with"),
        (patch_of("*** Update File: f", "*** Rename: x"), "unknown instruction"),
        (patch_of("*** Update File: f", "-a", "*** Move to: g"), "directly after"),
        (patch_of("*** Add File: f", "text"), "every line of an added file begins"),
        (patch_of("*** Delete File: f", "-text"), "nothing follows"),
        (patch_of("*** Update File: f", "*** End of File"), "after the lines of a change"),
    ],
)
def test_text_that_is_not_a_patch_is_rejected_with_the_line(text: str, message: str) -> None:
    with pytest.raises(EditError, match=message):
        parse_patch(text)


def test_an_empty_line_between_the_lines_of_an_added_file_is_one_of_it() -> None:
    (added, _) = parse_patch(
        patch_of("*** Add File: f", "", "+# Title", "", "", "+Text", "+", "", "*** Delete File: g", "")
    )
    assert added.content == "# Title\n\n\nText\n\n"


def test_replacing_needs_one_exact_place() -> None:
    assert replace_text("a b a", "b", "c", replace_all=False, path="f") == ("a c a", 1)
    assert replace_text("a b a", "a", "c", replace_all=True, path="f") == ("c b c", 2)
    with pytest.raises(EditError, match="2 times, at lines 1, 3"):
        replace_text("x\ny\nx\n", "x", "z", replace_all=False, path="f")
    with pytest.raises(EditError, match="2 times, at lines 2, 3; add"):  # the same lines twice, with one in common
        replace_text("x\n}\n}\n}\n", "}\n}\n", "}\ny\n}\n", replace_all=False, path="f")
    assert replace_text("aaa", "aa", "b", replace_all=True, path="f") == ("ba", 1)
    with pytest.raises(EditError, match="Lines 2-2 differ from it only in white space:\n\tif x:"):
        replace_text("a\n\tif x:\nb\n", "    if x:", "z", replace_all=False, path="f")
    with pytest.raises(EditError, match="The nearest lines are 2-3:\nreturn total\nend"):
        replace_text("a\nreturn total\nend\n", "return totl\nend", "z", replace_all=False, path="f")
    with pytest.raises(EditError, match="No line of it is like"):
        replace_text("a\nb\n", "something else", "z", replace_all=False, path="f")
    for old, new in (("", "x"), ("a", "a")):
        with pytest.raises(EditError):
            replace_text("a", old, new, replace_all=False, path="f")


@given(st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=40), st.integers())
def test_the_diff_that_is_shown_is_the_change(old: list[str], seed: int) -> None:
    new = edited(old, seed, ["a", "x", "y"])
    diff = unified_diff("".join(line + "\n" for line in old), "".join(line + "\n" for line in new), "f")
    result = apply_unified(old, diff)
    assert result == new


def apply_unified(old: list[str], diff: str) -> list[str]:
    """A strict reader of unified diffs: positions and context have to be right."""
    result: list[str] = []
    position = 0
    for line in diff.split("\n")[2:]:
        if line.startswith("@@"):
            start, length = (int(part) for part in line.split()[1][1:].split(","))
            begin = start - 1 if length else start
            result += old[position:begin]
            position = begin
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            assert old[position] == line[1:]
            if line.startswith(" "):
                result.append(line[1:])
            position += 1
    return result + old[position:]


def test_the_diff_is_one_that_patch_programs_take(tmp_path: Path) -> None:
    old = "".join(f"line {number}\n" for number in range(60))
    new = old.replace("line 7\n", "").replace("line 30\n", "line 30\nmore\n").replace("line 59", "last")
    (tmp_path / "f").write_text(old)
    subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=_prefixed(unified_diff(old, new, "f")), text=True, check=True
    )
    assert (tmp_path / "f").read_text() == new


@pytest.mark.parametrize(
    "old, new", [("a\nb", "a\nb\n"), ("a\n", "a"), ("\fa\n\u2028\x85b\nc\nd\ne\n", "\fa\n\u2028\x85b\nc\nd\nf\n")]
)
def test_the_diff_counts_lines_as_files_have_them(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "f").write_bytes(old.encode())
    diff = _prefixed(unified_diff(old, new, "f"))
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / "f").read_bytes() == new.encode()


def _prefixed(diff: str) -> str:
    return diff.replace("--- f", "--- a/f", 1).replace("+++ f", "+++ b/f", 1) + "\n"


def test_a_huge_rewrite_is_counted_instead_of_shown() -> None:
    old, new = "".join(f"a{i}\n" for i in range(3000)), "".join(f"b{i}\n" for i in range(4000))
    assert unified_diff(old, new, "f").endswith("[lines 1-3000 became 4000 other lines; too long to show]")


def test_an_empty_line_of_context_at_the_end_is_context_when_it_has_its_space() -> None:
    patch = "*** Begin Patch\n*** Update File: f\n@@ -1,1 +1,2 @@\n+b\n \n*** End Patch"
    assert apply("\n", patch) == "b\n\n"
    assert apply("a\nb\n", "*** Begin Patch\n*** Update File: f\n-a\n+c\n\n\n*** End Patch") == "c\nb\n"


def test_long_patches_take_time_in_proportion() -> None:
    began = time.process_time()
    (added,) = parse_patch(patch_of("*** Add File: f", *["+x"] * 100_000))
    assert added.content == "x\n" * 100_000
    changes = patch_of("*** Update File: f", *["@@ x", "-x", "+y"] * 1000)
    assert apply("x\n" * 20_000, changes) == "y\n" * 1000 + "x\n" * 19_000
    assert time.process_time() - began < 20.0, "not in proportion to its square, which takes many minutes"
