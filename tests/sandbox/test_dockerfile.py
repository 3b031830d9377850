"""Dockerfiles and build contexts against the Dockerfile reference: reading, variables, .dockerignore, COPY and ADD."""

from __future__ import annotations

import io
import os
import stat
import string
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.images import ImageError
from backends.images.context import Context, Ignore, digest, translate, write
from backends.images.dockerfile import expand, pairs, parse, split
from backends.images.trees import apply, clone, make_folders, resolve


def instructions(text: str) -> list[tuple[int, str, str]]:
    return [(each.line, each.name, each.rest) for each in parse(text).instructions]


def test_comments_continuation_lines_and_blank_lines() -> None:
    text = (
        "# a comment\n\n  # another\nfrom debian # no comment\n"
        "RUN a \\\n  # between\n\n   b \\  \n  c\n  WORKDIR   /x  \nRUN echo \\\\n"
    )
    assert instructions(text) == [
        (4, "FROM", "debian # no comment"),
        (5, "RUN", "a    b   c"),
        (10, "WORKDIR", "/x"),
        (11, "RUN", "echo \\\\n"),
    ]


def test_windows_lines_and_tabs() -> None:
    assert instructions("\ufeffFROM\tdebian\r\nRUN a \\\r\n b\r\n") == [(1, "FROM", "debian"), (2, "RUN", "a  b")]


def test_the_escape_directive() -> None:
    found = parse("# syntax=docker/dockerfile:1\n# escape=`\nFROM debian\nRUN a `\n b\nRUN dir c:\\\n")
    assert found.escape == "`"
    assert [each.rest for each in found.instructions] == ["debian", "a  b", "dir c:\\"]
    assert parse("FROM debian\n# escape=`\nRUN a\n").escape == "\\"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RUN a", "no FROM"),
        ("RUN a\nFROM debian", "only ARG may come before FROM"),
        ("FROM debian\n\nRUNN a", "Dockerfile:3: RUNN: there is no such instruction"),
        ("FROM debian\nRUN", "it has no arguments"),
        ("FROM debian AS a\nFROM debian", "Dockerfile:2: FROM debian: only one stage"),
        ("FROM debian\nCOPY --from=a b c", "--from is not supported here.*build in one stage"),
        ("FROM debian\nRUN --mount=type=cache,target=/x a", "--mount is not supported"),
        ("FROM debian\nCOPY --link a b", "--link is not supported"),
        ("FROM debian\nRUN --network=none a", "--network is not supported"),
        ("FROM debian\nRUN cat <<EOF > a\nb\nEOF", "Dockerfile:2: .*here-documents"),
        ("FROM debian\nCOPY <<'EOF' /a\nb\nEOF", "here-documents"),
        ("# syntax=example/other\nFROM debian", "this frontend"),
        ("# escape=x\nFROM debian", "the escape is"),
        ("", "no FROM"),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ImageError, match=said) as caught:
        parse(text)
    assert "Next step: " in str(caught.value)


def test_a_shift_is_no_here_document() -> None:
    assert instructions("FROM debian\nRUN echo $((1<<3)) 'a <<' b\n")[1][2] == "echo $((1<<3)) 'a <<' b"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$a", "1"),
        ("${a}b", "1b"),
        ("$ab", ""),
        ("$a$a-$b", "11-two words"),
        (r"\$a", "$a"),
        (r"\${a}", "${a}"),
        ("'$a'", "$a"),
        ('"$a"', "1"),
        (r'"\$a \" \n"', r'$a " \n'),
        (r"a\ b", "a b"),
        ("${none:-x}", "x"),
        ("${none-x}", "x"),
        ("${empty:-x}", "x"),
        ("${empty-x}", ""),
        ("${a:+x}", "x"),
        ("${none:+x}", ""),
        ("${empty:+x}", ""),
        ("${empty+x}", "x"),
        ("${none:-${a}}", "1"),
        ("${none:-${no:-y}z}", "yz"),
        ("${a:?gone}", "1"),
        ("a$", "a$"),
        ("$-", "$-"),
    ],
)
def test_variables_are_replaced_as_the_reference_says(text: str, value: str) -> None:
    assert expand(text, {"a": "1", "b": "two words", "empty": ""}) == value


@pytest.mark.parametrize("text", ["${a", "'a", '"a', "${}", "${a%b}", "${a/b/c}", "${none:?gone}"])
def test_other_substitutions_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        expand(text, {"a": "1"})


@given(st.text(alphabet=string.ascii_letters + string.digits + " ./_-=#{}()é", max_size=40))
def test_text_without_special_characters_stays(text: str) -> None:
    assert expand(text, {}) == text
    assert expand("'" + text + "'", {}) == text
    assert expand('"' + text + '"', {}) == text


@given(st.lists(st.text(alphabet="ab \t'\"\\$", min_size=1, max_size=8), max_size=5))
def test_split_undoes_escaping(words: list[str]) -> None:
    line = "  ".join("".join("\\" + char for char in word) for word in words)
    assert [expand(word, {}) for word in split(line)] == words


@given(st.text(alphabet="$\\{}'\"ab:-+? ", max_size=20))
def test_no_text_makes_expansion_fail_otherwise(text: str) -> None:
    try:
        expand(text, {"a": "1"})
        split(text)
    except ValueError as error:
        assert str(error)


@given(st.text(alphabet='FROMRUNCOPYdebian \\\n#<<[]"=$/', max_size=80))
def test_no_file_makes_the_parser_fail_otherwise(text: str) -> None:
    try:
        parse(text)
    except ImageError as error:
        assert "Next step" in str(error)


def test_both_forms_of_env() -> None:
    def variables(line: str) -> dict[str, str]:
        at = parse(f"FROM debian\n{line}").instructions[1]
        return pairs(at, lambda text: expand(text, {"abc": "hello"}), "\\")

    assert variables("ENV a b c") == {"a": "b c"}
    assert variables("ENV a=1 b='two words' c=three\\ words") == {"a": "1", "b": "two words", "c": "three words"}
    assert variables("ENV abc=bye def=$abc") == {"abc": "bye", "def": "hello"}  # as before the instruction
    with pytest.raises(ImageError, match="is not NAME=VALUE"):
        variables("ENV a=1 b")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.md", ["a.md", ".md"], ["d/a.md", "a.mdx"]),
        ("**/*.md", ["a.md", "d/a.md", "d/e/a.md"], ["a.txt"]),
        ("a?c", ["abc"], ["ac", "a/c"]),
        ("**", ["a", "a/b"], []),
        ("d/**", ["d/a", "d/a/b"], ["e/a"]),
        ("[a-c]x", ["ax", "cx"], ["dx"]),
        ("[^a]x", ["bx"], ["ax", "/x"]),
        (r"a\*", ["a*"], ["ab"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a|b", ["a|b"], ["a", "b"]),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    compiled = translate(pattern)
    assert [each for each in [*yes, *no] if compiled.match(each)] == yes


def test_the_last_rule_of_dockerignore_decides() -> None:
    rules = Ignore.read("# comment\n*.md\n!README*.md\nREADME-secret.md\n/temp\n  build/  \n!build/keep\n./x/../y\n")
    kept = ["README.md", "build/keep", "build/keep/a", "a.txt", "d/a.md"]
    gone = ["a.md", "README-secret.md", "temp", "temp/a", "build", "build/a", "y"]
    assert [path for path in [*kept, *gone] if rules.excludes(path)] == gone
    everything_but = Ignore.read("*\n!src\n!*.toml")
    assert [path for path in ["src", "src/a", "b", "b/c.toml", "d.toml"] if everything_but.excludes(path)] == [
        "b",
        "b/c.toml",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "context"
    for path in ("a.txt", "b.txt", "d/c.txt", "d/e/f.txt", "d/.hidden", "run.sh"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(path)
    (place / "run.sh").chmod(0o755)
    (place / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "secret").write_text("secret")
    return place


def copied(folder: Path, line: str, root: Path, *, workdir: str = "/", unpack: bool = False) -> dict[str, str]:
    """The files of `root` after a COPY."""
    root.mkdir(exist_ok=True)
    *patterns, target = line.split()
    write(Context(folder, "Dockerfile").sources(patterns, target, root, workdir, unpack=unpack), root, None)
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"  # noqa: PTH115
        elif path.is_file():
            found[name] = path.read_text()
        elif not any(path.iterdir()):
            found[name + "/"] = ""
    return found


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("a.txt /x", {"x": "a.txt"}),
        ("a.txt /x/", {"x/a.txt": "a.txt"}),
        ("a.txt .", {"w/a.txt": "a.txt"}),
        ("a.txt ./", {"w/a.txt": "a.txt"}),
        ("a.txt y/", {"w/y/a.txt": "a.txt"}),
        ("a.txt y", {"w/y": "a.txt"}),
        ("a.txt ../y", {"y": "a.txt"}),
        ("a.txt /", {"a.txt": "a.txt"}),
        ("a.txt b.txt /x/", {"x/a.txt": "a.txt", "x/b.txt": "b.txt"}),
        ("*.txt /x/", {"x/a.txt": "a.txt", "x/b.txt": "b.txt"}),
        ("?.txt /x/", {"x/a.txt": "a.txt", "x/b.txt": "b.txt"}),
        ("a*.txt /x", {"x": "a.txt"}),
        ("/a.txt /x", {"x": "a.txt"}),
        ("./a.txt /x", {"x": "a.txt"}),
        ("../../a.txt /x", {"x": "a.txt"}),
        ("d /x", {"x/c.txt": "d/c.txt", "x/e/f.txt": "d/e/f.txt", "x/.hidden": "d/.hidden"}),
        ("d/ /x/", {"x/c.txt": "d/c.txt", "x/e/f.txt": "d/e/f.txt", "x/.hidden": "d/.hidden"}),
        ("d/e d/c.txt /x/", {"x/f.txt": "d/e/f.txt", "x/c.txt": "d/c.txt"}),
    ],
)
def test_where_copy_puts_things(folder: Path, tmp_path: Path, line: str, files: dict[str, str]) -> None:
    found = copied(folder, line, tmp_path / "root", workdir="/w")
    assert found == files


def test_an_existing_folder_takes_a_file_by_its_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "root/x").mkdir(parents=True)
    assert copied(folder, "a.txt /x", tmp_path / "root") == {"x/a.txt": "a.txt"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("none /x", "there is no 'none'"),
        ("*.none /x/", "there is no"),
        ("a.txt b.txt /x", "several sources need a folder"),
        ("*.txt /x", "several sources need a folder"),
        ("secret /x", "there is no 'secret'"),
        ("../secret /x", "there is no"),
    ],
)
def test_a_copy_that_cannot_be_done(folder: Path, tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        copied(folder, line, tmp_path / "root")


def test_modes_and_links_are_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "d/link").symlink_to("c.txt")
    (folder / "d/away").symlink_to("/etc/passwd")
    found = copied(folder, "d /x", tmp_path / "root")
    assert found["x/link"] == "-> c.txt"
    assert found["x/away"] == "-> /etc/passwd"
    copied(folder, "run.sh /run.sh", tmp_path / "root")
    assert stat.S_IMODE((tmp_path / "root/run.sh").stat().st_mode) == 0o755


def test_a_source_that_is_a_link_is_followed_inside_the_context_only(folder: Path, tmp_path: Path) -> None:
    (folder / "in").symlink_to("d/c.txt")
    (folder / "out").symlink_to("../secret")
    (folder / "absolute").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    (folder / "root").symlink_to("/")
    assert copied(folder, "in /x", tmp_path / "root") == {"x": "d/c.txt"}
    for source in ("out", "absolute", "up/secret", f"root/{tmp_path.relative_to('/')}/secret"):
        with pytest.raises(ValueError, match="there is no"):
            copied(folder, f"{source} /y", tmp_path / "root")


def test_dockerignore_hides_sources(folder: Path, tmp_path: Path) -> None:
    (folder / ".dockerignore").write_text("d\n!d/e\nb.txt\nDockerfile\n")
    assert copied(folder, ". /", tmp_path / "root") == {
        ".dockerignore": "d\n!d/e\nb.txt\nDockerfile\n",
        "a.txt": "a.txt",
        "d/e/f.txt": "d/e/f.txt",
        "run.sh": "run.sh",
    }
    with pytest.raises(ValueError, match=r"\.dockerignore excludes it"):
        copied(folder, "b.txt /x", tmp_path / "root")
    (folder / "Dockerfile.dockerignore").write_text("a.txt")
    assert "b.txt" in copied(folder, ". /", tmp_path / "other")


def test_links_of_the_root_lead_nowhere_else(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("as it was")
    (root / "absolute").symlink_to(outside)
    (root / "climbs").symlink_to("../../../../../../../.." + str(outside))
    (root / "file").symlink_to(outside / "file")
    for line in ("a.txt /absolute/", "a.txt /climbs/", "a.txt /file", "d /absolute", "a.txt /absolute/new/x"):
        copied(folder, line, root)
    assert [path.name for path in outside.rglob("*")] == ["file"]
    assert (outside / "file").read_text() == "as it was"
    assert (root / str(outside)[1:] / "a.txt").read_text() == "a.txt"


def test_a_link_in_a_circle_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").symlink_to("b")
    (tmp_path / "root/b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        copied(folder, "a.txt /a/x", tmp_path / "root")


def test_what_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "d/pipe")
    with pytest.raises(ValueError, match="d/pipe is not a file, folder or link"):
        copied(folder, "d /x", tmp_path / "root")


def archive(path: Path, members: dict[str, str | None], links: dict[str, tuple[bytes, str]] | None = None) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, (kind, target) in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            if text is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            member.size = len(text or "")
            tar.addfile(member, io.BytesIO((text or "").encode()))


def test_add_unpacks_archives_and_copy_does_not(folder: Path, tmp_path: Path) -> None:
    archive(folder / "x.tar.gz", {"top": None, "top/a": "1", "b": "2"})
    assert copied(folder, "x.tar.gz /y", tmp_path / "root", unpack=True) == {"y/top/a": "1", "y/b": "2"}
    assert copied(folder, "a.txt /z", tmp_path / "root", unpack=True)["z"] == "a.txt"
    whole = Context(folder, "Dockerfile").sources(["x.tar.gz"], "/y", tmp_path, "/", unpack=False)
    assert [each.target for each in whole] == ["/y"]


def test_an_archive_stays_in_the_root(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    links = {"link": (tarfile.SYMTYPE, str(outside)), "climbs": (tarfile.SYMTYPE, "../../../../../.." + str(outside))}
    members = {"../../up": "1", "/abs": "2", "link/a": "3", "climbs/b": "4"}
    archive(folder / "x.tar", members, links)
    found = copied(folder, "x.tar /y", tmp_path / "root", unpack=True)
    assert not list(outside.iterdir())
    assert found["y/up"] == "1"
    assert found["y/abs"] == "2"
    archive(folder / "x.tar", {}, {"hard": (tarfile.LNKTYPE, "../" * 9 + "etc/passwd")})
    with pytest.raises(FileNotFoundError):
        copied(folder, "x.tar /y", tmp_path / "root", unpack=True)
    archive(folder / "x.tar", {}, {"device": (tarfile.CHRTYPE, "")})
    with pytest.raises(ValueError, match="device is not a file"):
        copied(folder, "x.tar /y", tmp_path / "root", unpack=True)


def test_a_copy_is_known_by_content_and_mode_not_by_times(folder: Path, tmp_path: Path) -> None:
    def known() -> str:
        return digest(Context(folder, "Dockerfile").sources(["."], "/x", tmp_path, "/", unpack=False))

    before = known()
    os.utime(folder / "a.txt", (1, 1))
    assert known() == before
    (folder / "a.txt").chmod(0o600)
    changed = known()
    assert changed != before
    (folder / "a.txt").write_text("other")
    assert len({before, changed, known()}) == 3


PATHS = st.lists(st.sampled_from(["a", "b", "c", ".", "..", ""]), max_size=6).map("/".join)


@given(st.lists(st.tuples(PATHS, PATHS, st.booleans()), max_size=8), PATHS)
def test_no_path_leads_out_of_a_root(links: list[tuple[str, str, bool]], path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        for name, target, absolute in links:
            try:
                place = resolve(root, name, last=False)
                if place == root:
                    continue
                make_folders(root, place.parent.relative_to(root).as_posix())
                place.symlink_to(("/" if absolute else "") + target if target else ".")
            except OSError:
                continue
        try:
            place = resolve(root, path)
        except OSError:
            return
        assert place == root or root in place.parents
        assert not any(each.is_symlink() for each in (place, *place.parents) if root in each.parents)


def test_a_layer_shares_files_and_changes_none(tmp_path: Path) -> None:
    lower, upper, root = tmp_path / "lower", tmp_path / "upper", tmp_path / "root"
    for path in ("keep/a", "gone/a", "dir/file", "swap"):
        (lower / path).parent.mkdir(parents=True, exist_ok=True)
        (lower / path).write_text(path)
    (lower / "keep").chmod(0o750)
    (upper / "keep").mkdir(parents=True)
    (upper / "keep/a").write_text("new")
    (upper / "keep").chmod(0o700)
    (upper / "swap").mkdir()
    (upper / "dir").write_text("a file now")
    clone(lower, root)
    assert (root / "gone/a").stat().st_ino == (lower / "gone/a").stat().st_ino
    apply(upper, root)
    assert (root / "keep/a").read_text() == "new"
    assert (lower / "keep/a").read_text() == "keep/a"
    assert stat.S_IMODE((root / "keep").stat().st_mode) == 0o700
    assert (root / "swap").is_dir()
    assert (root / "dir").read_text() == "a file now"


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*a*a*a*a*a*a*a*a*b", "a" * 200), ("**/*a*/" * 10 + "x", "aaa/" * 300), ("**/" * 12 + "x", "a/" * 500)],
)
def test_no_pattern_takes_long(pattern: str, path: str) -> None:
    assert not translate(pattern).match(path)


def test_a_wildcard_takes_no_link_to_what_is_ignored(folder: Path, tmp_path: Path) -> None:
    (folder / ".dockerignore").write_text("b.txt\n")
    (folder / "link.md").symlink_to("b.txt")
    with pytest.raises(ValueError, match=r"broken link, or \.dockerignore excludes"):
        copied(folder, "*.md /x/", tmp_path / "root")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.dockerignore"])
def test_links_of_a_context_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret[\n")
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM x\n")
    (context / name).unlink(missing_ok=True)
    (context / name).symlink_to(tmp_path / "secret")
    if name == "Dockerfile":
        with pytest.raises(ImageError, match="no such file"):
            Context(context, name)
        (context / name).unlink()
        (context / name).symlink_to(name)
        with pytest.raises(ImageError, match="Too many levels"):
            Context(context, name)
    else:
        assert name in Context(context, "Dockerfile").members


def test_values_that_no_process_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        expand("$A$A", {"A": "x" * 70_000})


def test_messages_have_no_control_characters() -> None:
    (line,) = parse("FROM \x1b[31m\udce9\n").instructions
    assert line.where == "Dockerfile:1: FROM ?[31m?"
