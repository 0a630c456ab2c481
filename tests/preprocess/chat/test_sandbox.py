"""The sandbox of chat templates allows what Jinja's does, and forbids the same."""

import pytest
from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from trackbed.preprocess.chat.sandbox import compile_template

MESSAGES = [
    {"role": "user", "content": "  Hi {} ", "items": "own", "_hidden": 1, "tags": ["a", "b"]},
    {"role": "assistant", "content": "Ho", "nested": {"get": 2, "deep": {"x": None}}},
]
ALLOWED = [
    "{{ messages[0].role }} {{ messages[0]['content'].strip() }} {{ messages[0].content.split('i') }}",
    "{{ messages[0].items() | list | length }} {{ messages[1].nested.get }} {{ messages[1].nested.deep.x }}",
    "{{ messages[0].missing is defined }} {{ messages[0].missing }} {{ messages[0].content.missing is defined }}",
    "{{ messages[0]._hidden }} {{ messages[0]['_hidden'] }} {{ messages[0]['items'] }}",
    "{{ messages[0].content.format(7) }} {{ '{x}'.format_map({'x': 3}) }} {{ 'a'.join(['1', '2']) }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role) }}{{ loop._iterable }}{% endfor %}",
    "{% set ns = namespace(n=1, t='x', d={}) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.t.upper() }}{{ ns.d.k }}",
    "{{ messages[0].tags.index('b') }} {{ messages[0].tags.count('a') }} {{ namespace(a=1).missing is defined }}",
    "{{ '{0.__class__}'.format is defined }} {{ ''.__class__ is defined }} {{ messages.append is defined }}",
]
FORBIDDEN = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].tags.clear() }}",
    "{{ '{0.__class__.__mro__}'.format('x') }}",
    "{{ messages[0].content.__class__.__base__ }}",
    "{{ raise_exception.__globals__.x }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ namespace(a=1).__class__.__mro__ }}",
]


def ours(source):
    return compile_template(source, marks=("<", ">"), day=None)


@pytest.mark.parametrize("source", ALLOWED)
def test_templates_get_the_same_values_as_in_the_sandbox_of_jinja(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ours(source).render(messages=MESSAGES) == plain.from_string(source).render(messages=MESSAGES)


@pytest.mark.parametrize("source", FORBIDDEN)
def test_what_the_sandbox_of_jinja_forbids_is_forbidden(source):
    plain = ImmutableSandboxedEnvironment()
    plain.globals["raise_exception"] = test_what_the_sandbox_of_jinja_forbids_is_forbidden
    for template in (plain.from_string(source), ours(source)):
        with pytest.raises((SecurityError, UndefinedError)):
            template.render(messages=MESSAGES)
    assert MESSAGES[0]["tags"] == ["a", "b"]


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{{ m.role }}"
        "{% endfor %}",
        "{% macro say(m) %}a{% generation %}{{ m.role }}{% endgeneration %}b{% endmacro %}{{ say(messages[0]) }}",
        "{% set t %}a{% generation %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
        "{% endfor %}{% endgeneration %}{% endset %}{{ t }}",
        "{% generation %}{{ missing }}{% set y = 'z' %}{{ y }}{% endgeneration %}{{ y }}",
    ],
)
def test_blocks_of_generation_are_those_of_transformers(source):
    texts, spans = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, return_assistant_tokens_mask=True
    )
    found = ours(source).render(messages=MESSAGES)
    assert found.replace("<", "").replace(">", "") == texts[0]
    if "endset" not in source and "macro" not in source:  # transformers places those elsewhere
        assert [part.split(">")[0] for part in found.split("<")[1:]] == [
            texts[0][start:stop] for start, stop in spans[0]
        ]


def test_a_loop_does_not_end_inside_of_a_block_of_generation():
    with pytest.raises(TemplateSyntaxError, match="break and continue must not leave a block generation"):
        ours("{% for m in messages %}{% generation %}{% if m %}{% break %}{% endif %}{% endgeneration %}{% endfor %}")
