"""Turns that are sequences of messages, each with a header that names its kind: reasoning, content, or a call.

The header decides, not the words of the message: tags of a call in another channel are a quotation. If the
generation prompt contains the first header, the text begins in the middle of a message.

The texts of several messages of one kind are joined by a line break. Framing between messages is dropped; other text
between messages is content.
"""

from tool_call_parsers.channels.elements import Elements
from tool_call_parsers.channels.messages import Channel, ChannelGrammar, MessageHeader
from tool_call_parsers.channels.parameter_messages import ParameterMessages
from tool_call_parsers.channels.recipients import Recipients
from tool_call_parsers.channels.typed_messages import ListedCalls, TypedMessages
from tool_call_parsers.channels.word_headers import Harmony, NamespacedTags, TaggedMessages, WordHeaders

__all__ = [
    "Channel",
    "ChannelGrammar",
    "Elements",
    "Harmony",
    "ListedCalls",
    "MessageHeader",
    "NamespacedTags",
    "ParameterMessages",
    "Recipients",
    "TaggedMessages",
    "TypedMessages",
    "WordHeaders",
]
