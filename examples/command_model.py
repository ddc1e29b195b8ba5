"""A program of your own as the model: it continues a text with words that followed its last word.

pagewire run --backend command --command "python examples/command_model.py"

The worker writes a JSON line for each sequence to the standard input, and reads pieces of output
from the standard output. docs/command.md describes all lines.
"""

import json
import random
import sys
from itertools import pairwise
from queue import Empty, SimpleQueue
from threading import Thread

READY = {"type": "ready", "input": "text", "output": "text", "honours": ["temperature"]}


class Sequence:
    """A text and its continuation, which depends only on the prompt and the seed.

    After a failure the worker sends the output so far. It is generated again, but not sent.
    """

    def __init__(self, request: dict) -> None:
        self.name = request["id"]
        self.words = request["prompt"].split()
        self.draw = random.Random(request["sampling"]["seed"])
        self.greedy = request["sampling"].get("temperature", 1) == 0
        self.known = len(request["output"])
        self.length = 0
        self.left = request["max_tokens"]

    def next_line(self) -> dict:
        """The line with the next word, or with the end."""
        while True:
            followers = [after for word, after in pairwise(self.words) if word == self.words[-1]]
            if not followers or not self.left:
                return {"id": self.name, "finished": True}
            word = self.draw.choice(followers)
            if self.greedy:
                word = max(sorted(set(followers)), key=followers.count)
            self.words.append(word)
            begin, self.length = self.length, self.length + len(word) + 1
            if self.length > self.known:
                self.left -= 1  # a word has at least one token
                return {"id": self.name, "text": f" {word}"[max(0, self.known - begin) :]}


def write(message: dict) -> None:
    print(json.dumps(message), flush=True)


def read_into(lines: SimpleQueue) -> None:
    for line in sys.stdin:
        lines.put(json.loads(line))
    lines.put(None)  # the worker has ended


def main() -> None:
    lines: SimpleQueue = SimpleQueue()
    Thread(target=read_into, args=(lines,), daemon=True).start()
    write(READY)
    sequences: dict[str, Sequence] = {}
    while True:
        try:
            message = lines.get(block=not sequences)  # waits only while there is nothing to do
        except Empty:
            for sequence in list(sequences.values()):  # a batch: one word for each
                line = sequence.next_line()
                write(line)
                if "finished" in line:
                    del sequences[sequence.name]
            continue
        if message is None:
            return
        if message["type"] == "generate":
            sequences[message["id"]] = Sequence(message)
        elif message["type"] == "cancel":
            sequences.pop(message["id"], None)


if __name__ == "__main__":
    main()
