"""The byte-level BPE tokenizer: its training, its files, and the text of a document.

Every byte is in the vocabulary, so any UTF-8 text is encoded and decoded unchanged.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.embedded_model.corpus import Document

PAD, END_OF_TEXT, TURN_END, TURN_START = "<|pad|>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"
SPECIAL = (PAD, END_OF_TEXT, TURN_END, TURN_START)  # their ids are 0, 1, 2, 3
PAD_ID, END_OF_TEXT_ID, TURN_END_ID, TURN_START_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') | trim "
    "+ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(document: Document) -> str:
    """The training text of a document: a chat as the template renders it, or its plain text.

    It ends with the end-of-text token, which separates documents in a packed row.
    """
    if document.text:
        return document.text + END_OF_TEXT
    turns = "".join(
        f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in document.messages
    )
    return turns + END_OF_TEXT


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        text
        for document in documents
        for text in (document.text, *(m["role"] + "\n" + m["content"] for m in document.messages))
    )
    tokenizer.train_from_iterator(texts, trainer)
    for role in ("system", "user", "assistant"):
        if len(tokenizer.encode(role).ids) != 1:
            raise ValueError(f"role {role!r} is not a single token: train on more documents")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": [TURN_START],
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
