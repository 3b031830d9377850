"""Templates run in jinja's sandbox with short cuts: what they are given is what the sandbox itself would give."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lachesis_tokens.templates.chat_template import _Environment

VALUES = {
    "d": {"role": "user", "items": [1], "_hidden": "h", "get": "g", "": "blank"},
    "inner": {"function": {"name": "f", "arguments": {"x": 1}}},
    "s": " text ",
    "n": 5,
    "listed": [{"a": 1}, {"a": 2}],
    "none": None,
}
EXPRESSIONS = [
    "d.role",
    "d.items is callable",
    "d.get('role')",
    "d['items']",
    "d._hidden",
    "d.missing is defined",
    "d.missing or 'otherwise'",
    "d.__class__",
    "inner.function.name",
    "inner.function.arguments.x",
    "inner.function.arguments.y.z",
    "s.strip()",
    "s.strip",
    "s.missing is defined",
    "s.__class__",
    "s.__class__.__mro__",
    "s._hidden is defined",
    "'{0.__class__}'.format(s)",
    "'{0}'.format(n)",
    "n.real",
    "n.__class__",
    "none.role is defined",
    "none.role",
    "listed.append(1)",
    "listed[0].update({'b': 1})",
    "listed | map(attribute='a') | join(',')",
    "namespace(x=1).x",
]
LOOPS = [
    "{% for i in listed %}{{ loop.first }}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem is defined }}{% endfor %}",
    "{% for i in listed %}{{ loop.cycle('a', 'b') }}{{ loop.__class__ }}{% endfor %}",
    "{% for i in listed %}{{ loop._iterator is defined }}{{ loop.missing is defined }}{% endfor %}",
]


def outcome(environment: ImmutableSandboxedEnvironment, source: str) -> str:
    try:
        return environment.from_string(source).render(VALUES)
    except (TemplateError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).partition(' at 0x')[0]}"


@pytest.mark.parametrize("source", [*(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS), *LOOPS])
def test_a_template_gets_what_the_sandbox_gives(source: str) -> None:
    expected = outcome(ImmutableSandboxedEnvironment(), source)
    assert outcome(_Environment(), source).partition(" at 0x")[0] == expected.partition(" at 0x")[0]


@pytest.mark.parametrize("expression", ["s.__class__.__mro__", "listed.append(1)", "d.update({'b': 1})", "d.clear()"])
def test_what_reaches_out_or_changes_what_is_given_is_rejected(expression: str) -> None:
    assert outcome(_Environment(), f"{{{{ {expression} }}}}").startswith("SecurityError")
