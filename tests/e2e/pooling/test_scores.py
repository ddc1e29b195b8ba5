"""/v1/score and /v1/rerank over real processes, by a classification head and by yes or no."""

import math

import grpc
import httpx
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.models.pooling_models import classified, yes_probability

QUERY = "How are you today?"
DOCUMENTS = ["I am fine, thank you.", "def main() -> None:", "naive", "The lazy dog. " * 8]
# The prompt in the model cards of Qwen3's rerankers.
FORMAT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def post(stack, path: str, **body) -> dict:
    answer = httpx.post(stack.stack.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_head(classifier, query: str, document: str) -> float:
    """The sigmoid of the head's logit, for two texts that the tokenizer joins."""
    logit = classified(classifier.model, classifier.tokens(query, document))
    return 1 / (1 + math.exp(-logit))


def by_words(reranker, query: str, document: str, instruction: str = INSTRUCTION) -> float:
    text = FORMAT.format(instruction=instruction, query=query, document=document)
    tokenizer = reranker.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    return yes_probability(reranker.model, ids, yes, no)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_a_classification_head(classifier, path: str) -> None:
    body = post(classifier, path, text_1=QUERY, text_2=DOCUMENTS)
    wanted = [by_head(classifier, QUERY, document) for document in DOCUMENTS]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(wanted, abs=1e-5)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2, 3]
    assert body["object"] == "list"
    assert {entry["object"] for entry in body["data"]} == {"score"}
    count = sum(len(classifier.tokens(QUERY, document)) for document in DOCUMENTS)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == count


def test_pairs_of_two_lists(classifier) -> None:
    queries = ["a", "b", "c", "d"]
    body = post(classifier, "/v1/score", text_1=queries, text_2=DOCUMENTS)
    wanted = [by_head(classifier, *pair) for pair in zip(queries, DOCUMENTS, strict=True)]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(wanted, abs=1e-5)
    [entry] = post(classifier, "/v1/score", text_1="a", text_2=DOCUMENTS[0])["data"]
    assert entry["score"] == body["data"][0]["score"]


@pytest.mark.parametrize("instruction", [None, "Find code"])
def test_scores_by_yes_and_no(reranker, instruction: str | None) -> None:
    fields = {} if instruction is None else {"instruction": instruction}
    body = post(reranker, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, **fields)
    wanted = [by_words(reranker, QUERY, d, instruction or INSTRUCTION) for d in DOCUMENTS]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker, path: str) -> None:
    wanted = {index: by_words(reranker, QUERY, text) for index, text in enumerate(DOCUMENTS)}
    order = sorted(wanted, key=lambda index: -wanted[index])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    body = post(reranker, path, query=QUERY, documents=documents)
    assert [result["index"] for result in body["results"]] == order
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-5)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    best = post(reranker, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [result["index"] for result in best["results"]] == order[:2]
    assert not any("document" in result for result in best["results"])


def test_documents_share_the_cached_kv_of_their_query(reranker) -> None:
    query = "a query of some length " * 6
    post(reranker, "/v1/score", text_1=query, text_2="first")
    body = post(reranker, "/v1/score", text_1=query, text_2="second")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert body["data"][0]["score"] == pytest.approx(by_words(reranker, query, "second"), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "required"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 texts"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1", "empty"),
        ("/v1/score", {"text_1": "a", "text_2": "c " * 2000}, "text_2", "context length"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 8},
            "truncate_prompt_tokens",
            "not supported",
        ),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "head"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/v1/rerank", {"query": "a", "documents": [7]}, "documents[0]", "a string or an object"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater"),
        ("/v1/embeddings", {"input": "a"}, "model", "scores pairs only; use /v1/score"),
        ("/v1/completions", {"prompt": "a"}, "model", "scores pairs only; use /v1/score"),
    ],
)
def test_wrong_fields_are_named(
    classifier, path: str, body: dict, param: str, message: str
) -> None:
    answer = httpx.post(classifier.stack.url + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_grpc(reranker) -> None:
    pair = pb.TextPair(query=QUERY, document=DOCUMENTS[0])
    params = pb.PoolingParams(task=pb.POOLING_TASK_SCORE)
    with grpc.insecure_channel(reranker.stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = stub.Pool(pb.GenerateRequest(pair=pair, pooling=params))
        assert list(answer.values) == pytest.approx([by_words(reranker, QUERY, DOCUMENTS[0])])
        cut = pb.PoolingParams(task=pb.POOLING_TASK_SCORE, dimensions=1)
        with pytest.raises(grpc.RpcError, match="dimensions are of embeddings"):
            stub.Pool(pb.GenerateRequest(pair=pair, pooling=cut))
        with pytest.raises(grpc.RpcError, match="scores pairs only"):
            next(stub.Generate(pb.GenerateRequest(pair=pair)))
