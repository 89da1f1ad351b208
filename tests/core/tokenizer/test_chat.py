"""Chat templates: what they render, and what hostile ones cannot do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from polysilicon import chat
from polysilicon.chat import ChatTemplate
from polysilicon.errors import TemplateError
from polysilicon.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def render(source: str, messages: Any = HI, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_a_model_template(smollm2: Tokenizer) -> None:
    template = ChatTemplate.for_tokenizer(smollm2)
    assert template.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template.render(HI, add_generation_prompt=False).endswith("assistant\n")


def test_llama_3_style() -> None:
    template = ChatTemplate(LLAMA_3, bos_token="<s>", clock=lambda: datetime(2024, 7, 26))
    call = {"type": "function", "function": {"name": "get", "arguments": '{"x": "<é&>"}'}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert template.render(messages) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        '{"name": "get", "parameters": {"x": "<é&>"}}'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert "Today Date: now" in template.render(HI, extra={"date_string": "now"})
    with pytest.raises(TemplateError, match="only supports single tool-calls"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [call, call]}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content|tojson }}{{ '<é>'|tojson }}", '"Hi""<é>"'),
        ("{{ {'b': 1, 'a': [1]}|tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1\n ]\n}'),
        ("{% for i in [1,2,3] %}{% if i==2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1,2,3] %}{% if i==2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{% set x = 1 %}a{{ x }}{% endgeneration %}{{ x }}b", "a1b"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% set n = namespace() %}{% for i in [3] %}{% set n.i = i %}{% endfor %}{{ n.i }}", "3"),
        ("{% for k, v in messages[0].items() %}{{ k }}{{ v }};{% endfor %}", "roleuser;contentHi;"),
        ("{{ messages[0].content.startswith('H') }}{{ 'a,b'.split(',')[-1] }}", "Trueb"),
        ("{{ tools is none }}{{ documents }}{{ bos_token }}{{ eos_token }}", "TrueNone<s></s>"),
        ("{{ dict(a=1).a }}{{ '%s!' % 'x' }}{{ '{}'.format(2) }}", "1x!2"),
        ("{{ messages|map(attribute='role')|join(',') }}{{ nothing }}", "user"),
        ("", ""),
    ],
)  # fmt: skip
def test_helpers(source: str, expected: str) -> None:
    assert render(source) == expected


def test_tools_documents_and_extra() -> None:
    source = (
        "{{ tools[0].name }}{{ documents[0].t }}{{ enable_thinking }}{{ add_generation_prompt }}"
    )
    options = {
        "tools": [{"name": "f"}],
        "documents": [{"t": "d"}],
        "extra": {"enable_thinking": False},
    }
    assert render(source, add_generation_prompt=False, **options) == "fdFalseFalse"


def test_content_comes_in_the_form_the_template_knows() -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert render("{{ messages[0]['content'] + '!' }}", parts) == "a\nb!"
    both = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(both, parts) == "[a][b]"
    assert render(both) == "Hi"
    assert render("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}") == "[Hi]"


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": "x", "other": object()}],
    ],
)
def test_bad_messages(messages: Any) -> None:
    with pytest.raises(TemplateError, match="message"):
        render("{{ messages }}", messages)


def test_defaults(
    byte_level: Callable[..., dict[str, Any]], sentencepiece: Callable[..., dict[str, Any]]
) -> None:
    chatml = ChatTemplate.for_tokenizer(Tokenizer.from_gguf(byte_level()))
    assert chatml.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    none = Tokenizer.from_gguf(sentencepiece())
    with pytest.raises(TemplateError, match="--chat-template FILE"):
        ChatTemplate.for_tokenizer(none)
    given = ChatTemplate.for_tokenizer(none, source="{{ bos_token }}{{ messages[0].content }}")
    assert given.render(HI) == "<s>Hi"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for %}", "{{ " + "(" * 5000, "{% x %}"])
def test_syntax_errors_are_found_at_once(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template fails: "):
        ChatTemplate(source)


ESCAPES = [
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__.__base__.__subclasses__()",
    "cycler.__init__.__globals__",
    "lipsum.__globals__['os'].environ",
    "strftime_now.__self__.__class__",
    "raise_exception.__globals__",
    "''|attr('__class__')|attr('__mro__')",
    "'{0.__class__.__mro__}'.format(1)",
    "'{x.__class__}'.format_map({'x': 1})",
    "[1]|map(attribute='__class__')|map('string')|list",
    "self._TemplateReference__context",
    "namespace.__init__.__globals__",
    "dict.mro()",
    "(messages|map('attr', '__class__')|list)[0].__name__",
    "messages.append(1)",
    "messages[0].update({'role': 'x'})",
    "namespace(**{'__class__': 1})",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_no_way_out_of_the_sandbox(expression: str) -> None:
    try:
        text = render("[{{ " + expression + " }}]")
    except TemplateError:
        return
    assert text in ("[]", "[['', '']]", "[['']]", "[['Undefined']]", "[[Undefined]]", "[[]]"), text


@pytest.mark.parametrize(
    "source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}"]
)
def test_nothing_is_loaded(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


FOR_64 = "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}"
DOUBLE = FOR_64 + "{% set ns.x = EXPRESSION %}{% endfor %}"
NESTED = DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]")
COSTLY = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**6) * messages|length * 10**6 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a'.center(10**11) }}",
    "{{ messages|batch(10**10, 'x')|list }}",
    "{{ ('%0' ~ 999999999 ~ 'd') % 1 }}",
    DOUBLE.replace("EXPRESSION", "ns.x + ns.x"),
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x|tojson|length }}",
    "{% for i in range(90000) %}{% for j in range(90000) %}aaaa aaaa{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
]  # fmt: skip


@pytest.mark.parametrize("source", COSTLY, ids=range(len(COSTLY)))
@pytest.mark.timeout(60)
def test_time_memory_and_output_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.RENDER_SECONDS == 2.0
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"seconds|memory|characters|deeply"):
        render(source)
    assert time.monotonic() - start < 30
    assert render("{{ messages[0].content }}") == "Hi", "the next template is served"


def test_the_process_has_no_environment_and_writes_no_file(tmp_path: Path) -> None:
    """What an escape from the sandbox would still meet."""
    code = (
        "import os\n"
        "from polysilicon import chat_sandbox\n"
        "chat_sandbox._limit_process()\n"
        "print(len(os.environ))\n"
        f"os.write(os.open({str(tmp_path / 'x')!r}, os.O_WRONLY | os.O_CREAT), b'data')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "0\n"
    assert "File too large" in result.stderr
    assert (tmp_path / "x").read_bytes() == b""


def test_many_threads() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        texts = [str(index) * 1000 for index in range(64)]
        rendered = list(
            pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts)
        )
    assert rendered == texts
