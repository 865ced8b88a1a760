"""Templates are somebody's programs: each ends, in a text or in a typed error, within the memory a text explains."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest, ModelFileError
from paceline.store import chat_template
from paceline.store.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CHAT = [{"role": "user", "content": "hello"}]
BOUND = 64 << 20


def template(source: str) -> ChatTemplate:
    return ChatTemplate(Path("m.gguf"), source, {})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "ALLOWANCE", 200_000)


LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops that skip": "{% for i in range(99999) if false %}{% endfor %}" * 10,
    "a skipping loop in a loop": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in [range(99999)] recursive %}{{ loop([range(99999)]) if i else '' }}{% endfor %}",
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "sums in a loop": LOOP + "{{ range(99999)|sum }}{% endfor %}",
    "lists in a loop": "{% set r = range(99999)|list %}" + LOOP + "{{ r|sort|length }}{% endfor %}",
    "a text doubled by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a text doubled by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a text doubled by writing": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "a text doubled by replacing": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "a text doubled by the filter": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
    "a text joined": "{{ ('x' * 999999).join(range(99999)|map('string')|list) }}",
    "a text multiplied": "{{ 'a' * 10**11 }}",
    "a list multiplied": "{{ 10**9 * [0] }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a power of a power": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a width for %": "{{ '%99999999999d' % 1 }}",
    "a width given to %": "{{ '%*d' % (9999999999, 1) }}",
    "a width for the filter": "{{ '%99999999999d'|format(1) }}",
    "a width for format": "{{ '{:>99999999999}'.format(1) }}",
    "a width for center": "{{ 'a'|center(10**11) }}",
    "a width for ljust": "{{ 'a'.ljust(10**11) }}",
    "an indent": "{{ [1]|tojson(indent=10**11) }}",
    "a batch": "{{ [1]|batch(10**11, 0)|list }}",
    "a range": "{{ range(10**9)|list }}",
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_every_template_ends(source: str) -> None:
    one = template(source)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="chat template refuses"):
            one.render(CHAT, NOW)
        assert tracemalloc.get_traced_memory()[1] < BOUND
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler() }}",
        "{{ [1]|slice(0)|list }}",
        "{% set d = {'a': 1} %}{% for k in d %}{{ d.update({k: 2}) }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '%c' % -1 }}",
        "{{ nothing.at.all }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_raises_is_typed(source: str) -> None:
    with pytest.raises(InvalidRequest):
        template(source).render(CHAT, NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% for",
        " " * (MAX_TEMPLATE_CHARS + 1),
    ],
    ids=["blocks", "indents", "brackets", "half", "length"],
)
def test_what_can_not_be_compiled_is_damaged(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        template(source)


def test_long_chats_stay_within_the_allowance() -> None:
    source = (
        "{% for m in messages if m.role != 'tool' %}{% if loop.first and m['role'] == 'system' %}{% set s = m['content']|trim %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' ~ m['content'].strip().split('</think>')[-1].lstrip('\n') | trim }}<|im_end|>\n{% endfor %}"
    )
    many = [{"role": "user", "content": "word " * 20} for _ in range(20_000)]
    long = [{"role": "user", "content": "word " * 400_000}]
    assert template(source).render(many, NOW).count("<|im_start|>") == 20_000
    assert template(source).render(long, NOW).count("word") == 400_000


def test_each_render_has_an_allowance_of_its_own(small: None) -> None:
    one = template("{% for i in range(9999) %}{{ i }}{% endfor %}")
    assert len({one.render(CHAT, NOW) for _ in range(20)}) == 1


def test_loops_read_as_jinja_writes_them() -> None:
    source = (
        "{% for x in [1, 2, 3, 4] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ ',' if not loop.last }}{% else %}none{% endfor %}"
        "{% for x in [] %}{% else %} none{% endfor %}"
        "{% for x in [[1, [2, 3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{{ 2 ** 10 }} {{ 7 % 4 }} {{ '%s-%d' % ('a', 3) }} {{ 'ab' * 2 }} {{ 1 ~ none }} {{ [3, 1]|sort|join('+') }}"
    )
    assert template(source).render(CHAT, NOW) == "1/3:1,2/3:3,3/3:4 none1231024 3 a-3 abab 1None 1+3"
