"""How a model's chat template has it write reasoning and tool calls."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable

from polysilicon.server.events import OutputParser
from polysilicon.server.parsing.reasoning import CLOSE, OPEN, ReasoningParser
from polysilicon.server.parsing.tool_calls import (
    HermesParser,
    LlamaParser,
    MistralParser,
    NewId,
    PythonicParser,
)
from polysilicon.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class ChatFormat:
    """knows_tools: whether the template writes tools into the prompt; where it does not, they are
    described in the system message, in Hermes' form. thinks: whether the model writes reasoning.
    calls: makes the parser of tool calls. hides_calls, hides_thoughts: whether what marks them are
    control tokens, which are left out of texts unless asked for. new_id: gives a call's id.
    """

    knows_tools: bool
    thinks: bool
    calls: Callable[[NewId], OutputParser]
    hides_calls: bool
    hides_thoughts: bool
    new_id: NewId

    def parser(
        self, *, prompt: str, calls: Callable[[], OutputParser] | None
    ) -> Callable[[], OutputParser] | None:
        """Makes the parser of an answer to `prompt`, a rendered text; None where all of the answer
        is text."""
        if not self.thinks:
            return calls
        inside = prompt.rstrip().endswith(OPEN)
        return lambda: ReasoningParser(inside=inside, rest=None if calls is None else calls())


def chat_format(source: str, tokenizer: Tokenizer) -> ChatFormat:
    """The format that a template's source speaks of."""
    calls, tags = _calls(source)

    def hidden(*texts: str) -> bool:
        return any(tokenizer.token_id(text) in tokenizer.special_ids for text in texts)

    return ChatFormat(
        knows_tools=re.search(r"\btools\b", source) is not None,
        thinks=OPEN in source or CLOSE in source,
        calls=calls,
        hides_calls=hidden(*tags),
        hides_thoughts=hidden(OPEN, CLOSE),
        # Mistral's templates take ids of this form only.
        new_id=_short_id if calls is MistralParser else _long_id,
    )


def _calls(source: str) -> tuple[Callable[[NewId], OutputParser], tuple[str, ...]]:
    """The parser that a template calls for, and the tokens that begin calls."""
    if "[TOOL_CALLS]" in source:
        return MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    if "<tool_call>" in source:
        return HermesParser, ("<tool_call>", "</tool_call>")
    if re.search(r"\[\s*func_name1\(", source) or "<|python_start|>" in source:
        return PythonicParser, ("<|python_start|>", "<|python_end|>")
    if "<|python_tag|>" in source or re.search(r'"parameters\\?"\s*:', source):
        return LlamaParser, ("<|python_tag|>",)
    return HermesParser, ("<tool_call>", "</tool_call>")


def _short_id() -> str:
    return secrets.token_hex(5)[:9]


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"
