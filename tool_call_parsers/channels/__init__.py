"""Turns that are sequences of messages, each with a header that says what it is: reasoning, content, or a call.

The header decides, not the words of the message: the markup of a call that stands in another channel is quoted there.
Where the prompt has written the first header, the text begins in the middle of a message.

Pieces of reasoning, and of content, that stand in separate messages are joined by one line break. What the format wants
between messages is no text; text that stands there all the same is content.
"""

from tool_call_parsers.channels.elements import Elements
from tool_call_parsers.channels.messages import Channel, ChannelGrammar, MessageHeader
from tool_call_parsers.channels.tagged_messages import NamespacedTags, TaggedMessages
from tool_call_parsers.channels.typed_messages import TypedMessages
from tool_call_parsers.channels.word_headers import Harmony, WordHeaders

__all__ = [
    "Channel",
    "ChannelGrammar",
    "Elements",
    "Harmony",
    "MessageHeader",
    "NamespacedTags",
    "TaggedMessages",
    "TypedMessages",
    "WordHeaders",
]
