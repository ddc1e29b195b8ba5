"""Which inputs a chat template renders: what is found, and prompts with and without an input."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pagewire import embedded
from pagewire.errors import RequestError
from pagewire.scheduler.text.chat_template import FIELDS, ChatTemplate
from pagewire.scheduler.text.template_files import load_chat_template
from pagewire.scheduler.text.template_inputs import template_inputs
from support.models.tokenizer_folders import CHAT_TEMPLATE
from support.scripted.text_worker import CHAT_TEMPLATE as TEXT_TEMPLATE
from support.scripted.text_worker import HARMONY_TEMPLATE

NAME, CALLS, REASONING = FIELDS
SYSTEM, TOOL = "messages[role=system]", "messages[role=tool]"
TURN = "<|{{ m.role }}|>{{ m.content }}"
TURNS = f"{{% for m in messages %}}{TURN}{{% endfor %}}"

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system_message }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}"""

QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
           and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content + '</think>' + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS]" }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- key ~ val }}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS]" }}
        {%- for tool_call in message.tool_calls %}{{- tool_call.function|tojson }}{%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]' + message.content|string }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

# The roles that it knows are a chain of conditions without an else.
VICUNA = """A chat between a user and an assistant.
{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}
{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"""

NAMED = """{% for m in messages %}<|im_start|>{{ m.role }}
{%- if m.name is defined and m.name %} name={{ m.name }}{% endif %}
{{ m.content }}<|im_end|>{% endfor %}"""

MACRO = """{%- macro calls(turn, mark='') %}
{%- for c in turn.tool_calls %}{{ mark ~ c.function.name }}{% endfor %}{% endmacro %}
{%- macro show(turn) %}<{{ turn.get('role') }}>
{{- turn.get('content', '') }}{{ calls(turn, mark='!') }}{% endmacro %}
{%- for m in messages %}{{ show(turn=m) }}{% endfor %}"""

NAMESPACE = """{%- set ns = namespace(last=none, text='') %}
{%- for m in messages %}{% set ns.last = m %}{% set ns.text = ns.text ~ m.role ~ m.content %}
{%- endfor %}{{ ns.text }}{% if ns.last['thinking'] %}({{ ns.last['thinking'] }}){% endif %}"""

ANY = {NAME, CALLS, REASONING}
BOTH = {SYSTEM, TOOL}
# Template: the fields and roles that it renders, and those of VARIABLES.
TEMPLATES: dict[str, tuple[str, set[str]]] = {
    "chatml": (CHATML, BOTH),
    "llama3": (LLAMA3, {"tools", "custom_tools", CALLS, *BOTH}),
    "qwen3": (QWEN3, {"tools", "enable_thinking", CALLS, REASONING, *BOTH}),
    "mistral": (MISTRAL, {"tools", *ANY, *BOTH}),  # it compares whole messages
    "gemma": (GEMMA, BOTH),
    "vicuna": (VICUNA, set()),
    "named": (NAMED, {NAME, *BOTH}),
    "macro": (MACRO, {CALLS, *BOTH}),
    "namespace": (NAMESPACE, {REASONING, *BOTH}),
    "json": ("{% for m in messages %}{{ m | tojson }}{% endfor %}", {*ANY, *BOTH}),
    "whole": ("{{ messages }}", {*ANY, *BOTH}),
    "keys": (
        "{% for m in messages %}{% for key in ['role', 'content', 'na' ~ 'me'] %}{{ m[key] }}"
        "{% endfor %}{% endfor %}",
        {*ANY, *BOTH},
    ),
    "items": (
        "{% for m in messages %}{% for k, v in m.items() %}{{ k ~ v }}{% endfor %}{% endfor %}",
        {*ANY, *BOTH},
    ),
    "documents": (
        f"{{% for d in documents %}}{{{{ d }}}}{{% endfor %}}{TURNS}",
        {"documents", *BOTH},
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ m.tool_calls }}{% endgeneration %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        {CALLS, *BOTH},
    ),
    "neighbours": (
        "{% for m in messages %}{{ m.role ~ m.content ~ loop.previtem.name }}{% endfor %}",
        {NAME, *BOTH},
    ),
    "byte level": (CHAT_TEMPLATE, BOTH),
    "text worker": (TEXT_TEMPLATE, {"tools", "enable_thinking", CALLS, REASONING, *BOTH}),
    "harmony": (HARMONY_TEMPLATE, {"tools", CALLS, REASONING, *BOTH}),
}
# Some templates have further ones: names that they set under a condition.
VARIABLES = {"tools", "custom_tools", "documents", "enable_thinking"}

CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": "What time is it?", "name": "Ada"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A clock helps.",
            "thinking": "A clock helps.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "a1b2c3d4e", "name": "now"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "Easy.", "thinking": "Easy."},
        {"role": "user", "content": "And?"},
    ],
]


def prompt(template: ChatTemplate, turns: list[dict[str, Any]], **variables: Any) -> str:
    try:
        return template.render(turns, True, variables)
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_render_is_found(name: str) -> None:
    source, expected = TEMPLATES[name]
    found = template_inputs(ChatTemplate(source, {}))
    assert {each for each in found if "messages[" in each or each in VARIABLES} == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_input_that_is_not_found_does_not_change_the_prompt(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name][0], {"bos_token": "<s>", "eos_token": "</s>"})
    check(template)


def check(template: ChatTemplate) -> None:
    """Renders conversations with and without every input that is not found."""
    inputs = template_inputs(template)
    for turns, tools in product(CONVERSATIONS, (None, TOOLS)):
        given = prompt(template, turns, tools=tools)
        for field, keys in FIELDS.items():
            if field not in inputs:
                without = [{k: v for k, v in turn.items() if k not in keys} for turn in turns]
                assert prompt(template, without, tools=tools) == given, field
        for role in ("system", "tool"):
            if f"messages[role={role}]" not in inputs:
                changed = copy.deepcopy(turns)
                for turn in changed:
                    turn["content"] += "!" if turn["role"] == role else ""
                assert prompt(template, changed, tools=tools) == given, role
        for variable in (*VARIABLES, "namespace"):
            if variable not in inputs:
                value = TOOLS if variable == "tools" else [{"title": "t"}]
                assert prompt(template, turns, **{"tools": tools, variable: value}) == given


# Further ways to reach a field of a message, each of which must be seen.
ROUTES = [
    "{% for m in messages %}{{ FIELD }}{% endfor %}".replace("FIELD", field)
    for field in (
        "m.KEY",
        "m['KEY']",
        "m.get('KEY')",
        "m.get('K' ~ 'EY', '')",
        "m['KEY' if true else 'role']",
        "'KEY' in m",
        "m | string",
        "m ~ ''",
        "m | length",
        "m | dictsort | length",
        "m.keys() | list",
        "m | list",
        "dict(m)",
        "[m]",
        "(m, 1)[0]['KEY']",
        "{'a': m}",
        "m == {}",
        "m in [1]",
        "1 in [m] or m.KEY",
        "namespace(a=m).a.KEY",
        "namespace(a=m)['a'].KEY",
        "namespace(a=m)['a' ~ '']",
        "(m if true else none).KEY",
        "(none or m).KEY",
        "(m or none)['KEY'] is defined",
        "(m | default('')).KEY",
        "'%s' % m",
        "'{}'.format(m)",
        "'{0[KEY]}'.format(m)",
        "m | attr('KEY')",
        "[m] | map(attribute='KEY') | list",
        "[m] | map('string') | first",
        "[m] | selectattr('KEY') | list | length",
        "[m] | rejectattr('KEY', 'defined') | list | length",
        "[m] | groupby('KEY') | length",
        "[m] | sort(attribute='KEY') | length",
        "([m] | first).KEY",
        "([] + [m])[0].KEY",
        "[m][0].KEY",
        "[m][0:1][0].KEY",
        "[m][[m]|length - 1].KEY",
        "loop.changed(m)",
        "cycler(m).current.KEY",
        "m is mapping and m.KEY",
        "m is eq({})",
        "(m)['KE' + 'Y']",
    )
] + [
    "{{ messages[0].KEY }}",
    "{{ messages | tojson }}",
    "{{ messages ~ 1 }}",
    "{{ (messages | last).KEY }}",
    "{{ (messages | reverse | list)[0].KEY }}",
    "{{ messages | map(attribute='KEY') | list }}",
    "{{ messages | map('tojson') | list }}",
    "{{ messages | join(attribute='KEY') }}",
    "{{ messages | sum(attribute='KEY', start='') }}",
    "{% for m in messages if m.KEY %}{% endfor %}",
    "{% for m in messages if m.KEY %}x{% endfor %}",
    "{% for m in [1, 2] %}{% for m in messages %}{{ m.KEY }}{% endfor %}{% endfor %}",
    "{% for group in [messages] %}{{ group[0].KEY }}{% endfor %}",
    "{% for a, b in [messages] %}{{ a.KEY }}{% endfor %}",
    "{% set a, b = messages[0], messages[1] %}{{ a.KEY }}",
    "{% set ns = namespace() %}{% set ns.m = messages[0] %}{{ ns.m.KEY }}",
    "{% set ns = namespace(m=messages[0]) %}{{ ns }}",
    "{% set ns = namespace(m=messages[0]) %}{% set other = ns %}{{ other.m.KEY }}",
    "{% with a = messages[0] %}{{ a.KEY }}{% endwith %}",
    "{% with a = messages %}{% with b = a[0] %}{{ b.KEY }}{% endwith %}{% endwith %}",
    "{% macro f(a) %}{{ a.KEY }}{% endmacro %}{{ f(messages[0]) }}",
    "{% macro f(x, a=messages[0]) %}{{ a.KEY }}{% endmacro %}{{ f(1) }}",
    "{% macro f() %}{{ varargs[0].KEY }}{% endmacro %}{{ f(messages[0]) }}",
    "{% macro f() %}{{ kwargs.a.KEY }}{% endmacro %}{{ f(a=messages[0]) }}",
    "{% macro f(a) %}{{ a.KEY }}{% endmacro %}{{ f(*messages) }}",
    "{% macro f(a) %}{{ a.KEY }}{% endmacro %}{% set g = f %}{{ g(messages[0]) }}",
    "{% macro f(a) %}{{ caller(a) }}{% endmacro %}"
    "{% call(b) f(messages[0]) %}{{ b.KEY }}{% endcall %}",
    "{% macro f(a) %}{% if a %}{{ a[0].KEY }}{{ f(a[1:]) }}{% endif %}{% endmacro %}"
    "{{ f(messages) }}",
    "{% if true %}{% macro f(a) %}{{ a.KEY }}{% endmacro %}{% else %}"
    "{% macro f(b) %}{{ b }}{% endmacro %}{% endif %}{{ f(messages[0]) }}",
    "{% set m = messages[0] %}{% if m.KEY is defined %}x{% endif %}",
    "{% set m %}{{ messages[0].KEY }}{% endset %}{{ m }}",
    "{% filter upper %}{{ messages[0].KEY }}{% endfilter %}",
    "{% for m in messages recursive %}{{ m.KEY }}{% endfor %}",
    "{% for m in messages %}{{ loop.nextitem.KEY }}{% endfor %}",
    "{% for m in messages %}{% set l = loop %}{{ l['previtem'].KEY }}{% endfor %}",
    "{% for m in [1] recursive %}{% if m is mapping %}{{ m.KEY }}{% else %}{{ loop(messages) }}"
    "{% endif %}{% endfor %}",
    "{% generation %}{{ messages[0].KEY }}{% endgeneration %}",
    "{% block b scoped %}{{ messages[0].KEY }}{% endblock %}",
    "{% set a = messages %}{% set b = a[1:] %}{% for x in b %}{{ x.KEY }}{% endfor %}",
    "{% for m in messages %}{{ loop['prev' ~ 'item'].KEY }}{% endfor %}",
    "{% set ns = namespace(*[{'a': messages[0]}]) %}{{ ns.a.KEY }}",
    "{{ {}.get('x', *[messages[0]]).KEY }}",
    "{% set ns = namespace(a=messages[0]) %}{{ ns['a' if true else 'b'].KEY }}",
]


@pytest.mark.parametrize("route", ROUTES)
def test_every_way_to_a_field_is_seen(route: str) -> None:
    for field, keys in FIELDS.items():
        for key in keys:
            source = route.replace("'KE' + 'Y'", f"'{key[:2]}' + '{key[2:]}'")
            source = source.replace("'K' ~ 'EY'", f"'{key[0]}' ~ '{key[1:]}'").replace("KEY", key)
            template = ChatTemplate(source, {})
            assert field in template.reads
            check(template)


def test_reading_other_values_is_not_reading_messages() -> None:
    source = (
        "{% for t in tools %}{{ t.name ~ t | tojson }}{% for k in t %}{{ t[k] }}{% endfor %}"
        "{% endfor %}{% for c in messages[0].tool_calls %}{{ c.name ~ c.thinking }}{% endfor %}"
        "{% set name = 'x' %}{{ name ~ messages[0].content.thinking }}"
    )
    assert ChatTemplate(source, {}).reads == {"tools", "messages", CALLS}


def test_a_template_for_requests_with_tools_is_chosen_by_them() -> None:
    template = ChatTemplate({"default": TURNS, "tool_use": TURNS + "{{ x }}", "rag": "{{ y }}"}, {})
    assert template.reads == {"tools", "messages", "x"}


def test_a_word_in_the_text_is_not_a_variable() -> None:
    assert "documents" not in ChatTemplate(f"Read the documents.{TURNS}", {}).reads


def test_nothing_is_known_of_a_template_with_a_tag_that_the_search_does_not_know() -> None:
    """As with a later transformers, which knows the tag."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.sources["default"] = "{% new_tag %}" + TURNS
    assert template.reads is None
    assert template_inputs(template) == ()


def test_the_embedded_model_renders_roles_and_contents() -> None:
    template = load_chat_template(Path(embedded.__file__).parent / "model")
    inputs = ("add_generation_prompt", "messages", SYSTEM, TOOL)
    assert template_inputs(template) == inputs
    assert template_inputs(None) == ()
