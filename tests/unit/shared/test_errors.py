"""Errors that are reported to clients."""

import copy
import pickle

from pagewire.errors import Code, RequestError


def test_an_error_can_be_sent_to_another_process() -> None:
    error = RequestError(
        code=Code.UNAVAILABLE, message="m", field="f", retry_after=2.5, reason="draining"
    )
    assert pickle.loads(pickle.dumps(error)) == copy.copy(error) == error
