"""The `pagewire` command, in a process that fails when it receives certain prompts.

`PAGEWIRE_TEST_FAILING` names the service, `worker` or `scheduler`. The first token of a prompt
decides: KILLS ends the process with SIGKILL; STALLS blocks the thread that launches a worker's
steps, or the event loop of a scheduler.
"""

import os
import signal
import time
from typing import Any

import pagewire.lifecycle.process
from pagewire.cli.main import main
from pagewire.packing import unpack

KILLS, STALLS = 311, 313


def fail(first_token: int) -> None:
    """Ends or blocks this process if a prompt begins with such a token."""
    if first_token == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if first_token == STALLS:
        time.sleep(600)


def make_workers_fail() -> None:
    """Workers fail when a step starts such a sequence."""
    from pagewire.worker.protocol import session

    decode = session.decode_step

    def decode_step(message: Any) -> Any:
        for start in message.starts:
            fail(int(unpack(start.token_ids)[0]))
        return decode(message)

    session.decode_step = decode_step


def make_schedulers_fail() -> None:
    """Schedulers fail before they queue such a request."""
    from pagewire.scheduler.stages import intake

    new_sequence = intake.new_sequence

    def new_sequence_or_fail(request: Any, parsed: Any, *given: Any) -> Any:
        fail(int(parsed.tokens.prompt[0]))
        return new_sequence(request, parsed, *given)

    intake.new_sequence = new_sequence_or_fail


if __name__ == "__main__":
    # The default, 20 s, would make tests with a blocked event loop slow.
    pagewire.lifecycle.process.LOOP_SECONDS = 4.0
    make_fail = {"worker": make_workers_fail, "scheduler": make_schedulers_fail}
    make_fail[os.environ["PAGEWIRE_TEST_FAILING"]]()
    main()
