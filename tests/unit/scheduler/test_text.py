"""Tokenizer, incremental decoding, stop strings and chat templates of the scheduler."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import Code, RequestError
from pagewire.packing import unpack, unpack_floats
from pagewire.sampling import SamplingParams
from pagewire.scheduler.requests.parsing import parse_request
from pagewire.scheduler.requests.prompt import ModelLimits
from pagewire.scheduler.text.chat_template import ChatTemplate
from pagewire.scheduler.text.detokenizer import ByteLevelDetokenizer, PrefixDetokenizer
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import (
    TokenIdsOnly,
    Tokenizer,
    TooManyTokensError,
)
from pagewire.v1 import inference_pb2 as pb
from support.models.tokenizer_folders import (
    CORPUS,
    byte_fallback_folder,
    byte_level_folder,
    partial_byte_level_folder,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


def test_each_kind_has_its_detokenizer(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert isinstance(byte_level.detokenizer(), ByteLevelDetokenizer)
    assert isinstance(byte_fallback.detokenizer(), PrefixDetokenizer)


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.7, "top_k": null, "repetition_penalty": 1.05, "no_repeat_ngram_size": 3}'
    )
    defaults = Tokenizer(folder).default_sampling
    assert defaults == SamplingParams(temperature=0.7, repetition_penalty=1.05)
    given = pb.SamplingParams(temperature=0, top_p=0.5, repetition_penalty=1, logit_bias={3: 2})
    resolved = SamplingParams(temperature=0, top_p=0.5, logit_bias={3: 2})
    assert SamplingParams.from_proto(given, defaults) == resolved
    assert SamplingParams.from_proto(pb.SamplingParams(), defaults).temperature == 0.7


def test_biases_travel_in_the_order_of_their_ids(byte_level: Tokenizer) -> None:
    limits = ModelLimits(max_model_len=100, max_pool_tokens=100, vocab_size=10)
    message = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1]))
    message.sampling.logit_bias.update({7: 0, 9: 1.5, 3: -2})  # 0 is no bias
    sampling = parse_request(message, byte_level, limits).sampling
    assert unpack(sampling.bias_ids).tolist() == [3, 9]
    assert unpack_floats(sampling.biases).tolist() == [-2.0, 1.5]


def test_bytes_of_tokens_are_those_of_the_text(byte_level: Tokenizer) -> None:
    for text in CORPUS:
        data = [byte_level.token_bytes(token) for token in byte_level.encode(text).tolist()]
        assert b"".join(data) == text.encode()
        assert all(data)


def test_bytes_of_single_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    (end,) = byte_level.encode("<|end|>").tolist()
    assert byte_level.token_bytes(end) == b"<|end|>", "a special token, which texts leave out"
    assert byte_level.token_bytes(10**6) == b""
    ids = {name: byte_fallback._backend.token_to_id(name) for name in ("▁The", "fox", "▁", "</s>")}
    data = [byte_fallback.token_bytes(token) for token in ids.values()]
    assert data == [b" The", b"fox", b" ", b"</s>"]
    assert (
        b"".join(map(byte_fallback.token_bytes, byte_fallback.encode("é").tolist()))
        == " é".encode()
    )


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_are_the_full_text_for_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", CORPUS)
def test_a_character_is_never_split(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["a", "ab ", "hello", " ", "\n", "é", "e\u0301", "🙂", "<|end|>", "<|end", "0", "?!"]
        ),
        max_size=400,
    ).map("".join),
    times=st.sampled_from([1, 1, 40]),
    limit=st.integers(1, 60),
)
def test_a_text_is_refused_for_its_tokens_only_if_it_has_too_many(
    tokenizer: Tokenizer, text: str, times: int, limit: int
) -> None:
    """However its beginning looks: what is proved from that is true of the whole."""
    text *= times
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
        assert tokenizer.encode(text, limit=limit).tolist() == ids.tolist()
    else:
        with pytest.raises(TooManyTokensError):
            tokenizer.encode(text, limit=limit)


@pytest.mark.parametrize("unknown", [None, "<unk>"], ids=["left out", "one for all"])
def test_bytes_without_a_token_are_not_counted(tmp_path: Path, unknown: str | None) -> None:
    folder = partial_byte_level_folder(tmp_path, unknown)
    for text in ("ab" + "~" * 10_000, "~" * 5_000 + "ab"):
        ids = Tokenizer(folder).encode(text).tolist()
        assert len(ids) <= 3
        assert Tokenizer(folder).encode(text, limit=3).tolist() == ids


@pytest.mark.parametrize("piece", ["a", "ab ", "🙂", "hello world\n"])
def test_too_many_tokens_are_proved_from_the_beginning(
    byte_level: Tokenizer, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of millions of characters is not encoded as a whole."""
    encoded: list[int] = []
    backend = byte_level._backend

    class Counting:
        normalizer = None

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            encoded.append(len(text))
            return backend.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(byte_level, "_backend", Counting())
    with pytest.raises(TooManyTokensError):
        byte_level.encode(piece * (1_000_000 // len(piece)), limit=500)
    assert sum(encoded) < 10_000


def test_ids_without_a_token_do_not_lengthen_the_window(byte_fallback: Tokenizer) -> None:
    """A model may know more ids than its tokenizer; many in a row must not take longer each."""
    decoded: list[int] = []
    backend = byte_fallback._backend

    class Counting:
        id_to_token = staticmethod(backend.id_to_token)

        def decode(self, ids: list[int], skip_special_tokens: bool) -> Any:
            decoded.append(len(ids))
            return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = PrefixDetokenizer(Counting(), frozenset(), frozenset())  # type: ignore[arg-type]
    hello = backend.token_to_id("▁hello")
    ids = [hello, *[byte_fallback.vocab_size + 5] * 1000, hello]
    text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
    assert text == byte_fallback.decode(ids) == "hello hello"
    assert max(decoded) <= 2


def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|start|>hi<|end|>").tolist()
    assert "".join(pieces_of(byte_level, ids)) == "hi"


def test_eos_comes_from_the_model_folder(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == (byte_level.encode("<|end|>").tolist()[0],)


def stream(tokenizer: Tokenizer, stop: tuple[str, ...], include: bool = False) -> TextStream:
    return TextStream(tokenizer.detokenizer(), stop, include)


def run_until_stop(text_stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(text_stream.feed(token))
        if text_stream.stop_string is not None:
            return pieces
    return [*pieces, text_stream.flush()]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abcé🙂", max_size=30),
    stop=st.lists(st.text(alphabet="abcé🙂", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_the_first_is_complete(
    byte_level: Tokenizer, text: str, stop: list[str], include: bool
) -> None:
    text_stream = stream(byte_level, tuple(stop), include)
    pieces = run_until_stop(text_stream, byte_level.encode(text).tolist())
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        assert text_stream.stop_string is None
        assert "".join(pieces) == text
        return
    found = text_stream.stop_string
    assert found in stop
    got = "".join(pieces)
    kept = got if include else got + found
    assert text.startswith(kept)
    assert kept.endswith(found)
    assert not any(s in kept[: len(kept) - len(found)] for s in stop)


class Pieces:
    """A detokenizer whose token n has the nth piece as its text; `rest` comes with the flush."""

    at_character = True

    def __init__(self, *pieces: str, rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def feed(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._rest


@pytest.mark.parametrize("stop", [("bcde", "cd"), ("cd", "bcde")])
def test_of_stop_strings_within_one_token_the_first_complete_one_wins(
    stop: tuple[str, ...],
) -> None:
    """`bcde` begins earlier, `cd` is complete earlier: one character a token would find `cd`."""
    text_stream = TextStream(Pieces("abcdef"), stop, include_stop=False)
    assert text_stream.feed(0) == "ab"
    assert text_stream.stop_string == "cd"


@pytest.mark.parametrize("stop", [("bcd", "d"), ("d", "bcd")])
def test_of_stop_strings_complete_at_one_place_the_earlier_begun_wins(
    stop: tuple[str, ...],
) -> None:
    text_stream = TextStream(Pieces("abcdef"), stop, include_stop=False)
    assert text_stream.feed(0) == "a"
    assert text_stream.stop_string == "bcd"


@pytest.mark.parametrize(("include", "rest"), [(False, "x"), (True, "x end")])
def test_a_stop_string_that_only_the_flush_completes(include: bool, rest: str) -> None:
    text_stream = TextStream(Pieces("some x", " e", rest="nd of it"), (" end",), include)
    assert text_stream.feed(0) + text_stream.feed(1) == "some x"
    assert text_stream.flush() == rest.removeprefix("x")
    assert text_stream.stop_string == " end"
    assert text_stream.flush() == ""


def test_text_that_may_begin_a_stop_string_is_held_back(byte_fallback: Tokenizer) -> None:
    text_stream = stream(byte_fallback, ("abba",))
    ids = [byte_fallback.encode(c).tolist()[-1] for c in "eabbe"]
    assert [text_stream.feed(token) for token in ids] == ["e", "", "", "", "abbe"]


def test_a_replayed_beginning_stands_where_the_first_run_stood(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂b stop here").tolist()
    first = stream(byte_level, ("op x",))
    pieces = [first.feed(token) for token in ids]
    rest = first.flush()
    assert "".join(pieces) + rest == "a🙂b stop here"
    for cut in range(len(ids) + 1):
        resumed = stream(byte_level, ("op x",))
        for token in ids[:cut]:
            resumed.feed(token)
        assert [resumed.feed(token) for token in ids[cut:]] == pieces[cut:]
        assert resumed.flush() == rest


def test_chat_template_renders(byte_level: Tokenizer) -> None:
    assert byte_level.chat_template is not None
    text = byte_level.chat_template.render([{"role": "user", "content": "hi"}], True, {})
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_chat_template_refusals_reach_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([], False, {})
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "messages"


@pytest.mark.parametrize("number", [0, 10**7, "many", None])
def test_whatever_a_template_cannot_compute_is_refused(number: object) -> None:
    template = ChatTemplate("{% for i in range(n) %}{{ 9 // n }}{% endfor %}{{ 9 // n }}", {})
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render([], True, {"n": number})


def test_chat_template_cannot_reach_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(RequestError):
        template.render([], False, {})


def test_chat_template_sees_special_tokens_and_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render([], True, {"enable_thinking": False}) == "<s>False"


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    ids_only = TokenIdsOnly(tmp_path)
    assert ids_only.eos_token_ids == (7, 8)
    for refused in (
        ids_only.detokenizer,
        lambda: ids_only.encode("a"),
        lambda: ids_only.decode([1]),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            refused()


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
