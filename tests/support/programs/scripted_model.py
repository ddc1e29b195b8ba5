"""A program for a command worker that misbehaves when a prompt asks for it.

Each token is a hash of all tokens before it, so a sequence continues equally after any failure. The
program writes its input to the file of its first argument. If a prompt begins with one of the
tokens below, the program misbehaves after TOKENS tokens. The tokens named *_ONCE do so only while
the file of the second argument does not exist, and create it.
"""

import json
import sys
import time
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from zlib import crc32

EXIT_ONCE, HANG_ONCE, GARBAGE_ONCE, EXIT, STALL, BAD_TOKEN, ERROR, FINISH = range(1001, 1009)
TOKENS = 5
FIRST, LAST = 300, 2000  # range of the ids that it draws
READY = {"type": "ready", "honours": ["temperature", "top_p"]}


class Sequence:
    def __init__(self, request: dict) -> None:
        self.name = request["id"]
        self.trick = request["prompt_token_ids"][0]
        self.known = request["prompt_token_ids"] + request["output_token_ids"]
        self.generated = len(request["output_token_ids"])
        self.left = request["max_tokens"]

    def next_token(self) -> int:
        token = FIRST + crc32(repr(self.known).encode()) % (LAST - FIRST)
        self.known.append(token)
        self.generated += 1
        self.left -= 1
        return token


def write(message: dict) -> None:
    print(json.dumps(message), flush=True)


def misbehave(sequence: Sequence, mark: Path) -> bool:
    """Fails as the sequence's prompt asks; returns True if the sequence is over."""
    trick, name = sequence.trick, sequence.name
    if trick in (EXIT_ONCE, HANG_ONCE, GARBAGE_ONCE):
        if mark.exists():
            return False
        mark.touch()
    if trick in (EXIT, EXIT_ONCE):
        sys.exit("told to end")
    if trick == HANG_ONCE:
        time.sleep(3600)
    elif trick == GARBAGE_ONCE:
        print("Segmentation fault, or so", flush=True)
    elif trick == BAD_TOKEN:
        write({"id": name, "token_ids": [10**6]})
    elif trick == ERROR:
        write({"id": name, "error": "no such thing"})
    elif trick == FINISH:
        write({"id": name, "finished": True})
    return trick in (STALL, BAD_TOKEN, ERROR, FINISH, GARBAGE_ONCE)


def main() -> None:
    mark = Path(sys.argv[2])
    lines: SimpleQueue[dict | None] = SimpleQueue()

    def read() -> None:
        with open(sys.argv[1], "a") as log:
            for line in sys.stdin:
                log.write(line)
                log.flush()
                lines.put(json.loads(line))
        lines.put(None)

    Thread(target=read, daemon=True).start()
    write(READY)
    sequences: dict[str, Sequence] = {}
    while True:
        try:
            message = lines.get(block=not sequences)
        except Empty:
            for name, sequence in list(sequences.items()):
                if sequence.generated == TOKENS and misbehave(sequence, mark):
                    del sequences[name]
                    if not sequences:
                        time.sleep(0.01)
                    continue
                write({"id": name, "token_ids": [sequence.next_token()]})
                if not sequence.left:
                    del sequences[name]
            time.sleep(0.002)
            continue
        if message is None:
            return
        if message["type"] == "generate":
            sequences[message["id"]] = Sequence(message)
        else:
            sequences.pop(message["id"], None)


def expected(prompt: list[int], count: int) -> list[int]:
    """The tokens that it generates for a prompt, with or without failures."""
    request = {"id": "", "prompt_token_ids": prompt, "output_token_ids": [], "max_tokens": count}
    return list(islice(iter(Sequence(request).next_token, None), count))


if __name__ == "__main__":
    main()
