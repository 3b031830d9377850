"""What pyproject.toml cannot say: a file beside the installed packages. See `lachesis.old_paths`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "lachesis_old_paths.pth"


class BuildWithPaths(build_py):
    """Builds the packages, and copies the file beside them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(f"lachesis/compat/{NAME}", str(Path(self.build_lib, NAME)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, NAME))]


setup(cmdclass={"build_py": BuildWithPaths})
