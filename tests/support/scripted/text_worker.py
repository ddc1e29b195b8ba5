"""The `pagewire` command with a simulated worker that writes the text that the prompt asks for.

`ask(text)` of `asked_text` is the content of a message that makes the model answer with `text`. The
worker reads the prompt only from the KV of its blocks, which holds tokens here. So a resumed answer
continues only if all KV before it is right.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import pagewire.simulator.worker as worker
from pagewire.cli.main import main
from pagewire.config import SimulatedWorkerConfig
from pagewire.models import resolve_model
from pagewire.packing import Int32Array
from pagewire.simulator.backend import Hashes, SimulatedBackend
from pagewire.worker.protocol.steps.device_plan import Chunks
from support.models.tokenizer_folders import CORPUS
from support.processes.fleet import TESTS, Fleet, running_fleet
from support.scripted.asked_text import asked_text

PROGRAM = ("-m", "support.scripted.text_worker")
# Renders tools, calls, answers and reasoning in the manner of Qwen 3.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content is not none %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]")


# Renders calls, answers and reasoning in the manner of gpt-oss.
HARMONY_TEMPLATE = """\
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.thinking }}<|end|>{% endif %}
{%- for call in message.tool_calls %}<|start|>assistant to=functions.{{ call.function.name -}}
<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
HARMONY_SPECIAL = (
    *("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    "<|call|>",
)


def text_model_folder(
    folder: Path, template: str = CHAT_TEMPLATE, special: tuple[str, ...] = SPECIAL
) -> Path:
    """A model folder for such a worker: a tokenizer with special tokens, and a chat template.

    `<|im_end|>` or `<|return|>` ends an answer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>" if special is SPECIAL else "<|return|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@asynccontextmanager
async def text_fleet(
    folder: Path,
    template: str = CHAT_TEMPLATE,
    special: tuple[str, ...] = SPECIAL,
    scheduler_flags: tuple[str, ...] = (),
) -> AsyncIterator[Fleet]:
    """A gateway, a scheduler and a worker whose model is called `text`."""
    model = text_model_folder(folder, template, special)
    flags = (f"--model={model}", "--served-model-name=text")
    worker = (
        "simulated-worker",
        *flags,
        "--profile=h200-qwen3-0.6b",
        "--speedup=0.15",
        "--num-blocks=2000",
        "--num-slots=32",
        "--max-model-len=8192",
    )
    os.environ["PYTHONPATH"] = str(TESTS)
    async with running_fleet(
        1,
        worker_command=worker,
        scheduler_flags=(*flags, *scheduler_flags),
        program=PROGRAM,
        proxied=False,
    ) as started:
        yield started


class TextBackend(SimulatedBackend):
    """Writes the asked text, then the end token. The KV of a position is its token."""

    tokenizer: Tokenizer
    end: int

    def _decode(self, slots: Int32Array, positions: Int32Array) -> Hashes:
        self._write(slots, positions, self._last[slots].astype(np.uint64))
        return (positions + 1).astype(np.uint64)

    def _prefill(self, chunks: Chunks) -> Hashes:
        counts = np.diff(chunks.starts)
        slots = np.repeat(chunks.slots, counts)
        self._write(slots, chunks.positions, chunks.tokens.astype(np.uint64))
        return (chunks.positions + 1).astype(np.uint64)

    def _draw(self, slots: Int32Array, indices: Int32Array, histories: Hashes) -> Int32Array:
        """`histories` are the lengths of the sequences, which begin with their prompts."""
        rows = zip(slots.tolist(), indices.tolist(), histories.tolist(), strict=True)
        return np.array([self._token(*row) for row in rows], np.int32)

    def _token(self, slot: int, index: int, length: int) -> int:
        positions = np.arange(length, dtype=np.int32)
        tokens = self._read(np.full(length, slot, np.int32), positions).astype(np.int32)
        prompt, output = tokens[: length - index].tolist(), tokens[length - index :].tolist()
        text = asked_text(self.tokenizer.decode(prompt, skip_special_tokens=False))
        said = self.tokenizer.encode(text, add_special_tokens=False).ids
        if output != said[:index]:
            return int(self.tokenizer.token_to_id("?"))  # a wrong history
        return int(said[index]) if index < len(said) else self.end


def _install() -> None:
    serve = worker._serve

    async def serve_text(config: SimulatedWorkerConfig, *arguments: Any) -> None:
        folder = resolve_model(config.model)
        TextBackend.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        TextBackend.end = json.loads((folder / "config.json").read_text())["eos_token_id"]
        await serve(config, *arguments)

    worker._serve = serve_text
    worker.SimulatedBackend = TextBackend  # type: ignore[misc]


if __name__ == "__main__":
    _install()
    main()
