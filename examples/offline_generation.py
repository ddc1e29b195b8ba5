"""Continue some prompts at once, with the model that comes with Pagewire.

python examples/offline_generation.py [MODEL_FOLDER]
"""

import sys

from pagewire.llm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The fox", "The opposite of hot is"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
