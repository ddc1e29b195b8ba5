"""Stream three answers side by side on an event loop.

python examples/streaming.py [MODEL_FOLDER]
"""

import asyncio
import sys

from pagewire.llm import AsyncLLM, SamplingParams

ANIMALS = ["fox", "bear", "cat"]


async def tell(llm: AsyncLLM, animal: str) -> None:
    messages = [{"role": "user", "content": f"Tell me a story about a {animal}."}]
    async for piece in llm.chat(messages, SamplingParams(seed=1, max_tokens=40)):
        for output in piece.outputs:
            print(f"{animal}: {output.text!r}", flush=True)


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    async with AsyncLLM(model) as llm:
        await asyncio.gather(*(tell(llm, animal) for animal in ANIMALS))


if __name__ == "__main__":
    asyncio.run(main())
