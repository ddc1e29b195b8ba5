"""The heads of prompts, and the order of schedulers that a head prefers."""

from collections import Counter

from pagewire.gateway.affinity import by_preference, prompt_head
from pagewire.v1 import inference_pb2 as pb
from support.scripted.routing import conversation

TARGETS = [f"10.0.0.{n}:50051" for n in range(5)]


def test_a_conversation_keeps_its_head() -> None:
    first = prompt_head(conversation("Hello"))
    assert prompt_head(conversation("Hello", "Hi", "More")) == first
    for other in (
        conversation("Hallo"),
        conversation("Hello", system="Be long."),
        conversation("Hello", model="other"),
    ):
        assert prompt_head(other) != first


def test_long_prompts_have_a_head() -> None:
    def of_text(prompt: str) -> bytes:
        return prompt_head(pb.GenerateRequest(prompt=prompt))

    def of_ids(tokens: list[int]) -> bytes:
        return prompt_head(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=tokens)))

    assert of_text("short") == of_ids([1, 2]) == b""
    assert of_text("x" * 600) == of_text("x" * 700) != b""
    assert of_text("y" + "x" * 600) != of_text("x" * 600)
    assert of_ids([7] * 200) == of_ids([7] * 300) != b""
    assert of_ids([8] + [7] * 200) != of_ids([7] * 200)


def test_a_target_that_leaves_changes_only_its_own_prompts() -> None:
    keys = [f"key {n}".encode() for n in range(2000)]
    before = {key: by_preference(key, TARGETS) for key in keys}
    preferred = Counter(order[0] for order in before.values())
    assert min(preferred.values()) > 300
    gone, rest = TARGETS[2], TARGETS[:2] + TARGETS[3:]
    for key in keys:
        assert by_preference(key, rest) == [target for target in before[key] if target != gone]


def test_a_cache_key_takes_the_place_of_the_prompt() -> None:
    def head(prompt: str, key: str | None, **fields: str) -> bytes:
        return prompt_head(pb.GenerateRequest(prompt=prompt, **fields), key)

    assert head("short", "agent") == head("another", "agent") != b""
    assert len({head("x", "a"), head("x", "b"), head("x", "a", model="m"), head("x", None)}) == 4
    assert head("x", "a", cache_salt="s") != head("x", "a")
    assert head("x" * 600, "") == head("x" * 600, None)


def test_the_documents_of_a_long_query_share_a_head() -> None:
    def of(query: str, document: str) -> bytes:
        return prompt_head(pb.GenerateRequest(pair=pb.TextPair(query=query, document=document)))

    assert of("short", "a") == b""
    assert of("long " * 200, "a") == of("long " * 200, "b") != b""
    assert of("long " * 200, "a") != of("other " * 200, "a")
