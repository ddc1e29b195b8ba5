"""Stream an answer with OpenAI's client. Start `pagewire run` first.

python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none is needed")
    [model] = client.models.list().data
    stream = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "Hello! What can you do?"}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
