"""Two stacks for clients that run in their own environment.

    PYTHONPATH=tests python -m support.clients.library_servers

prints a line of JSON with the addresses of both stacks when they are ready. The model of `text`
writes what the prompt asks for; `embedded` supports structured output. The process ends when its
standard input ends.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from support.processes.stack_process import running_stack
from support.scripted.text_worker import text_fleet


async def main() -> None:
    with ExitStack() as stacks, tempfile.TemporaryDirectory() as folder:
        starting = running_stack("--tool-parser", "hermes")
        embedded = asyncio.create_task(asyncio.to_thread(stacks.enter_context, starting))
        async with text_fleet(Path(folder)) as text:
            print(json.dumps({"text": text.urls[0], "embedded": (await embedded).url}), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
