"""What a scheduler would get of a job."""

from pagewire.gateway.api.job import Job
from pagewire.v1 import inference_pb2 as pb


def requests_of(job: Job) -> list[pb.GenerateRequest]:
    """Each of the job's requests with what it shares with others."""
    return [
        pb.GenerateRequest.FromString(request.SerializeToString() + job.common_of(index).data)
        for index, request in enumerate(job.requests)
    ]
