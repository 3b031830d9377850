"""Exit code 2, and one wording, for a port that another program has; exit code 2 for what does not exist."""

import socket
from pathlib import Path

import pytest

from lachesis.cli import main


@pytest.mark.parametrize(
    "command",
    [
        "view {folder} --index {folder}/index --port {port}",
        "api --db {folder}/api.db --port {port}",
        "fake-server --port {port}",
        "serve {tasks} --as mcp --port {port}",
        "serve {tasks} --as prime --port {port}",
    ],
)
def test_a_port_in_use_is_one_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "prime" in command:
        pytest.importorskip("zmq")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(command.format(folder=tmp_path, port=port, tasks="tool_call").split()) == 2
    said = f"error: port {port} on 127.0.0.1 is in use; choose another with --port (0 takes a free one)"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "eval compare {folder}/a {folder}/b",
        "report {folder}",
        "images build {folder}/none",
        "images build {folder}",
    ],
)
def test_what_does_not_exist_is_exit_code_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.format(folder=tmp_path).split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("command", ["nonsense", "verify", "eval tool_call --env.nonsense 1"])
def test_a_command_line_that_cannot_be_read_has_the_same_prefix(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export", "lachesis export needs RUN, --format NAME and --output FILE; for example: lachesis export data/run"),
        ("report", "lachesis report needs RUN; for example: lachesis report data/gsm8k"),
        ("export run --format", "--format needs a value: --format NAME"),
        ("view --prot 1", "unknown flag --prot; did you mean --port?"),
        ("view --open=yes", "--open takes no value (got 'yes')"),
        ("doctor a b", "'b' is an argument too many: lachesis doctor does not take it"),
        ("trajectories stat x", "must be stats, validate, show, convert or dedup (got 'stat'); did you mean stats?"),
        ("trajectories show run.py --line 2 --id 2", "--id and --line exclude each other; keep one of them"),
        ("eval tool_call -T hot", "-T, --temperature: must be a number, such as 0.5 (got 'hot')"),
        ("batch p.jsonl --num_workers x", "--concurrency: must be a whole number of at least 1 (got 'x')"),
        ("batch p.jsonl --shard 3/2", "--shard: must be I/N with 1 <= I <= N (got '3/2')"),
    ],
)
def test_a_mistake_in_flags_is_said_with_what_is_allowed(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and said in last and "argument -" not in last


def test_a_comparison_of_three_says_how_to_compare_the_third(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "compare", "a", "b", "c d"])
    said = capsys.readouterr().err
    assert "error: it compares two, A and B; for the others: " in said and "eval compare a 'c d'" in said


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("compress {empty} --extractive --output out", 0),
        ("trajectories convert {empty} --to openai --out out", 0),
        ("trajectories dedup {empty} --out out", 0),
        ("trajectories stats {empty}", 2),
        ("trajectories show {empty}", 2),
        ("trajectories validate {empty}", 2),
        ("report {empty}", 2),
        ("eval compare {empty} {empty}", 2),
        ("batch {empty} -m embedded", 2),
        ("eval gsm8k --env.dataset_name {empty} -m reference", 2),
        ("verify {empty}", 2),
    ],
)
def test_an_empty_file_becomes_an_empty_file_and_is_otherwise_refused(
    command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (empty := tmp_path / "empty.jsonl").touch()
    assert main(command.format(empty=empty).split()) == code
    if code == 0:
        assert (tmp_path / "out").read_bytes() == b""
    else:
        said = capsys.readouterr()
        assert f"{empty} is empty" in said.err or f"{empty}: it is empty" in " ".join(said.out.split())


@pytest.mark.parametrize(
    "command",
    [
        "trajectories stats {text}",
        "trajectories show {text}",
        "trajectories convert {text} --to openai --out out",
        "trajectories dedup {text} --out out",
        "compress {text} --extractive --output out",
        "export {text} --format openai --out out",
        "verify {text}",
        "report {text}",
        "eval compare {text} {text}",
        "eval gsm8k --env.dataset_name {text} -m reference",
        "batch {text} -m embedded",
        "chat --replay {text}",
    ],
)
def test_a_file_that_is_not_json_lines_is_wrong_input_and_named_once_with_the_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text := tmp_path / "text.jsonl").write_text("hello\n")
    # Such a line is what `verify` looks for.
    assert main(command.format(text=text).split()) == (1 if command.startswith("verify") else 2)
    said = "".join(capsys.readouterr())
    assert said.count(f"{text}, line 1: ") == 1 and " column 1" in said and "(char" not in said


def test_a_run_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = ("export nope --format openai --out x", "verify nope", "report nope", "trajectories stats nope")
    for command in commands:
        assert main(command.split()) == 2
        assert "`lachesis eval ENV` and `lachesis process ENV` write them there" in capsys.readouterr().err
    for name in ("sums/groups.jsonl", "words/eval/samples.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).touch()
    for command in commands:
        assert main(command.split()) == 2
        assert "nope; runs here are data/sums, data/words/eval\n" in capsys.readouterr().err
    assert main(["report", "data/sum"]) == 2
    assert "data/sum; did you mean data/sums?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "process {path}.py",
        "process tool_call --config {path}.yaml",
        "eval {path}.py",
        "eval compare {path} {path}",
        "compress {path} --target-max-tokens 100",
        "export {path} --format openai --out out.jsonl",
        "verify {path}",
        "view {path}",
        "report {path}",
        "train --config {path}.yaml",
        "train --sft {path} --training.base_model smollm2",
        "batch {path}.jsonl -m x -b http://127.0.0.1:9/v1",
        "trajectories stats {path}",
        "audit {path}.py",
        "check {path}.py",
        "chat --replay {path}",
    ],
)
def test_a_file_that_is_missing_is_one_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = command.format(path=tmp_path / "none").split()
    missing = next(word for word in words if "none" in word)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no file or folder {missing}")
    assert [*tmp_path.iterdir()] == []
