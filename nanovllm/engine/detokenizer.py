"""Turns a request's tokens into text, and finds its stop strings."""

import re
from collections.abc import Sequence as Seq
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Text of one request's generated tokens.

    Only generated tokens are decoded, so that nothing of the prompt can leak into the text, which
    ends up equal to decoding them all at once. Where pieces are wanted or stop strings must be
    found the text grows token by token: bytes wait until they make a character, byte-fallback
    tokens until the run of them ends, since one bad byte spoils the characters of its whole run,
    and what may be the start of a stop string waits until that is decided.
    """

    def __init__(self, tokenizer: Any, stop: Seq[str], streaming: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._grows = streaming or bool(stop)
        self._token_ids: list[int] = []
        # Text of tokens before `_read` is in `text`. Those from `_context` on are decoded again
        # with each new one: what precedes a token decides its leading space and joins its bytes.
        self._context = 0
        self._read = 0
        self._known = ""  # text of the tokens from `_context` to `_read`
        self._extended = ""  # text of all tokens from `_context`
        self._taken = 0
        self._final = False
        self.text = ""
        """The text so far, cut before a stop string once one is found."""

    def append(self, token_id: int) -> str | None:
        """Add a generated token; return the stop string that its text completes, if any."""
        self._token_ids.append(token_id)
        if not self._grows:
            return None
        before, self._extended = self._extended, self._decode(self._context, len(self._token_ids))
        if self._extended == before:  # a special token; a run of bytes goes on behind it
            return None
        if self._extended.endswith(_REPLACEMENT) or self._is_byte(token_id):
            return None
        piece = self._extended[len(self._known) :]
        self._context, self._read = self._read, len(self._token_ids)
        self._known = self._extended = self._decode(self._context, self._read)
        return self._extend(piece)

    def finish(self) -> str | None:
        """Take in what was waiting; return the stop string that this completes, if any.

        To be called once, after the last token, unless a stop string was found.
        """
        self._final = True
        whole = self._decode(0, len(self._token_ids))
        return self._extend(whole[len(self.text) :])

    def take(self) -> str:
        """Return the text that is decided and was not returned before."""
        undecided = 0 if self._final else self._undecided()
        end = max(self._taken, len(self.text) - undecided)
        piece = self.text[self._taken : end]
        self._taken = end
        return piece

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(self._token_ids[start:stop], skip_special_tokens=True)
        return text

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None

    def _extend(self, piece: str) -> str | None:
        longest = max(map(len, self._stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        matches = [(at, s) for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if not matches:
            return None
        at, found = min(matches)
        self.text, self._final = self.text[:at], True
        return found

    def _undecided(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        return max(
            (n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])),
            default=0,
        )
