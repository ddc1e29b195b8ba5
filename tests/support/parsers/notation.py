"""A short notation for the events of an output: fixtures are pairs of a text and its events.

A string is content and `R("...")` reasoning. A tuple of a name and arguments is a call, a list of
both is a call that the end of the text cuts off.
"""

from pagewire.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)


class R(str):
    """Reasoning."""

    __slots__ = ()


Item = str | tuple[str, str] | list[str]
Case = tuple[str, list[Item]]
Types = dict[str, dict[str, frozenset[str]]]


def shortened(events: list[Event]) -> list[Item]:
    """Events in this notation, with neighbouring pieces of the same kind joined."""
    items: list[Item] = []
    ended = False
    for event in events:
        if isinstance(event, Content | Reasoning):
            kind = R if isinstance(event, Reasoning) else str
            if items and type(items[-1]) is kind:
                items[-1] = kind(items[-1] + event.text)
            else:
                items.append(kind(event.text))
        elif isinstance(event, CallBegin):
            assert event.index == sum(not isinstance(item, str) for item in items)
            items.append([event.name, ""])
            ended = False
        elif isinstance(event, CallArguments):
            call = items[-1]
            assert isinstance(call, list)
            assert not ended
            call[1] += event.json
        else:
            assert isinstance(event, CallEnd)
            name, arguments = items[-1]
            items[-1] = (name, arguments)
            ended = True
    return items


# Arguments as models write them: nesting, brackets and tags in strings, escapes, white space.
ARGUMENTS = (
    "{}",
    "{ }",
    '{"a": 1}',
    '{"a":-1.5e10,"b":true,"c":null}',
    '{"a": "x", "b": "y"}',
    '{"a": {"b": {"c": [1, [2, {"d": []}]]}}}',
    '{"a": []}',
    '{"a": [{}, {"b": {}}]}',
    '{"brace": "}"}',
    '{"open": "{{{[["}',
    '{"close": "]}]}"}',
    '{"quote": "say \\"}\\" now"}',
    '{"backslash": "C:\\\\"}',
    '{"both": "\\\\\\""}',
    '{"unicode": "\\u00e9\\u4e2d"}',
    '{"pair": "\\ud83d\\ude00"}',
    '{"half": "\\ud83d"}',
    '{"text": "héllo 中 🙂"}',
    '{"lines": "a\\nb\\tc"}',
    '{\n  "pretty": 1,\n  "list": [\n    1\n  ]\n}',
    '{"empty": ""}',
    '{"code": "def f():\\n    return {\\"a\\": [1]}"}',
    '{"html": "<b>x</b></tool_call>"}',
    '{"tag": "<tool_call>{}</tool_call>"}',
    '{"sql": "select \'a\' -- }"}',
    '{"": "no key"}',
    '{"slash": "a\\/b"}',
    '{"deep": ' + '{"x": ' * 30 + "1" + "}" * 31,
)
