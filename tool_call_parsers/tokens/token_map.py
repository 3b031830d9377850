"""How the text of completions aligns with the tokens of one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from tool_call_parsers.tokens.aligned import Aligned
from tool_call_parsers.tokens.token_stream import TokenStream
from tool_call_parsers.tokens.token_table import TokenTable
from tool_call_parsers.tokens.tokenizer import REPLACEMENT, as_ids


class TokenMap(TokenTable):
    """The special tokens of one tokenizer, and how text aligns with its tokens."""

    def align(self, text: str | None, token_ids: Sequence[int]) -> Aligned:
        """Find the position of every token in the completion's text. `text` None means the decoded ids, with a mark for
        each id without text (`mark`); a given text stays as it is.

        A last character cut off within its bytes may be U+FFFD in `text` or missing from it. Raises ValueError
        that names `token_ids` if they do not decode to `text`.
        """
        ids = as_ids(token_ids)
        pieces = self._whole_texts(ids)
        joined = "".join(pieces) if pieces is not None else None
        stream = TokenStream(self, own_text=text is None)
        if text is None:
            if joined is not None and self._concatenates and REPLACEMENT not in joined:
                text = joined
            else:
                text = self.marked(ids)
        if pieces is None or joined != text or not stream.take_whole(text, ids, pieces):
            stream.feed(text, ids)
        return stream.finish()
