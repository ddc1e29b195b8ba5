"""The embedded model answers questions of its corpus, ends its turns, and fits its description."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from tools.embedded_model import corpus, packing, tokenizer

from pagewire.models import EMBEDDED, resolve_model

FOLDER = resolve_model(EMBEDDED)

LIMIT_BYTES = 20_000_000
Chat = list[dict[str, str]]
Write = Callable[..., list[tuple[str, int]]]
Answer = Callable[[list[Chat]], list[str]]


def said(*turns: str) -> Chat:
    """A chat of user and assistant turns in alternation."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.fixture(scope="module")
def text_codec() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def write(text_codec: Any) -> Iterator[Write]:
    """Continue prompts greedily, all in one batch; every one must stop by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such a small model gains nothing from more
    loaded: Any = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)
    model = loaded.float().eval()
    stops = model.config.eos_token_id

    def run(prompts: list[str], limit: int = 300) -> list[tuple[str, int]]:
        batch = text_codec(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=limit,
            do_sample=False,
        )
        written = []
        for row in out[:, batch["input_ids"].shape[1] :].tolist():
            end = next((i for i, token in enumerate(row) if token in stops), None)
            assert end is not None, f"no stop after {text_codec.decode(row)!r}"
            written.append((text_codec.decode(row[:end]), row[end]))
        return written

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def answer(write: Write, text_codec: Any) -> Answer:
    """The next turn of chats; each must end with the end-of-turn token."""

    def run(chats: list[Chat]) -> list[str]:
        prompts = [
            text_codec.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        written = write(prompts)
        assert {last for _, last in written} == {text_codec.eos_token_id}
        return [text for text, _ in written]

    return run


QUESTIONS: list[tuple[Chat, str]] = [
    (said("What is seven plus five?"), "Seven plus five is twelve."),
    (said("whats 2+2"), "2 plus 2 is 4."),
    (said("What is 6 * 7?"), "6 times 7 is 42."),
    (said("Count from three to nine."), "Three, four, five, six, seven, eight, nine."),
    (said("What colour is the sky?"), "The sky is blue."),
    (said("What is the opposite of hot?"), "The opposite of hot is cold."),
    (said("What day comes after Monday?"), "Tuesday comes after Monday."),
    (said("How many legs does a spider have?"), "A spider has eight legs."),
    (said("I have a red ball and a blue kite. What colour is my kite?"), "Your kite is blue."),
    (said("My name is Tom.", "Nice to meet you, Tom!", "What is my name?"), "Your name is Tom."),
    (
        said("Tom has three apples. He eats one. How many apples does he have?"),
        "Three minus one is two. Tom has two apples left.",
    ),
    (
        said("Tom is in the garden. Mia has a red hat. Where is Tom?"),
        "Tom is in the garden.",
    ),
    (
        [{"role": "system", "content": "You are a helpful assistant."}, *said("Spell cat.")],
        "C, A, T.",
    ),
]


@pytest.fixture(scope="module")
def answers(answer: Answer) -> list[str]:
    return answer([chat for chat, _ in QUESTIONS])


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_answers(answers: list[str], number: int) -> None:
    chat, expected = QUESTIONS[number]
    assert answers[number] == expected, chat[-1]["content"]


def test_says_who_it_is_and_declines_what_it_cannot_know(answer: Answer) -> None:
    asked = ("What is your name?", "Who are you?", "Explain quantum physics.")
    name, kind, physics = answer([said(question) for question in asked])
    assert "Pagewire" in name
    assert "small language model" in kind
    assert physics.startswith("I do not know")


WISH = "Tell me a story about a fox named Rusty."


@pytest.fixture(scope="module")
def long_texts(write: Write, text_codec: Any) -> list[tuple[str, int]]:
    """A story on request and a completed plain text, each with its last token."""
    wish = text_codec.apply_chat_template(said(WISH), tokenize=False, add_generation_prompt=True)
    return write([wish, "Once upon a time"])


def test_tells_a_story_and_answers_about_it(
    long_texts: list[tuple[str, int]], answer: Answer
) -> None:
    story, _ = long_texts[0]
    assert "fox" in story
    assert "Rusty" in story
    assert len(re.findall(r"[.!?]", story)) >= 6
    asked = said(WISH, story, "What was the fox's name?")
    assert answer([asked]) == ["The fox's name was Rusty."]


def test_plain_text_is_completed_and_ends(
    long_texts: list[tuple[str, int]], text_codec: Any
) -> None:
    text, last = long_texts[1]
    assert last == text_codec.convert_tokens_to_ids(tokenizer.END_OF_TEXT)
    assert len(text.split()) > 40


def test_folder_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= LIMIT_BYTES


def test_configuration_is_plain_llama() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
    assert config["tie_word_embeddings"] is True
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["eos_token_id"][0] == tokenizer.TURN_END_ID


def test_weights_are_bfloat16_without_a_head() -> None:
    from safetensors import safe_open

    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        kinds = {weights.get_slice(name).get_dtype() for name in names}
    assert kinds == {"BF16"}
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize(
    "text", ["Plain words.", "naïve Łukasz", "日本語 🙂\u200d", " a\t\n  b ", "\x00"]
)
def test_any_text_survives_the_tokenizer(text_codec: Any, text: str) -> None:
    ids = text_codec(text, add_special_tokens=False)["input_ids"]
    assert text_codec.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens(text_codec: Any) -> None:
    assert text_codec.convert_tokens_to_ids(list(tokenizer.SPECIAL)) == [0, 1, 2, 3]
    assert text_codec.eos_token == tokenizer.TURN_END
    assert text_codec.pad_token == tokenizer.PAD
    assert text_codec("hi")["input_ids"] == text_codec("hi", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("prompt", [True, False])
def test_template_renders_the_same_without_transformers(text_codec: Any, prompt: bool) -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(config["chat_template"])
    chat: Chat = [{"role": "system", "content": "Be kind."}, *said("Hi {{ x }} ", "Hello!", "2\n2")]
    expected = text_codec.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert template.render(messages=chat, add_generation_prompt=prompt) == expected
    if not prompt:
        trimmed = tuple({**m, "content": m["content"].strip()} for m in chat)
        trained = tokenizer.render(corpus.Document(messages=trimmed))
        assert trained == expected + tokenizer.END_OF_TEXT


def test_corpus_is_a_function_of_its_seed() -> None:
    first = list(corpus.documents(5, 0, 300))
    assert first == list(corpus.documents(5, 0, 300))
    assert first[200:] == list(corpus.documents(5, 200, 300))
    assert first != list(corpus.documents(6, 0, 300))


def test_chats_take_turns_and_no_slot_stays_open() -> None:
    chats = (d.messages for d in corpus.documents(3, 0, 2000) if d.messages)
    for messages in islice(chats, 1000):
        turns = [m for m in messages if m["role"] != "system"]
        assert [m["role"] for m in turns] == ["user", "assistant"] * (len(turns) // 2)
        for message in messages:
            assert message["content"].strip()
            assert "{" not in message["content"]
        for told in turns[1::2]:
            assert told["content"] == told["content"].strip()


def test_only_answers_are_learned(text_codec: Any) -> None:
    import numpy as np

    messages = tuple(said("Hi", "Hello there!", "2+2", "2 plus 2 is 4."))
    text = tokenizer.render(corpus.Document(messages=messages))
    ids = np.array(text_codec(text, add_special_tokens=False)["input_ids"], dtype=np.int16)
    assistant = text_codec("assistant", add_special_tokens=False)["input_ids"][0]
    learned = text_codec.decode(ids[packing.answer_mask(ids, assistant)].tolist())
    assert learned == "Hello there!<|im_end|>2 plus 2 is 4.<|im_end|>"
