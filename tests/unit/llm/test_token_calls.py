"""Calls between text and token ids: what is sent, and what is refused."""

import pytest

from pagewire.llm import RequestError
from pagewire.llm.token_calls import detokenize_request, tokenize_request


def test_what_is_sent():
    call = tokenize_request("hi", False)
    assert (call.text, call.add_special_tokens) == ("hi", False)
    for given in ([1, 2], (1, 2), range(1, 3)):
        call = detokenize_request(given, True, 3)
        assert (list(call.token_ids), call.skip_special_tokens) == ([1, 2], True)
    assert list(detokenize_request([], True, 3).token_ids) == []


@pytest.mark.parametrize(
    ("text", "special", "reason"),
    [
        (None, True, "text is of type NoneType; give one text"),
        (["a"], True, "text is of type list"),
        ("\ud800", True, "half of a pair of surrogates"),
        ("a", "no", "add_special_tokens is 'no'; give True or False"),
    ],
)
def test_texts_that_are_refused(text, special, reason):
    with pytest.raises(RequestError, match=reason):
        tokenize_request(text, special)


@pytest.mark.parametrize(
    ("token_ids", "skip", "reason"),
    [
        ("abc", True, "token_ids is of type str; give a list of token ids"),
        (7, True, "token_ids is of type int"),
        ([1, 1.5], True, r"token_ids\[1\] is 1.5; give a list of token ids"),
        ([-1], True, r"token_ids\[0\] is -1, and the model has the ids 0 to 2; remove it"),
        ([2, 3], True, r"token_ids\[1\] is 3, and the model has"),
        ([1], None, "skip_special_tokens is None; give True or False"),
    ],
)
def test_token_ids_that_are_refused(token_ids, skip, reason):
    with pytest.raises(RequestError, match=reason):
        detokenize_request(token_ids, skip, 3)
