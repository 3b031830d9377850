"""From a file to its environment, in a process where nothing else has imported anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stock_envs
from tests.support.recipes import ROOT

OURS = "from lachesis import HermesAgentBaseEnv\nclass Own(HermesAgentBaseEnv):\n    name = 'own'\n"
NOTHING_LEFT = "assert 'atroposlib' not in sys.modules and hooks() == before"
PROGRAMS = {
    "ours": (OURS, "assert environment_class('env.py').__name__ == 'Own'", NOTHING_LEFT),
    "none at all": (
        "",
        "try: environment_class('env.py')",
        "except SettingsError as error: assert 'defines no environment' in str(error)",
        NOTHING_LEFT,
    ),
    "one of Atropos": (
        Path(stock_envs.__file__).read_text(encoding="utf-8"),
        "found = environment_class('env.py:ChatEnv')",
        "from lachesis_compat.atropos.player import AtroposPlayer",
        "assert issubclass(found, AtroposPlayer) and hooks() == before",
        "import env; assert env.tokenize_for_trainer.__wrapped__, 'what it trains is not noted'",
    ),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_atropos_is_imported_for_a_file_that_imports_it_and_for_no_other(kind: str, tmp_path: Path) -> None:
    source, *lines = PROGRAMS[kind]
    (tmp_path / "env.py").write_text(source, encoding="utf-8")
    program = "\n".join(
        (
            "import sys",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "from lachesis.cli.environment_classes import environment_class",
            "from backends.errors import SettingsError",
            "import lachesis.base_env",
            "hooks = lambda: [each for each in sys.meta_path if type(each).__module__.startswith('lachesis')]",
            "before = hooks()",
            *lines,
        )
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
