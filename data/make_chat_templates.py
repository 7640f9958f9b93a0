#!/usr/bin/env python3
"""Make data/chat_templates.json: chat templates, conversations, and the text that Jinja itself renders from them.

The test chat_template_test holds LongHalo's Jinja interpreter against these texts. The templates are written for this
file, in the manner of those that models bring; the snippets go through the parts of the language one by one. The file
is stored; this script is run by hand when it has to change:

    python3 -m venv /tmp/jinja && /tmp/jinja/bin/pip install jinja2==3.1.6
    /tmp/jinja/bin/python data/make_chat_templates.py

Jinja is set up as the `transformers` package does: trim_blocks, lstrip_blocks, loop controls, an immutable sandbox,
its own tojson, raise_exception and strftime_now. A case whose "expected" is null is one that Jinja refuses too.
"""
import datetime
import json
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TODAY = datetime.datetime(2024, 7, 26)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a careful reader.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message may be missing -#}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Knowledge ends: December 2023\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

REASONER = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {{- tool_call.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

INST = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if system_message is defined and message == user_messages[-1] %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

MACROS = """{% macro header(role, mark='##') -%}
{{ mark }} {{ role | title }}:
{%- endmacro %}
{% macro turn(message) %}
{{ header(message.role) }} {{ message.content.strip() }}
{% endmacro %}
{% for message in messages %}
  {% if message.role not in ['system', 'user', 'assistant'] %}
    {% continue %}
  {% endif %}
{{ turn(message) }}
  {%- generation %}

  {%- endgeneration %}
{% endfor %}
{% if add_generation_prompt %}
{{ header('assistant', mark='#') }}
{% endif %}
"""

PLAIN = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "reasoner": REASONER, "inst": INST, "turns": TURNS, "macros": MACROS,
             "plain": PLAIN}


def message(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one": [message("user", "What is this document?")],
    "system": [message("system", "  You answer in one line. "), message("user", "Hello\n")],
    "turns": [message("user", "\tA\r\n\n"), message("assistant", " <think>\nhm\n</think>\n\nB "), message("user", "C é 😀 {{ x }}")],
    "system turns": [message("system", ""), message("user", "1"), message("assistant", "2"), message("user", "3"),
                     message("assistant", "4")],
    "not alternating": [message("user", "1"), message("user", "2")],
    "tool": [message("user", "1"), message("tool", "{\"a\": 1}"), message("tool", "x"), message("assistant", "2")],
}

# Each is rendered with the conversation "turns".
SNIPPETS = r"""
plain text, no tags
{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }}
{{ 1.5 + 1 }} {{ 0.1 + 0.2 }} {{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.0 }} {{ 7.5 // 2 }} {{ -7.5 // 2 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }} {{ 1e300 * 1e10 }}
{{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ (1 + 2) * 3 }} {{ - 3 | abs }} {{ +3 }} {{ --3 }} {{ 10 - 2 - 3 }} {{ 100 / 10 / 5 }} {{ 1_000 + 1 }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ [1, 'x'] ~ {'k': none} ~ (1,) ~ (1, 2) ~ () ~ [] ~ {} }}
{{ 'a' + 'b' * 3 }} {{ [1] + [2] }} {{ [0] * 3 }} {{ 3 * 'x' }} {{ 'x' * -1 }}| {{ (1,) + (2,) }}
{{ 1 ~ 2 + 3 }}
{{ '1' ~ 2 * 3 }}
{{ true }} {{ false }} {{ none }} {{ True }} {{ False }} {{ None }} {{ true + 1 }} {{ true == 1 }} {{ 1 == 1.0 }} {{ '1' == 1 }}
{{ undefined_thing }}|{{ undefined_thing is defined }}|{{ undefined_thing | default('d') }}|{{ undefined_thing or 'o' }}|{{ not undefined_thing }}
{{ undefined_thing == none }} {{ undefined_thing == other_undefined }} {{ undefined_thing | length }} {{ undefined_thing | trim }}| {{ undefined_thing | upper }}|{{ undefined_thing ~ 'x' }}
{{ 'a' in undefined_thing }} {{ undefined_thing is iterable }} {{ undefined_thing is sequence }} {{ undefined_thing is string }} {{ undefined_thing is mapping }} {{ undefined_thing is none }}
{% for x in undefined_thing %}{{ x }}{% else %}none{% endfor %}
{{ undefined_thing + 'x' }}
{{ undefined_thing.attribute }}
{{ undefined_thing['item'] }}
{{ undefined_thing() }}
{{ none + 1 }}
{{ 'a' + 1 }}
{{ 1 < 'a' }}
{{ 'a' in none }}
{{ 1 // 0 }}
{{ 1.5 / 0 }}
{% for x in none %}{% endfor %}
{% for x in 5 %}{% endfor %}
{{ none | length }}
{{ none.x is defined }} {{ (5).x is defined }} {{ 'abc'.nothing is defined }} {{ [].nothing is defined }} {{ none['x'] is defined }}
{{ 1 < 2 }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 >= 2 != 1 }} {{ 'a' < 'b' }} {{ 'é' > 'z' }} {{ 1 <= 1.0 }} {{ 2 == 2 == 2 }}
{{ 'b' in 'abc' }} {{ 'd' in 'abc' }} {{ 'd' not in 'abc' }} {{ 1 in [1, 2] }} {{ 'k' in {'k': 1} }} {{ 3 not in (1, 2) }} {{ '' in 'abc' }}
{{ not 1 == 2 }} {{ not true and false }} {{ true or false and false }} {{ 1 and 2 }} {{ 0 or 'x' }} {{ [] or {} or 'z' }} {{ not not 1 }}
{{ 'yes' if true else 'no' }} {{ 'yes' if false }}| {{ 'a' if false else 'b' if false else 'c' }} {{ ('x' if 1 else 'y') ~ 'z' }} {{ 1 if 0 else 2 if 1 else 3 }}
{{ [1, 2, 3][0] }} {{ [1, 2, 3][-1] }} {{ [1, 2, 3][5] }}| {{ 'abc'[1] }} {{ 'aéb'[1] }} {{ 'aéb'[-1] }} {{ {'a': 1}['a'] }} {{ {'a': 1}.a }} {{ {'a': 1}['b'] }}| {{ [[1, 2], [3, 4]][1][0] }}
{{ [1, 2, 3, 4, 5][1:3] }} {{ [1, 2, 3, 4, 5][:2] }} {{ [1, 2, 3, 4, 5][3:] }} {{ [1, 2, 3, 4, 5][::2] }} {{ [1, 2, 3, 4, 5][::-1] }} {{ [1, 2, 3, 4, 5][-2:] }} {{ [1, 2, 3, 4, 5][:-2] }} {{ [1, 2, 3, 4, 5][4:1:-2] }} {{ [1, 2, 3][10:] }} {{ [1, 2, 3][-10:10] }} {{ [1, 2, 3][:] }}
{{ 'héllo wörld'[1:5] }} {{ 'héllo'[::-1] }} {{ 'abc'[5:] }}| {{ 'abcdef'[1:-1:2] }} {{ (1, 2, 3)[1:] }} {{ 'abc'[-1:-10:-1] }} {{ 'abc'[10::-1] }}
{{ [1][::0] }}
{{ {'a': 1, 'b': [1, {'c': 'd'}], 3: none, 'e': "it's", 'f': 'say "x"', 'g': 'both \' and "', 'h': 'tab\tnew\nline\\' } }}
{{ "double" 'single' "join" }} {{ 'a\nb\tc\\d\'e\"f' }} {{ 'é\u00e9\x41\U0001F600' }} {{ '\q' }} {{ '\0' | length }} {{ '\101' }}
{{ '  strip me ' .strip() }}|{{ '  x '.lstrip() }}|{{ '  x '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcab'.strip('ab') }}|{{ 'éaé'.strip('é') }}|{{ '  x　'.strip() }}|{{ '  x ' | trim }}|{{ 'xax' | trim('x') }}
{{ 'a b  c '.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ' a b c'.split(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a<>b<>c'.split('<>')[-1] }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'x'.split('xyz') }} {{ 'a b'.split(maxsplit=0) }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.startswith('b') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith('') }}
{{ 'aXbX'.replace('X', 'y') }} {{ 'aXbX'.replace('X', '', 1) }} {{ 'aXbX' | replace('X', 'zz') }} {{ 'aaaa' | replace('aa', 'b') }} {{ 'aXbX' | replace('X', '-', 1) }}
{{ 'Hello World'.upper() }} {{ 'Hello World'.lower() }} {{ "it's a-b c".title() }} {{ 'hELLO wORLD'.capitalize() }} {{ "it's a-b (c) x_y" | title }} {{ 'aBC dEF' | capitalize }} {{ 'aBc' | upper }} {{ 'aBc' | lower }}
{{ 'a-b-c'.find('b') }} {{ 'a-b-c'.find('z') }} {{ 'éab'.find('b') }} {{ 'abab'.rfind('b') }} {{ 'abab'.count('ab') }} {{ 'abab'.count('') }} {{ 'abab'.index('b') }} {{ '12'.isdigit() }} {{ '1a'.isdigit() }} {{ ''.isdigit() }} {{ ' \n'.isspace() }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.txt'.removesuffix('.txt') }}
{{ ', '.join(['a', 'b']) }} {{ ['a', 1, none] | join('-') }} {{ [] | join(',') }}| {{ 'abc' | join('.') }} {{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }} {{ ''.join([]) }}|
{{ 'a\nb\r\nc\n'.splitlines() }} {{ ''.splitlines() }}
{{ 'x'.index('y') }}
{{ 'abc' | length }} {{ 'aéb' | length }} {{ [1, 2] | length }} {{ {'a': 1} | length }} {{ [1, 2] | count }} {{ '' | length }}
{{ [3, 1, 2] | first }} {{ [3, 1, 2] | last }} {{ 'abc' | first }} {{ 'abc' | last }} {{ [] | first }}| {{ [] | last }}|
{{ 'abc' | list }} {{ {'a': 1, 'b': 2} | list }} {{ (1, 2) | list }} {{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {{ range(3, 1) | list }}
{{ 'é"\\\n<&>\'' | tojson }} {{ [1, 2.5, none, true, {'a': [], 'b': {}}] | tojson }} {{ {'b': 1, 'a': {'c': [1, 2]}} | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ 'é😀' | tojson(ensure_ascii=true) }} {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }} {{ [[], {}, [[]]] | tojson(indent=4) }}
{{ '42' | int }} {{ '4.7' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ ' 7 ' | int }} {{ none | int }} {{ '1.5' | float }} {{ 'x' | float }} {{ 3 | float }} {{ 5 | string ~ 'x' }} {{ none | string }} {{ 'x' | safe }}
{{ messages | map(attribute='role') | list }} {{ messages | map(attribute='content') | map('trim') | list }} {{ [1, 2] | map('string') | join('') }} {{ [{'a': {'b': 1}}, {'a': {}}] | map(attribute='a.b', default='-') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | list }} {{ messages | selectattr('missing') | list }} {{ [0, 1, 2, none] | select | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('odd') | list }} {{ messages | selectattr('role', 'in', ['user']) | list | length }} {{ messages | selectattr('x', 'defined') | list }}
{{ ['b', 'A', 'c'] | sort }} {{ [3, 1, 2] | sort(reverse=true) }} {{ ['b', 'A'] | sort(case_sensitive=true) }} {{ [{'n': 2}, {'n': 1}] | sort(attribute='n') }} {{ [1, 2] | reverse | list }} {{ 'abc' | reverse }} {{ -3 | abs }} {{ (-3.5) | abs }}
{{ {'a': 1, 'b': 2}.items() | list }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 'd') }} {{ {'a': 1} | items | list }} {{ undefined_thing | items | list }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ ',' if not loop.last }}{% endfor %} {% for k, v in {'x': 9} | items %}{{ k }}{{ v }}{% endfor %} {% for k in {'p': 1, 'q': 2} %}{{ k }}{% endfor %} {% for c in 'aéb' %}[{{ c }}]{% endfor %}
{{ none | default('d') }} {{ none | default('d', true) }} {{ '' | default('d') }}| {{ '' | d('d', boolean=true) }} {{ undefined_thing | default }}| {{ 0 | default(5, true) }} {{ {}.x | default('m') }}
{{ 1 is number }} {{ 1.5 is number }} {{ true is number }} {{ true is boolean }} {{ 1 is boolean }} {{ 1 is integer }} {{ true is integer }} {{ 1.5 is float }} {{ 'a' is string }} {{ [] is sequence }} {{ {} is sequence }} {{ {} is mapping }} {{ [] is mapping }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ none is none }} {{ 0 is none }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }} {{ range is callable }} {{ 1 is callable }}
{{ 4 is even }} {{ 4 is odd }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 1 is eq 1 }} {{ 1 is equalto(2) }} {{ 1 is ne 2 }} {{ 'a' is in 'abc' }} {{ 1 is in [2] }} {{ none is sameas none }} {{ 1 is not none }} {{ 1 is not in [1] }} {{ 2 is gt 1 }} {{ 2 is lt(1) }}
{{ x is defined and x }} {{ 'a' if messages is defined else 'b' }} {{ messages[0].tool is not defined or false }} {{ not messages is defined }}
{{ 1 + 2 is number }}
{% set a = 1 %}{% set b, c = 2, 3 %}{% set d = 4, 5 %}{{ a }}{{ b }}{{ c }}{{ d }}{% set (e, f) = [6, 7] %}{{ e }}{{ f }}
{% set a, b = [1] %}
{% set text %}  <b>{{ 1 + 1 }}</b>  {% endset %}[{{ text }}]{{ text | trim }}{{ text is string }}
{% set x = 1 %}{% for i in [1, 2, 3] %}{{ x }}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }} {% for i in [1] %}{% if true %}{% set x = 3 %}{% endif %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(a=1, found=false) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% set ns.new = i %}{% endfor %}{{ ns.a }}{{ ns.new }}{{ ns.found }}{{ ns.nothing is defined }}{{ namespace({'k': 2}, z=3).k }}
{% set d = {} %}{% set d.x = 1 %}
{{ dict(a=1, b=2) }} {{ dict({'a': 1}, b=3).b }} {{ dict() }}
{% for i in range(3) %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem is defined }}{{ loop.nextitem }} {% endfor %}
{% for i in [1, 2, 3, 4] if i is even %}{{ i }}:{{ loop.index }}/{{ loop.length }} {% else %}nothing{% endfor %}{% for i in [1] if i > 1 %}{{ i }}{% else %}nothing{% endfor %}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %} {% for i in [1, 2] %}{% for j in [1, 2] %}{% if j == 2 %}{% break %}{% endif %}{{ i }}{{ j }}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}
{% for i in [] %}x{% else %}empty{% endfor %} {% for i in [1] %}{% break %}{% else %}empty{% endfor %}|
{% for i in [1, 2] %}{% continue %}{% else %}empty{% endfor %} {% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% else %}empty{% endfor %}|{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{% else %}empty{% endfor %}
{% for i in [1, 2] %}{% for j in [1] %}{% if i == 1 %}{% continue %}{% endif %}{{ j }}{% endfor %}{% else %}empty{% endfor %}
{% for a, b in [[1, 2], (3, 4)] %}{{ a }}{{ b }}{% endfor %} {% for x in 1, 2, 3 %}{{ x }}{% endfor %} {% for m in messages if m.role == 'user' %}{{ m.content | trim }}{% endfor %}
{% for a, b in [[1, 2, 3]] %}{% endfor %}
{% for i in [1, 2] %}{{ i }}{% endfor %}{{ i is defined }}{{ loop is defined }}
{% if 0 %}a{% elif '' %}b{% elif [] %}c{% elif 'x' %}d{% else %}e{% endif %}{% if none %}f{% else %}g{% endif %}{% if messages %}h{% endif %}{% if 1, 2 %}i{% endif %}
{% macro m(a, b=2, c='x' ~ b) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c=5) }} {{ m(b=1, a=0) }} {{ m() }} {{ m(1) | upper }} {{ m(1) is string }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% set g = 'global' %}{% macro m() %}{{ g }}{{ local is defined }}{% set g = 'inner' %}{{ g }}{% endmacro %}{% for i in [1] %}{% set local = 1 %}{{ m() }}{% endfor %}{{ g }}{% set g = 'later' %}{{ m() }}
{% macro fact(n) %}{% if n <= 1 %}1{% else %}{{ n }}*{{ fact(n - 1) }}{% endif %}{% endmacro %}{{ fact(4) }}
{% macro m(a, b=0, c=0) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(*[1, 2]) }} {{ m(1, **{'c': 3}) }} {{ m(*(1, 2), c=4) }} {% set calls = [m, m] %}{{ calls[1](5) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(*[1, 2]) }}
{{ raise_exception('stop here') }}
{{ strftime_now('%Y-%m-%d %d %B %b %A %j %H:%M') }}
a {# comment {{ 1 }} #} b {#- trimmed -#} c
{% raw %}{{ not rendered }} {% if %}{% endraw %} after {%- raw -%}  x  {%- endraw -%}  y
{{ '}}' }} {{ '%}' }} {{ {'a': {'b': 1}} }} {{ {'a': {'b': 1}}['a']['b'] }} {{ "{{" }} {{ '{%' }}
{{- 1 -}}  x  {{- 2 }} {{ -1 }} {{ 1-1 }} {{ 3 -}} y
{{ [1, 2, ] }} {{ (1, ) }} {{ {'a': 1, } }} {{ range(0, 2, ) | list }}
{{ 0.0 % -1 }} {{ -6.0 % 3 }} {{ missing is callable }} {{ false | abs }} {{ 3.0 is odd }} {{ [1, 2] < [1, 3] }} {{ {1: 2, none: true} | tojson }} {{ 0 | select | list }} {{ missing | map('string') | list }}
{{ missing | int }}
{{ missing[1:] }}
{{ [1] in {} }}
{{ messages[0].role }} {{ messages[0]['role'] }} {{ messages.0.role }} {{ messages[-1]['content'] }} {{ (messages | last).role }} {{ messages[1:] | length }} {{ messages[0] == messages[2] }} {{ messages[0].get('name', 'no name') }} {{ messages[0].keys() | list }} {{ 'tool_calls' in messages[0] }}
{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ unk_token is defined }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}
{{ (1, 2) == [1, 2] }} {{ [1, [2]] == [1, [2]] }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ (1, 2) == (1, 2) }} {{ none == none }} {{ none == false }}
{{ [1, 2].index(2) }} {{ [1, 1].count(1) }}
{{ [1].append(2) }}
{{ {}.update({'a': 1}) }}
{{ 'x' | nosuchfilter }}
{{ 'x' is nosuchtest }}
{{ 'abc' | upper | lower | length | string ~ '!' }} {{ ('a' ~ 'b') | upper }} {{ 'a' ~ 'b' | upper }} {{ not 'a' | length == 1 }} {{ 1 | string + '2' }}
{{ 'a'.upper().lower() }} {{ ('a' + 'b').upper() }} {{ ['x', 'y'][0].upper() }} {{ 'a,b'.split(',')[1].strip().upper() }}
{{ 9223372036854775807 }} {{ 9223372036854775806 + 1 }} {{ -9223372036854775807 }}
{{ '%s' }} {{ '100%' }} {{ 'a' 'b' }}
{{ 1 if true else 2 ~ 3 }} {{ (1 if true else 2) ~ 3 }} {{ [1 if true, 2] }}
""".strip("\n").split("\n")


# White space control needs several lines each.
BLOCKS = [
    "{{ 1 +\n2 }} line {{ [\n1,\n2] }} {{ 'a\nb' }}",
    "{% if true %}\nkept\n{% endif %}\nafter\n",
    "   {% if true %}\n   indented\n   {% endif %}\nlast",
    "x {% if true %} y {% endif %} z\n\n",
    "  {%+ if true %}plus{% endif %}\n",
    "{% if true +%}\nplus{% endif %}\n",
    "a \n\n {%- if true -%} \n\n minus \n\n {%- endif -%} \n\n end",
    "a\n  {# comment #}\nb {# c #}\nc {#- d -#}\n d\n{#+ e +#}\nf",
    "\n\n{{ 1 }}\n\n{{ 2 }}\n",
    "\t {% set x = 1 %} \n{{ x }}\n\n",
    "{% for i in [1, 2] %}\n  {{ i }}\n  {%- if i == 1 %}\n one\n  {% endif %}\n{% endfor %}\nend\n",
    "a\r\nb\r{{ 'c\r\nd' }}\r\n",
    "  {{ 1 }}  \n  {{- 2 -}}  \n  3",
    "{% raw %}\n  {{ x }}\n  {% endraw %}\nafter",
    "  {% raw -%}\n  {{ x }}\n  {%- endraw +%}\nafter",
    "",
    "\n",
    "\n\n",
    "{{ 1 }}\n",
    "{#\n#}\n{#\n#}x",
    "{% macro a() %}\n  in\n{% endmacro %}\n[{{ a() }}]\n",
    "  {% set x %}\n  in\n  {% endset %}\n[{{ x }}]\n",
    "{% generation %}\n  x\n{% endgeneration %}\ny",
    "é {%- if true %} \u00a0 {%- endif %}\u2003{{- 1 }}",
]


class Generation(jinja2.ext.Extension):
    """{% generation %} as transformers has it: the body alone."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def environment():
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(text):
        raise jinja2.exceptions.TemplateError(text)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = TODAY.strftime
    return env


def case(env, name, template, messages, add_generation_prompt):
    try:
        expected = env.from_string(template).render(messages=messages, tools=None, documents=None,
                                                    add_generation_prompt=add_generation_prompt, **SPECIAL)
    except Exception:  # whatever Jinja raises, it does not render
        expected = None
    return {"name": name, "template": template, "messages": messages, "add_generation_prompt": add_generation_prompt,
            "expected": expected}


def main():
    env = environment()
    cases = [case(env, f"{name}: {conversation}{', prompt' if prompt else ''}", template, messages, prompt)
             for name, template in TEMPLATES.items()
             for conversation, messages in CONVERSATIONS.items()
             for prompt in (False, True)]
    cases += [case(env, f"snippet {i}", snippet, CONVERSATIONS["turns"], True)
              for i, snippet in enumerate([*SNIPPETS, *BLOCKS])]
    path = Path(__file__).resolve().parent / "chat_templates.json"
    path.write_text(json.dumps({"special_tokens": SPECIAL, "cases": cases}, indent=1, ensure_ascii=True) + "\n")
    refused = sum(one["expected"] is None for one in cases)
    print(f"{path.name}: {len(cases)} cases, {refused} of them refused by Jinja, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
