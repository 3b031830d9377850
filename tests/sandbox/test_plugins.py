"""Plug-ins are found by every route that the documentation names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from backends.errors import LachesisError
from backends.plugins import PluginBroken, Registry, UnknownPlugin
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import ServerSettings
from lachesis_tokens.engines import create_engine


def registry() -> Registry[type]:
    return Registry("shape", "lachesis_test.shapes", {"fraction": "fractions:Fraction"})


def test_a_plugin_is_found_by_own_name_registered_name_and_path() -> None:
    shapes = registry()
    shapes.register("text", str)
    shapes.register("decimal", "decimal:Decimal")
    assert [shapes.load(name).__name__ for name in ("fraction", "text", "decimal", "pathlib:PurePath")] == [
        *("Fraction", "str", "Decimal", "PurePath")
    ]
    assert shapes.names() == ["fraction", "decimal", "text"]


def test_a_plugin_is_found_by_the_entry_point_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lachesis_test.shapes]\nround = third_party_shapes:Round\n")
    (tmp_path / "third_party_shapes.py").write_text("class Round: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry().names() == ["fraction", "round"]
    assert "third_party_shapes" not in sys.modules
    assert registry().load("round").__name__ == "Round"


@pytest.mark.parametrize("name", ["fractoin", "no_such_module:X", "fractions:NoSuch", ".fractions:X", ":X", "a..b:X"])
def test_an_unknown_plugin_is_named_with_the_next_step(name: str) -> None:
    with pytest.raises(UnknownPlugin, match=re.escape(name.partition(":")[0]) or "shape") as raised:
        registry().load(name)
    assert isinstance(raised.value, LachesisError)
    if ":" not in name:
        assert "'fraction'" in str(raised.value)


def test_a_name_is_given_once() -> None:
    shapes = registry()
    shapes.register("text", str)
    shapes.register("text", str)
    for name, plugin in (("text", int), ("fraction", int)):
        with pytest.raises(ValueError, match="exists already"):
            shapes.register(name, plugin)


def test_a_missing_dependency_of_a_plugin_is_not_mistaken_for_a_missing_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        registry().load("needs_more:X")


@pytest.mark.parametrize(
    ("content", "target", "said"),
    [
        ("def (:", "broken_plugin:X", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('boom')", "broken_plugin:X", "RuntimeError: boom"),
        ("from os import nothing", "broken_plugin:X", "ImportError: cannot import name 'nothing'"),
        ("X = 5", "broken_plugin:X", "is a int, not a class"),
    ],
)
def test_a_broken_plugin_is_an_error_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, target: str, said: str
) -> None:
    (tmp_path / "broken_plugin.py").write_text(content)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lachesis_test.shapes]\nodd = broken_plugin:X\nauto = fractions:Fraction\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    shapes = Registry[type]("shape", "lachesis_test.shapes", {}, reserved=["auto"])
    assert shapes.names() == ["odd"]
    for name in (target, "odd"):
        with pytest.raises(PluginBroken, match=said) as raised:
            shapes.load(name)
        assert f"shape {name!r}" in str(raised.value)
        assert raised.value.exit_code == 2
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    with pytest.raises(UnknownPlugin, match="no shape called 'auto'"):
        shapes.load("auto")
    with pytest.raises(ValueError, match="another meaning"):
        shapes.register("auto", str)


def test_where_no_plug_in_is_installed_the_package_that_has_ours_is_named() -> None:
    shapes = Registry[type]("shape", "lachesis_test.no_shapes", {}, package="lachesis-shapes")
    with pytest.raises(UnknownPlugin, match="shape 'odd' is in the package lachesis-shapes"):
        shapes.load("odd")


def test_an_engine_that_needs_a_missing_package_or_fails_is_an_error_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_without.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "engine_failing.py").write_text("def make(settings):\n    raise KeyError('k')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginBroken, match=r"engine_without:X: .*install the package that has 'a_package"):
        ServerConfig(engine="engine_without:X")
    with pytest.raises(PluginBroken, match="engine_failing:make: KeyError: 'k'"):
        create_engine("engine_failing:make", ServerSettings("http://x/v1", "m"))
