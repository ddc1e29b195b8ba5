"""The `pagewire` command, in a process that falls when it meets certain prompts.

`PAGEWIRE_TEST_POISON` says which: `worker` or `scheduler`. A prompt that begins with the token
KILLS ends the process at once, one that begins with HANGS lets it stand still: the thread of a
worker that launches steps, the event loop of a scheduler.
"""

import os
import signal
import time
from typing import Any

import pagewire.lifecycle.process
from pagewire.cli.main import main
from pagewire.packing import unpack

KILLS, HANGS = 311, 313


def fall(first_token: int) -> None:
    """What a process does that meets a prompt with this first token."""
    if first_token == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if first_token == HANGS:
        time.sleep(600)


def poison_workers() -> None:
    """Workers fall when a step starts such a sequence."""
    from pagewire.worker.protocol import session

    decode = session.decode_step

    def decode_step(message: Any) -> Any:
        for start in message.starts:
            fall(int(unpack(start.token_ids)[0]))
        return decode(message)

    session.decode_step = decode_step


def poison_schedulers() -> None:
    """Schedulers fall when such a request is to be queued."""
    from pagewire.scheduler.stages import intake

    new_sequence = intake.new_sequence

    def new_sequence_or_fall(request: Any, parsed: Any) -> Any:
        fall(int(parsed.tokens.prompt[0]))
        return new_sequence(request, parsed)

    intake.new_sequence = new_sequence_or_fall


if __name__ == "__main__":
    # So that a test need not wait for 20 s whenever a loop stands still.
    pagewire.lifecycle.process.LOOP_SECONDS = 4.0
    {"worker": poison_workers, "scheduler": poison_schedulers}[os.environ["PAGEWIRE_TEST_POISON"]]()
    main()
