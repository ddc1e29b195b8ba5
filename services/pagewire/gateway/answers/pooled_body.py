"""The body of an answer that has one vector for each input."""

from pagewire.errors import Code, RequestError
from pagewire.gateway.answers.paced_json import object_pieces
from pagewire.gateway.answers.run import Run
from pagewire.gateway.api.formatting import PooledForm, usage
from pagewire.gateway.errors import aborted
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.packing import Float32Array, unpack_floats
from pagewire.v1 import inference_pb2 as pb


async def pooled_body(form: PooledForm, run: Run) -> list[bytes]:
    """The body in pieces; all generations have finished. RequestError if a vector is missing,
    or was aborted by its id."""
    pacer = Pacer()
    entries: list[str] = []
    for entry in form.entries([_vector(generation) for generation in run.generations]):
        entries.append("," + entry if entries else entry)
        await pacer.pause_if_due()
    fields = form.fields(usage(run.generations))
    pieces = object_pieces(fields, form.results_field, ["[", *entries, "]"])
    return [piece.encode() for piece in pieces]


def _vector(generation: Generation) -> Float32Array:
    assert generation.finish is not None
    if generation.finish.reason == pb.FINISH_REASON_ABORT:
        raise aborted()
    if not generation.finish.pooled:
        raise RequestError(Code.INTERNAL, "the scheduler sent no vector")
    return unpack_floats(generation.finish.pooled)
