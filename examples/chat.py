"""Answer several conversations at once, with the log probability of each answer.

python examples/chat.py [MODEL_FOLDER]
"""

import sys

from pagewire.llm import LLM, SamplingParams

QUESTIONS = ["Hello! What can you do?", "Tell me a story about a fox.", "Count to five."]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=0)
    with LLM(model) as llm:
        outputs = llm.chat(conversations, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = output.outputs[0]
        print(f"> {question}\n{answer.text}")
        print(f"({answer.finish_reason}, log probability {answer.cumulative_logprob:.2f})\n")


if __name__ == "__main__":
    main()
