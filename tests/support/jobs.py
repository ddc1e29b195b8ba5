"""The requests that a gateway sends to schedulers for a job."""

from pagewire.gateway.api.job import Job
from pagewire.v1 import inference_pb2 as pb


def requests_of(job: Job) -> list[pb.GenerateRequest]:
    """Each request of a job, with the input that it shares with other requests."""
    return [
        pb.GenerateRequest.FromString(request.SerializeToString() + job.common_of(index).data)
        for index, request in enumerate(job.requests)
    ]
