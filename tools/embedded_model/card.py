"""The model card: the model, its training, and its measurements."""

from dataclasses import dataclass

from tools.embedded_model.decoder import Shape
from tools.embedded_model.evaluate import Report

# The probe turns that the card shows, as indices into the chats of the report.
SHOWN = (0, 1, 4, 5, 7, 8, 9, 10, 13, 14, 16, 18, 25)


@dataclass(frozen=True, slots=True)
class Making:
    """The figures of a model's training."""

    command: str
    date: str
    machine: str
    documents: int
    tokens: int  # trained tokens, with repetitions
    steps: int
    seconds: int


FRONT = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, tiny, chat]
---
"""


def card(shape: Shape, making: Making, report: Report) -> str:
    """The text of README.md."""
    samples = [
        "\n>\n".join(f"> **{user}**<br>\n> {answer}" for user, answer in report.chats[i]) + "\n"
        for i in SHOWN
    ]
    start, text = report.texts[0]
    return f"""{FRONT}
# Pagewire chat, {report.parameters / 1e6:.1f} M parameters

A very small Llama-architecture chat model. It shows newcomers a language model at work without a
download, and it gives tests a real model with a tokenizer, a chat template and weights. It knows a
small world of simple English: greetings and small talk, short stories, sums, counting, colours,
opposites, animals, the calendar, and questions about what was just said.

| | |
| --- | --- |
| architecture | `LlamaForCausalLM`: {shape.layers} layers, hidden {shape.hidden}, {shape.heads} \
query heads and {shape.kv_heads} key-value heads of {shape.head_dim}, \
intermediate {shape.intermediate}, tied embeddings |
| parameters | {report.parameters:,} in bfloat16 |
| context | {shape.positions} tokens |
| tokenizer | byte-level BPE, {shape.vocab} tokens, all 256 bytes among them |
| chat format | `<|im_start|>role`, a newline, the text, `<|im_end|>`; an answer ends with \
`<|im_end|>`, a plain text with `<|endoftext|>` |
| licence | Apache-2.0 |

## How it was made

```
{making.command}
```

on {making.date}, on {making.machine}: {making.steps:,} steps over {making.tokens / 1e6:,.0f} M
tokens in {making.seconds} s of training, drawn from {making.documents:,} documents. All text comes
from the grammar in `tools/embedded_model`; no other data was used. Only answers and plain texts
were learned, not what the user says. The number of steps follows from the time given, so another
machine makes a slightly different model.

## What it does

Measured on the weights in this folder, loaded with transformers:

- **Held-out perplexity {report.perplexity:.3f}** on {report.heldout_tokens:,} tokens of answers
  and stories, from documents of another seed that occur nowhere in the training text. It is low
  because the grammar is small: most of an answer follows from its question.
- **{report.sums_right:,} of {report.sums_asked:,} sums right**: every sum and difference of 0 to
  20 and every product of 0 to 12, in digits and in words.

Answers, chosen greedily; each block is one conversation:

{(chr(10) + "<!-- -->" + chr(10) * 2).join(samples)}
The plain text "{start}" goes on:

> {start}{text}

## Limits

It knows nothing outside its small world; there it says so, or answers beside the point. Sums and
differences were taught up to 99, products up to 12 times 12 and exact divisions of these; beyond
that it guesses. It repeats words and names that it has never seen only roughly, and it reads facts
out of short texts rather than understands them. Without sampling, its stories resemble each other:
use a temperature of 0.7 to 1. Use it for demonstrations and tests, for nothing else.
"""
