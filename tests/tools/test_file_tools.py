"""`read_file`, `write_file`, `patch` and `search_files` in a real sandbox."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_tools import ToolResult, ToolSession
from lachesis_tools.files import _Page

Call = Callable[..., Awaitable[ToolResult]]


UNKNOWN = "\ufffd" * 2000


def text(result: ToolResult) -> str:
    assert result.error is None, result.error
    return result.content


async def shell(session: ToolSession, command: str) -> str:
    done = await (await session.sandbox()).exec(command, timeout=20)
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode()


async def test_a_file_is_read_as_it_was_written(call: Call, session: ToolSession) -> None:
    content = "eins\nzwei é\n\nvier"
    assert text(await call("write_file", path="new/folder/f.txt", content=content)) == (
        "wrote 18 bytes to /workspace/new/folder/f.txt"
    )
    assert await (await session.sandbox()).read_bytes("new/folder/f.txt") == content.encode()
    await call("terminal", command="cd /tmp")  # where the shell is makes no difference to the file tools
    assert text(await call("read_file", path="new/folder/f.txt")) == (
        "     1\teins\n     2\tzwei é\n     3\t\n     4\tvier\n[end of file, 4 lines]"
    )


async def test_a_tilde_is_the_home_folder(call: Call, session: ToolSession) -> None:
    await call("write_file", path="~/notes/f", content="x\n")
    assert await shell(session, "cat ~/notes/f; ls") == "x\n"


async def test_a_long_file_is_read_page_by_page(call: Call, session: ToolSession) -> None:
    await shell(session, "seq 1200 > f; seq 300000 > big; : > empty; printf 'a\\r\\nb\\r\\n' > dos")
    assert text(await call("read_file", path="f")).endswith("[lines 1-500; more follow, continue with offset=501]")
    last = text(await call("read_file", path="f", offset=1199))
    assert last == "  1199\t1199\n  1200\t1200\n[lines 1199-1200; end of file]"
    assert text(await call("read_file", path="f", offset=1, limit=1200)).endswith("[end of file, 1200 lines]")
    assert "299999\t299999\n" in text(await call("read_file", path="big", offset=299_999, limit=1))
    assert (
        await call("read_file", path="f", offset=1201)
    ).error == "/workspace/f has 1200 lines; there is no line 1201"
    assert text(await call("read_file", path="empty")) == "[/workspace/empty is empty]"
    assert text(await call("read_file", path="dos")) == "     1\ta\n     2\tb\n[end of file, 2 lines]"


async def test_long_lines_are_cut_and_a_page_never_loses_its_end(call: Call, session: ToolSession) -> None:
    await shell(
        session,
        "head -c 3000000 /dev/zero | tr '\\0' x > wide; for i in $(seq 400); do head -c 900 wide; echo; done > f",
    )
    wide = text(await call("read_file", path="wide"))
    assert "[... 2998000 bytes of this line not shown ...]" in wide and wide.endswith("[end of file, 1 lines]")
    page = await call("read_file", path="f")
    assert not page.truncated and "more follow, continue with offset=" in page.content


async def test_the_missing_bytes_of_a_cut_line_are_counted_in_any_encoding(call: Call, session: ToolSession) -> None:
    await (await session.sandbox()).write_bytes("latin", b"\xe9" * 2100 + b"\n" + b"\xe9" * 2000 + b"\n")
    first, second, _ = text(await call("read_file", path="latin")).split("\n")
    assert first == f"     1\t{UNKNOWN} [... 100 bytes of this line not shown ...]"
    assert second == f"     2\t{UNKNOWN}"


@given(
    st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"\r\n", b"x" * 9000, b"\xc3\xa9"]), max_size=30),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_a_page_does_not_depend_on_how_the_file_was_cut_into_pieces(
    pieces: list[bytes], first: int, count: int, size: int
) -> None:
    data = b"".join(pieces)
    lines = data.decode().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    page = _Page(first, count)
    step = max(1, len(data) // size)
    for start in range(0, len(data), step):
        page.add(data[start : start + step])
    page.end()
    if first > len(lines):
        return
    shown = page.text("f").split("\n")
    expected = [line.removesuffix("\r") for line in lines[first - 1 : first - 1 + count]]
    assert [line.split("\t", 1)[0].strip() for line in shown[:-1]] == [str(first + i) for i in range(len(expected))]
    assert [line.split("\t", 1)[1][:2000] for line in shown[:-1]] == [line[:2000] for line in expected]
    assert ("more follow" in shown[-1]) == (first - 1 + count < len(lines))


async def test_an_unreadable_file_is_an_error_with_the_reason(call: Call, session: ToolSession) -> None:
    await shell(
        session,
        "mkdir -p d/sub; touch d/config.yaml $'d/new\\nline'; head -c 99 /dev/zero > d/bin; "
        "echo > locked; chmod 0 locked",
    )
    assert str((await call("read_file", path="d/confg.yaml")).error) == (
        "no such file: /workspace/d/confg.yaml; did you mean 'config.yaml'?"
    )
    assert "the folder /workspace/e does not exist either" in str((await call("read_file", path="e/f")).error)
    listing = str((await call("read_file", path="d")).error)
    assert "is a directory; it contains: bin, config.yaml, new\nline, sub/" in listing
    assert "binary file" in str((await call("read_file", path="d/bin")).error)
    assert "permission denied" in str((await call("read_file", path="locked")).error)
    assert "is a directory" in str((await call("write_file", path="d", content="")).error)
    assert (await call("write_file", path="locked/x", content="")).error is not None
    assert "NUL" in str((await call("read_file", path="a\0b")).error)


async def test_a_replacement_keeps_everything_else_of_the_file(call: Call, session: ToolSession) -> None:
    sandbox = await session.sandbox()
    await sandbox.write_bytes("f", b"\xef\xbb\xbfa = 1\r\nb = '\xff'\r\n")
    await shell(session, "chmod 755 f")
    diff = text(await call("patch", path="f", old_string="a = 1\n", new_string="a = 2\nc = 3\n"))
    assert "-a = 1" in diff.replace("\ufeff", "") and "+c = 3" in diff
    assert await sandbox.read_bytes("f") == b"\xef\xbb\xbfa = 2\r\nc = 3\r\nb = '\xff'\r\n"
    assert await shell(session, "stat -c %a f") == "755\n"


async def test_a_replacement_that_does_not_fit_changes_nothing(call: Call, session: ToolSession) -> None:
    await call("write_file", path="f", content="x\ny\nx\n")
    for arguments, message in (
        ({"old_string": "x", "new_string": "z"}, "2 times, at lines 1, 3"),
        ({"old_string": "nothing like it", "new_string": "z"}, "is not in /workspace/f"),
        ({"old_string": "y"}, "needs path, old_string and new_string"),
    ):
        assert message in str((await call("patch", path="f", **arguments)).error)
    assert await shell(session, "cat f") == "x\ny\nx\n"
    assert text(await call("patch", path="f", old_string="x", new_string="z", replace_all=True)).startswith("2 replace")
    assert await shell(session, "cat f") == "z\ny\nz\n"
    assert "no such file" in str((await call("patch", path="g", old_string="x", new_string="z")).error)


PATCH = """*** Begin Patch
*** Update File: one.py
@@ def f():
-    return 1
+    return 2
*** Add File: pkg/new.py
+NEW = True
*** Delete File: old.py
*** Update File: script.sh
*** Move to: bin/run.sh
 echo a
-echo b
+echo c
*** End Patch"""


async def prepare(session: ToolSession) -> None:
    await shell(
        session,
        "printf 'def f():\\n    return 1\\n' > one.py; echo x > old.py; printf 'echo a\\necho b\\n' > script.sh",
    )
    await shell(session, "chmod 755 script.sh")


TREE = "find . -type f | sort | xargs -d '\\n' -I{} sh -c 'echo {}; cat {}'"


async def test_a_patch_changes_several_files_at_once(call: Call, session: ToolSession) -> None:
    await prepare(session)
    diff = text(await call("patch", mode="patch", patch=PATCH))
    assert "+    return 2" in diff and "--- /dev/null\n+++ /workspace/pkg/new.py" in diff and "+++ /dev/null" in diff
    assert await shell(session, TREE) == (
        "./bin/run.sh\necho a\necho c\n./one.py\ndef f():\n    return 2\n./pkg/new.py\nNEW = True\n"
    )
    assert await shell(session, "stat -c %a bin/run.sh") == "755\n"


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("-echo b", "-echo zzz", "fits nowhere"),
        ("*** Delete File: old.py", "*** Delete File: gone.py", "no such file"),
        ("*** Add File: pkg/new.py", "*** Add File: old.py", "exists already"),
        ("*** Move to: bin/run.sh", "*** Move to: one.py", "exists already"),
        ("*** End Patch", "", "ends with the line"),
        ("bin/run.sh", "one.py/x", ""),
    ],
)
async def test_a_patch_with_one_part_that_fails_leaves_all_files_untouched(
    call: Call, session: ToolSession, wrong: str, right: str, message: str
) -> None:
    await prepare(session)
    before = await shell(session, TREE)
    failed = await call("patch", mode="patch", patch=PATCH.replace(wrong, right))
    assert failed.error is not None and message in failed.error
    assert await shell(session, TREE) == before


ODD = ["a b.txt", "new\nline.txt", "-dash.txt", "quote'\".txt", "12:34:x.txt", "é.txt", "--\n"]


async def fill(session: ToolSession) -> None:
    sandbox = await session.sandbox()
    for name in ODD:
        await sandbox.write_bytes(name, b"first\nneedle 1\nlast\n")
    await sandbox.write_bytes("deep/er/code.py", b"def needle():\n    pass\n" * 3)
    await sandbox.write_bytes("deep/bin", b"needle\0\xff")
    await sandbox.write_bytes("deep/latin", b"needle \xff\n")
    await sandbox.write_bytes(".git/x", b"needle\n")
    await sandbox.write_bytes("wide", b"needle" + b"x" * 5000 + b"\n")


async def test_a_word_beyond_ascii_is_found_in_files_of_other_encodings_too(call: Call, session: ToolSession) -> None:
    sandbox = await session.sandbox()
    await sandbox.write_bytes("utf8.txt", "café\n".encode())
    await sandbox.write_bytes("mixed.txt", "café na".encode() + b"\xefve\n")
    found = (await call("search_files", pattern="café")).content
    assert "utf8.txt:1:café" in found and "mixed.txt:1:café" in found
    for pattern in ("caf[éè]", "cafée?", "(café)+"):
        assert "utf8.txt:1:café" in (await call("search_files", pattern=pattern)).content, pattern


async def test_a_search_finds_text_files_of_every_name(call: Call, session: ToolSession) -> None:
    await fill(session)
    found = text(await call("search_files", pattern="needle")).split("\n")
    assert "a b.txt:2:needle 1" in found and "12:34:x.txt:2:needle 1" in found and "é.txt:2:needle 1" in found
    assert "'new\\nline.txt':2:needle 1" in found and "'--\\n':2:needle 1" in found and "-dash.txt:2:needle 1" in found
    assert "deep/latin:1:needle \ufffd" in found
    assert len(found) == len(ODD) + 3 + 1 + 1
    assert any(line.endswith("[... 4606 more characters]") for line in found)
    names = text(await call("search_files", pattern="needle", output_mode="files_only")).split("\n")
    assert len(names) == len(ODD) + 3 and not any("bin" in name or ".git" in name for name in names)
    assert "deep/er/code.py: 3" in text(await call("search_files", pattern="needle", output_mode="count")).split("\n")


async def test_a_search_understands_perl_style_patterns_globs_paths_and_context(
    call: Call, session: ToolSession
) -> None:
    await fill(session)
    assert text(await call("search_files", pattern=r"^def \w+\(\)", path="deep", file_glob="*.py", limit=1)) == (
        "deep/er/code.py:1:def needle():\n[results 1-1 of 3; continue with offset=1]"
    )
    second = text(await call("search_files", pattern=r"needle\(", offset=2))
    assert second == "deep/er/code.py:5:def needle():\n[results 3-3 of 3]"
    around = text(await call("search_files", pattern=r"needle \d", path="a b.txt", context=1))
    assert around == "a b.txt-1-first\na b.txt:2:needle 1\na b.txt-3-last"
    assert text(await call("search_files", pattern="-needle")) == "[no matches]"
    assert "past the last of 3" in text(await call("search_files", pattern=r"needle\(", offset=9))


async def test_separate_matches_are_separate_results(call: Call, session: ToolSession) -> None:
    await shell(
        session, "printf 'hit\\n1\\n2\\n3\\n--\\nhit\\n' > f; cp f g; head -c 3000000 /dev/zero | tr '\\0' '\\n' > x"
    )
    found = text(await call("search_files", pattern="hit", context=1))
    assert found == "f:1:hit\nf-2-1\n--\nf-5---\nf:6:hit\n--\ng:1:hit\ng-2-1\n--\ng-5---\ng:6:hit"
    found = text(await call("search_files", pattern="hit", context=1, limit=1, offset=2))
    assert found == "g:1:hit\ng-2-1\n[results 3-3 of 4; continue with offset=3]"
    assert "terminated" not in text(await call("search_files", pattern="^", path="x")), "that is how it is cut off"


async def test_a_search_for_names(call: Call, session: ToolSession) -> None:
    await fill(session)
    assert text(await call("search_files", pattern="*.py", target="files")) == "deep/er/code.py"
    assert text(await call("search_files", pattern="code", target="files")) == "deep/er/code.py"
    assert text(await call("search_files", pattern="er/*.py", target="files")) == "deep/er/code.py"
    assert len(text(await call("search_files", pattern="*", target="files")).split("\n")) == len(ODD) + 4


async def test_bad_searches_say_why(call: Call) -> None:
    assert "invalid regular expression '('" in str((await call("search_files", pattern="(")).error)
    assert "no such file: /workspace/nowhere" in str((await call("search_files", pattern="a", path="nowhere")).error)
    assert "empty" in str((await call("search_files", pattern="")).error)


async def test_a_search_leaves_the_shell_of_the_model_alone(call: Call, session: ToolSession) -> None:
    await shell(session, "mkdir -p sub; cd sub; export LC_ALL=POSIX")
    await call("search_files", pattern="a")
    await call("read_file", path="nothing")
    assert await shell(session, "basename $PWD; echo $LC_ALL") == "sub\nPOSIX\n"


async def test_changes_of_the_models_shell_do_not_affect_the_file_tools(call: Call, session: ToolSession) -> None:
    await shell(session, "echo here > note; echo x > g; mkdir /tmp/e; printf '#!/bin/sh\\necho forged' > /tmp/e/xargs")
    for broken in ("chmod +x /tmp/e/xargs; export PATH=/tmp/e:$PATH", "export PATH=/nowhere; unset HOME"):
        await call("terminal", command=broken)
        assert text(await call("search_files", pattern="here")) == "note:1:here"
        assert "did you mean 'note'" in str((await call("read_file", path="nope")).error)
    patch = "*** Begin Patch\n*** Delete File: g\n*** Update File: note\n*** Move to: moved\n@@\n-here\n+there\n"
    text(await call("patch", mode="patch", patch=f"{patch}*** End Patch"))
    assert text(await call("search_files", pattern="*", target="files")) == "moved"
    await call("terminal", command="/bin/rm -rf /workspace/*; /bin/rmdir /workspace")
    assert "no matches" in text(await call("search_files", pattern="here", path="/tmp/e"))


async def test_too_much_output_is_said_to_be_incomplete(call: Call, session: ToolSession) -> None:
    await shell(session, f"yes {shlex.quote('needle ' * 20)} | head -n 40000 > f")
    found = text(await call("search_files", pattern="needle"))
    assert "of more than" in found and "[too much output" in found


async def test_a_search_follows_a_link_at_its_root_and_names_unreadable_folders(
    call: Call, session: ToolSession
) -> None:
    await call("terminal", command="mkdir d; echo hit > d/f; ln -s d link; ln -s d/f file; printf '%5000s!' > slow")
    assert (await call("search_files", pattern="hit", path="link")).content == "link/f:1:hit"
    assert (await call("search_files", pattern="hit", path="file")).content == "file:1:hit"
    answer = (await call("search_files", pattern="( |  )+$", path="slow")).content
    assert answer.startswith("[no matches]\n[not everything was searched: ")
    assert "shorten" in ((await call("search_files", pattern="x" * 200_000)).error or "")


async def test_a_patch_of_two_names_of_one_file_changes_nothing(call: Call, session: ToolSession) -> None:
    await call("terminal", command="printf 'a\\nb\\n' > real; ln -s real other")
    body = "*** Begin Patch\n*** Update File: real\n-a\n+A\n*** Update File: other\n-b\n+B\n*** End Patch"
    answer = await call("patch", mode="patch", patch=body)
    assert "are the same file" in (answer.error or "")
    assert await (await session.sandbox()).read_bytes("real") == b"a\nb\n"


async def test_a_file_without_end_is_not_read_for_ever(call: Call) -> None:
    await call("terminal", command="printf '%9000s' x > endless; truncate -s 300G endless")
    assert "beyond the first" in ((await call("read_file", path="endless")).error or "")
