"""Pictures of the graph, and that no text in them breaks out of its box."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from tests.run import some
from tests.support.conversation_strategies import conversations, hostile_text

USER = {"role": "user", "content": "hello"}


def drawn() -> MessageHistory:
    """An edit in front, a completion that calls a sub-agent, a sibling of it, and the sub-agent's chat."""
    chat = MessageHistory(
        [
            {"role": "system", "content": "Subagent call received"},
            {"role": "user", "content": "Process this request"},
            ChatResponse(Message("assistant", "Processing..."), FinishReason.STOP),
        ]
    )
    history = MessageHistory([{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}])
    history[0]["content"] = "Edits are kept in the graph"
    prompt = TokenPrefix([1, 2, 3])
    ask = ChatResponse(
        Message("assistant", 'Here is a <tool>call</tool> & "more" of it', reasoning="hm"),
        FinishReason.TOOL_CALLS,
        model="some/model",
        model_version="step-7",
        sampling={"temperature": 1.0, "logprobs": "raw"},
        latency=1.25,
        tokens=SampledTokens.sample(prompt, [4, 5], [-0.5, -0.5]),
    )
    history.append(ask)
    history.branch(ChatResponse(Message("assistant", "A sibling"), FinishReason.LENGTH), 'one of "two"')
    history.append(ToolResponse(Message("tool", "done", tool_call_id="c"), "subagent", 2.5, "took long", chat))
    return history


MERMAID = """graph TD
    m2["📋 System Message<br/>Role: System<br/>Content: Edits are kept in the graph"]
    m3["👤 User Message<br/>Role: User<br/>Content: Hello"]
    subgraph m4["💬 Chat Response"]
        m4_meta["📊 Metadata<br/>Model: some/model<br/>Version: step-7<br/>logprobs: raw<br/>temperature: 1.0<br/>\
Finish: tool_calls<br/>Tokens: 2 sampled after 3<br/>Latency: 1.25 s"]
        m4_text["📝 Response<br/>Reasoning: hm<br/>\
Content: Here is a #60;tool#62;call#60;/tool#62; #38; #34;more#34; of it"]
    end
    subgraph m6["🔧 Tool Response: subagent"]
        subgraph m6_meta["📊 Tool Metadata"]
            m6_facts["Length: 3<br/>Characters: 4<br/>Duration: 2.5 s<br/>Error: took long"]
            subgraph m6_chat["💭 Subagent Chat"]
                m6_m0["📋 System Message<br/>Role: System<br/>Content: Subagent call received"]
                m6_m1["👤 User Message<br/>Role: User<br/>Content: Process this request"]
                subgraph m6_m2["💬 Chat Response"]
                    m6_m2_meta["📊 Metadata<br/>Finish: stop<br/>Latency: 0 s"]
                    m6_m2_text["📝 Response<br/>Content: Processing..."]
                end
            end
        end
        m6_text["Content: done"]
    end
    subgraph d0["Discarded: edit of message 0: content"]
        m0["📋 System Message<br/>Role: System<br/>Content: Be kind"]
        m1["👤 User Message<br/>Role: User<br/>Content: Hello"]
    end
    subgraph d1["Discarded: one of #34;two#34;"]
        subgraph m5["💬 Chat Response"]
            m5_meta["📊 Metadata<br/>Finish: length<br/>Latency: 0 s"]
            m5_text["📝 Response<br/>Content: A sibling"]
        end
    end
    m6_m0 --> m6_m1
    m6_m1 --> m6_m2
    m0 --> m1
    m2 -.->|"edits"| m0
    m2 --> m3
    m3 -.->|"copies"| m1
    m3 --> m4
    m4 --> m5
    m4 --> m6
"""


def test_a_mermaid_picture_shows_boxes_branches_and_edits():
    picture = drawn().to_mermaid()
    graph, styles = picture[: picture.index("    classDef")], picture[picture.index("    classDef") :]
    assert graph == MERMAID
    assert "class m2,m3,m6_m0,m6_m1,m0,m1 messageNode" in styles
    assert "class d0,d1 branchNode" in styles


def test_a_graphviz_picture_shows_the_same():
    history = drawn()
    picture = history.to_dot()
    assert 'subgraph cluster_d1 { label="Discarded: one of \\"two\\""; style=dashed;' in picture
    assert '"📝 Response\\nReasoning: hm\\nContent: Here is a <tool>call</tool> & \\"more\\" of it"' in picture
    assert 'm2 -> m0 [label="edits", style=dashed, constraint=false];' in picture
    assert "m4_text -> m6_facts [ltail=cluster_m4, lhead=cluster_m6];" in picture
    assert history.to_dot() == picture, "ids do not depend on the run"


def test_long_texts_are_cut_and_pictures_of_nothing_are_pictures():
    history = MessageHistory([{"role": "user", "content": "word " * 10_000}])
    assert "Content: word word…" in history.to_mermaid(width=11)
    assert len(history.to_dot()) < 400
    assert MessageHistory().to_mermaid() == "graph TD\n"
    assert MessageHistory().to_dot().startswith("digraph history {")


def test_a_history_below_itself_is_drawn_as_it_was():
    history = MessageHistory([USER])
    history.append(ToolResponse(Message("tool", "x", tool_call_id="c"), "subagent", chat=history))
    assert len(history.nodes()[-1].origin.chat) == 1
    assert history.to_mermaid().count("Subagent Chat") == 1
    shared = MessageHistory([USER])
    results = [ToolResponse(Message("tool", "x", tool_call_id="c"), "subagent", chat=shared) for _ in range(2)]
    assert MessageHistory(results).to_mermaid().count("Subagent Chat") == 1


def test_the_chat_of_a_tool_response_is_frozen_and_its_metadata_has_the_number_of_its_messages():
    chat = MessageHistory([{"role": "system", "content": "guide"}, USER])
    chat.append(ChatResponse(Message("assistant", "done"), FinishReason.STOP))
    history = MessageHistory([USER])
    history.append(ToolResponse(Message("tool", "Subagent call output", tool_call_id="c"), "subagent", chat=chat))
    drawn, digest = history.to_mermaid(), history.nodes()[-1].digest
    assert "Length: 3<br/>Characters: 20" in drawn
    chat[0]["content"] = "X"
    chat.append(USER)
    assert (history.to_mermaid(), history.nodes()[-1].digest) == (drawn, digest)
    kept = history.nodes()[-1].origin.chat
    assert [message["content"] for message in kept] == ["guide", "hello", "done"]
    for change in (
        lambda: kept[0].update(content="X"),
        lambda: kept.append(USER),
        lambda: kept.pop(),
        lambda: kept.rewind(1, "no"),
        lambda: kept.branch(ChatResponse(Message("assistant", "b"), FinishReason.STOP), "no"),
    ):
        with pytest.raises(TypeError, match="fork"):
            change()
    assert history.to_mermaid() == drawn
    fork = kept.fork()
    fork.append(USER)
    assert (len(fork), len(kept)) == (4, 3)
    assert [each.message.text for each in history.completions()] == ["done"]


@given(conversations(), hostile_text, st.text(st.characters(), max_size=20))
@settings(max_examples=some(60), deadline=None)
def test_no_text_breaks_out_of_its_box(messages, reason, tool):
    history = MessageHistory(messages)
    history.append(ToolResponse(Message("tool", tool + reason, tool_call_id="c"), tool, error=reason))
    history.rewind(len(messages) - 1, reason)
    mermaid, dot = history.to_mermaid(), history.to_dot()
    mermaid.encode()
    for line in mermaid.splitlines()[1:]:
        assert re.fullmatch(_MERMAID_LINE, line), line
    assert mermaid.count("subgraph ") == len(re.findall(r"^ *end$", mermaid, re.MULTILINE))
    dot.encode()
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "Q", dot)
    assert '"' not in outside
    assert outside.count("{") == outside.count("}")
    for line in outside.splitlines():
        assert re.fullmatch(_DOT_LINE, line), line


_LABEL = r'\["[^"<>\[\]{}|`]*(?:<br/>[^"<>\[\]{}|`]*)*"\]'
_MERMAID_LINE = (
    rf"\s+(?:subgraph \w+{_LABEL}|\w+{_LABEL}|end|\w+ (?:-->|-\.->)(?:\|\"\w+\"\|)? \w+"
    r"|classDef \w+ [\w:#,\- ]+|class [\w,]+ \w+)"
)
_DOT_LINE = (
    r"digraph history \{|\s*\}|\s+compound=true;|\s+(?:node|graph) \[[^\]]*\];|\s+\w+ \[label=Q\];"
    r"|\s+subgraph cluster_\w+ \{ label=Q;(?: style=dashed;)?|\s+\w+ -> \w+(?: \[[\w=, ]*\])?;"
)


@pytest.mark.parametrize("text", ["end", "`markdown`", "#quot;", "graph TD", "a --> b", "%% comment", "]\n[", "\u2028"])
def test_words_of_mermaid_are_only_words(text):
    (line,) = MessageHistory([{"role": "user", "content": text}]).to_mermaid().splitlines()[1:2]
    assert re.fullmatch(_MERMAID_LINE, line)
