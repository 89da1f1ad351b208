"""Chat templates: from messages to the prompt text that a model was trained on."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from polysilicon.errors import TemplateError
from polysilicon.tokenizer import Tokenizer

RENDER_SECONDS = 2.0
_START_SECONDS = 60.0
_MOST_REQUEST_BYTES = 256 << 20
_MOST_REPLY_BYTES = 128 << 20

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models without a template of their own that have ChatML's tokens."""

_PROBE = "probe of content"


class _TemplateTooSlowError(TemplateError):
    """A rendering was ended because of its time."""


class ChatTemplate:
    """One Jinja template, compiled and rendered in a sandboxed process with bounds.

    A rendering that takes more than about two seconds, too much memory or too much output ends
    with TemplateError, and so does everything that the template raises itself.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`clock` gives the time for `strftime_now`. Raises TemplateError for a syntax error."""
        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._clock = clock
        self._run(None)

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> "ChatTemplate":
        """The template `source`, else the model's own, else ChatML if its tokens exist.

        Raises TemplateError where the model has neither.
        """
        if source is None:
            source = tokenizer.chat_template
        if source is None:
            if (
                tokenizer.token_id("<|im_start|>") is None
                or tokenizer.token_id("<|im_end|>") is None
            ):
                raise TemplateError(
                    "this model has no chat template, so it may not be a chat model: pass one with "
                    "--chat-template FILE, or use completions instead of chat"
                )
            source = CHATML
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        return cls(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
            clock=clock,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, special tokens written out.

        Encode it with `add_special=False, parse_special=True`. Each message has a `role`; its
        `content` is a string, a list of `{"type": "text", "text": ...}`, or None (an assistant's
        tool calls). Content comes to the template in the form that it understands, a tool call's
        JSON arguments as an object. `extra` are further variables (`enable_thinking`).
        Raises TemplateError.
        """
        prepared = [self._prepared(message, index) for index, message in enumerate(messages)]
        return self._run(
            {
                **self._special_tokens,
                "messages": prepared,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **(extra or {}),
            }
        )

    def _prepared(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(
                f"message {index} has no role: give each message a role and content"
            )
        prepared = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            if self._wants_parts:
                prepared["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            parts = _text_parts(content, index)
            prepared["content"] = (
                parts if self._takes_parts else "\n".join(p["text"] for p in parts)
            )
        if isinstance(calls := message.get("tool_calls"), list):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template goes through a list of parts itself."""
        text = self._probe([{"type": "text", "text": _PROBE}])
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template loses content that is a plain string."""
        return _PROBE not in self._probe(_PROBE) and self._takes_parts

    def _probe(self, content: object) -> str:
        try:
            return self._run(
                {
                    **self._special_tokens,
                    "messages": [{"role": "user", "content": content}],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": False,
                }
            )
        except _TemplateTooSlowError:
            raise
        except TemplateError:
            return ""

    def _run(self, variables: Mapping[str, Any] | None) -> str:
        """Render; or only compile where `variables` is None."""
        request = {"source": self.source, "variables": variables, "now": self._clock().isoformat()}
        try:
            payload = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"the messages are not plain JSON values ({error}): send only those"
            ) from error
        if len(payload) > _MOST_REQUEST_BYTES:
            raise TemplateError(f"the messages take {len(payload)} bytes: send fewer")
        reply = _sandbox.run(payload)
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] == b"+":
            return text
        raise TemplateError(
            f"the chat template fails: {text}; check the messages, or pass another template with "
            "--chat-template FILE"
        )


def _text_parts(content: object, index: int) -> list[dict[str, str]]:
    if not isinstance(content, list):
        raise TemplateError(f"message {index}: content is neither a string nor a list of parts")
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise TemplateError(
                f"message {index}: content part of type {kind!r} is not supported; send parts "
                '{"type": "text", "text": ...} only'
            )
        parts.append({"type": "text", "text": text})
    return parts


def _with_parsed_arguments(call: object) -> object:
    """A tool call whose arguments, a string of JSON in OpenAI's API, are the object they encode."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


class _Sandbox:
    """The template process of this process: started when first needed, one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def run(self, payload: bytes) -> bytes:
        """The reply to one request. Raises TemplateError if the process dies or is too slow."""
        with self._lock:
            process = self._running()
            frame = len(payload).to_bytes(4, "little") + payload
            reply, killed = self._exchange(process, frame, RENDER_SECONDS)
            if killed or reply is None:
                self._stop()
        if reply is not None:
            return reply
        if killed:
            raise _TemplateTooSlowError(
                f"the chat template takes more than {RENDER_SECONDS:g} seconds: pass another with "
                "--chat-template FILE, or send fewer messages"
            )
        raise TemplateError(
            "the chat template breaks the process that it runs in: pass another with "
            "--chat-template FILE"
        )

    def _running(self) -> "subprocess.Popen[bytes]":
        # After a fork the pipes still belong to the parent's process: leave them alone.
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._stop()
        script = Path(__file__).with_name("chat_sandbox.py")
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise TemplateError(
                f"the chat template's process cannot start ({error}): free some memory or raise "
                "the limit on processes"
            ) from error
        self._process, self._owner = process, os.getpid()
        ready, _ = self._exchange(process, None, _START_SECONDS)
        if ready is None:
            self._stop()
            raise TemplateError(
                f"the chat template's process does not start: check that {sys.executable} runs and "
                "can import jinja2"
            )
        return process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", frame: bytes | None, seconds: float
    ) -> tuple[bytes | None, bool]:
        """The reply or None, and whether the process was killed because `seconds` went by.

        Killing the process is what ends a read that lasts too long. Without a `frame`, waits for
        the byte that says that the process is ready.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        reply = b""
        length = 1
        try:
            if frame is not None:
                process.stdin.write(frame)
                process.stdin.flush()
                length = int.from_bytes(process.stdout.read(4), "little")
            if 0 < length <= _MOST_REPLY_BYTES:
                reply = process.stdout.read(length)
        except OSError:
            reply = b""
        timer.cancel()
        timer.join()
        return (reply if reply and len(reply) == length else None), killed.is_set()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._stop()


_sandbox = _Sandbox()
atexit.register(_sandbox.close)
