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
        "batch {folder}/none.jsonl -m x -b http://127.0.0.1:9/v1 --output {folder}/data",
        "export {folder}/none --format openai --out {folder}/out.jsonl",
        "trajectories stats {folder}/none",
        "report {folder}",
        "images build {folder}/none",
        "images build {folder}",
    ],
)
def test_what_does_not_exist_is_exit_code_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.format(folder=tmp_path).split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {'' if 'eval' not in command else 'no such file or folder: '}")
