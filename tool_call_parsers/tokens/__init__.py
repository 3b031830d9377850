"""Completions as token ids: which markers the model wrote as special tokens, and the position of every token.

A marker that the tokenizer knows as an added token counts only as that token; the same characters spelled out of
ordinary tokens are plain text, as when a model quotes its own format. `TokenMap.align` therefore gives the parsers a
*masked* text: the same length, with every spelled-out marker replaced character by character by private-use
characters. Positions are those of the text, and `Aligned.unmask` restores any part of it.

A token that has no meaning inside a completion is *stray*: an id without text, or a special token of another purpose
(an end of text in the middle, padding, a role). It is masked too, so no lexer reads it, and unmasked it is a mark:
U+FFFD and its id, as in `\ufffd[token:151643]`. A call with a stray token in it is malformed.

    tokens = TokenMap(tokenizer)                    # once per tokenizer, shared between threads
    aligned = tokens.align(None, completion_ids)
    parsed = parser.parse(aligned.masked)           # then unmask its texts and look up token spans
    aligned.token_span(start, end)
"""

from tool_call_parsers.tokens.aligned import Aligned
from tool_call_parsers.tokens.token_map import TokenMap
from tool_call_parsers.tokens.token_stream import TokenStream
from tool_call_parsers.tokens.tokenizer import Tokenizer, mark, unmask_json, unmask_repr

__all__ = ["Aligned", "TokenMap", "TokenStream", "Tokenizer", "mark", "unmask_json", "unmask_repr"]
