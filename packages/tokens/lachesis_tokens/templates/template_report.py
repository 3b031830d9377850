"""The report on a chat template: for each kind of continuation, whether a prompt can extend the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from lachesis_tokens.templates.suffix_template import Placeholder, SuffixTemplate
from lachesis_tokens.templates.template_cases import Pattern

WhenUnextendable: TypeAlias = Literal["branch", "error"]
"""How to continue after a turn that has no suffix template: "branch" renders the whole conversation, with earlier turns
as context; "error" raises `TemplateNotExtendable`."""


class Extension(StrEnum):
    """How a prompt continues after a sampled turn."""

    PREFIX = "prefix"
    """The prompt equals, to the letter, the template's rendering of the whole conversation."""
    DIVERGES = "diverges"
    """The suffix is the template's, but the template renders earlier text differently in a longer conversation; see
    `Finding.differences`. The prompt keeps the sampled text."""
    UNEXTENDABLE = "unextendable"
    """The suffix depends on earlier messages, so a placeholder cannot render it."""
    OMITS = "omits"
    """The template leaves out the new messages: the model would never see them."""
    REJECTED = "rejected"
    """The template raises for such a conversation."""


class TemplateDifference(StrEnum):
    """Text that a template renders differently in a longer conversation."""

    REASONING = "reasoning of earlier turns is left out"
    GENERATION_PROMPT = "the end of the generation prompt is not kept"
    EARLIER = "text before the turn is rewritten"
    TURN = "the turn itself is rewritten"
    BESIDE_CALLS = "content next to calls is left out or moved"
    END_OF_TURN = "the turn ends with another token"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one kind of continuation."""

    pattern: Pattern
    extension: Extension
    reason: str = ""
    """Why it cannot be extended; the template's own message if it rejects the conversation."""
    differences: tuple[TemplateDifference, ...] = ()
    placeholder: Placeholder | None = None
    """The placeholder that renders the suffix; None if there is none."""
    suffix_template: SuffixTemplate | None = None
    generation_prompt: str = ""
    """The usual generation prompt."""

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        record: dict[str, Any] = {"continuation": str(self.pattern), "extension": self.extension.value}
        if self.differences:
            record["differences"] = [difference.value for difference in self.differences]
        if self.reason:
            record["reason"] = self.reason
        return record


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """How a template continues conversations, for the start of a run and its manifest."""

    template: str
    """Digest of its text."""
    findings: tuple[Finding, ...]
    shows_tools: bool
    when_unextendable: WhenUnextendable
    reacts_to: tuple[str, ...] = ()
    """Texts in later messages that change what the template writes after them, such as `/no_think`."""

    def describe(self) -> str:
        """One line for each kind of continuation."""
        lines = [f"chat template {self.template[:12]}{'' if self.shows_tools else ': does not show tools'}"]
        for finding in self.findings:
            notes = [difference.value for difference in finding.differences]
            notes += [finding.reason] if finding.reason else []
            if finding.extension is Extension.UNEXTENDABLE:
                notes.append(f"policy: {self.when_unextendable}")
            lines.append(f"  {finding.pattern}: {finding.extension}{' (' + '; '.join(notes) + ')' if notes else ''}")
        if self.reacts_to:
            lines.append(f"  it inspects messages for: {', '.join(map(repr, self.reacts_to))}")
        return "\n".join(lines)

    def summary(self) -> str:
        """`describe`; empty where the template continues every conversation exactly, as it should."""
        exact = all(finding.extension is Extension.PREFIX and not finding.reason for finding in self.findings)
        if exact and self.shows_tools and not self.reacts_to:
            return ""
        return self.describe()

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "template": self.template,
            "shows_tools": self.shows_tools,
            "when_unextendable": self.when_unextendable,
            "continuations": [finding.to_record() for finding in self.findings],
            **({"reacts_to": list(self.reacts_to)} if self.reacts_to else {}),
        }
