"""Backends are found by name or by path, and their classes declare their options."""

from __future__ import annotations

import pytest

from backends import BackendError, BackendUnavailable, backend_names, backend_options, create_backend
from backends.errors import LachesisError


class Configurable:
    """Not a whole backend: only its constructor is looked at."""

    def __init__(self, host: str, *, depth: int = 3, undocumented: bool = False, on_event: Callable | None = None):  # noqa: F821
        """
        Args:
            host: where it runs,
                as a name.
            depth: how deep.
            on_event: for programs.

        Raises:
            ValueError: never.
        """


def test_our_backends_come_first_and_no_client_is_imported() -> None:
    assert backend_names()[:5] == ["local", "docker", "singularity", "ssh", "modal"]


def test_options_are_read_from_the_constructor() -> None:
    options = {option.name: option for option in backend_options(f"{__name__}:Configurable")}
    assert list(options) == ["host", "depth", "undocumented"]
    assert (options["host"].annotation, options["host"].help) == (str, "where it runs, as a name.")
    assert (options["depth"].default, options["depth"].help) == (3, "how deep.")
    assert options["undocumented"].help == ""


@pytest.mark.parametrize("name", ["local", "docker", "singularity", "ssh", "modal"])
def test_every_option_of_our_backends_can_be_listed(name: str) -> None:
    assert backend_options(name)


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_backend.py").write_text("import package_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match="needs the package package_of_nobody; install it with: pip install"):
        create_backend("needy_backend:Needy")


class Typed:
    def __init__(
        self,
        root: str = "",
        size: int | None = None,
        share: float = 1.0,
        on: bool = False,
        names: list[str] | None = None,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("root", "x", 3),
        ("size", None, "big"),
        ("size", 3, True),
        ("share", 1, "half"),
        ("on", True, "yes"),
        ("names", ["a"], "a"),
        ("names", [], [1]),
    ],
)
def test_an_option_of_another_type_is_rejected_by_name(option: str, right: object, wrong: object) -> None:
    create_backend(f"{__name__}:Typed", **{option: right})
    with pytest.raises(ValueError, match=f"Typed': {option} takes "):
        create_backend(f"{__name__}:Typed", **{option: wrong})


def test_errors_of_backends_are_shown_without_a_traceback() -> None:
    assert issubclass(BackendError, LachesisError)
