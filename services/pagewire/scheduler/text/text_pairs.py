"""How a query and a document become the text that a reranker scores."""

from pagewire.errors import invalid
from pagewire.v1 import inference_pb2 as pb

# The prompt of Qwen3's rerankers, as their model cards publish it. The model then answers with the
# token "yes" or "no".
_QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def pair_text(pair: pb.TextPair, pair_format: str) -> str | tuple[str, str]:
    """The text of a pair, or both texts for a tokenizer that joins them; RequestError for an
    instruction that the format does not have."""
    if pair_format == "qwen3":
        instruction = pair.instruction if pair.HasField("instruction") else QWEN3_INSTRUCTION
        return (
            f"{_QWEN3_BEGIN}<Instruct>: {instruction}\n<Query>: {pair.query}\n"
            f"<Document>: {pair.document}{_QWEN3_END}"
        )
    if pair.HasField("instruction"):
        raise invalid(
            "instruction",
            "instruction is for rerankers that answer yes or no, and this model has a "
            "classification head; leave it out, or write it into the query",
        )
    return pair.query, pair.document
