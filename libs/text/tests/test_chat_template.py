"""Templates are programs of strangers."""

from __future__ import annotations

import datetime

import pytest

from headrace.base.errors import InvalidRequest, StartError
from headrace.text.chat_template import ChatTemplate

TURN = [{"role": "user", "content": "hi <b>"}]


def test_a_template_sees_its_usual_helpers() -> None:
    source = "{{ bos_token }}{{ messages[0].content | tojson }}{{ add_generation_prompt }}{{ tools is none }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TURN) == '<s>"hi <b>"TrueTrue'
    year = datetime.datetime.now().astimezone().year
    assert int(ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TURN)) in (year, year + 1)


def test_loop_controls_and_generation_marks_work() -> None:
    loop = "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert ChatTemplate(loop, {}).render(TURN) == "1"
    marked = "a{% generation %}{{ messages[0].role }}{% endgeneration %}b"
    assert ChatTemplate(marked, {}).render(TURN) == "auserb"


def test_a_refusal_of_the_template_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(TURN)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ [] | first.x }}",
        "{{ 'x'.index('y') }}",
        "{{ messages.a.b }}",
    ],
)
def test_a_template_that_fails_on_a_conversation_is_no_crash(source: str) -> None:
    with pytest.raises((InvalidRequest, StartError)):
        ChatTemplate(source, {}).render(TURN)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(TURN)


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(StartError, match="does not compile"):
        ChatTemplate("{% if %}", {})
