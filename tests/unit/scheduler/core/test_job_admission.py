"""The first request of a job decides the admission of all."""

from pagewire.errors import Code, RequestError
from pagewire.scheduler.core.queue.job_admission import MAX_JOBS, JobAdmission, JobAdmissions

FULL = RequestError(Code.RESOURCE_EXHAUSTED, "full")


def test_the_first_request_decides_for_all() -> None:
    taken, refused = JobAdmission(), JobAdmission()
    assert taken.refusal(False, lambda: None) is None
    assert taken.refusal(False, lambda: FULL) is None
    assert refused.refusal(False, lambda: FULL) is FULL
    assert refused.refusal(False, lambda: None) is FULL


def test_requests_that_moved_are_decided_upon_by_themselves() -> None:
    job = JobAdmission()
    assert job.refusal(False, lambda: FULL) is FULL
    assert job.refusal(True, lambda: None) is None


def test_a_request_without_number_has_no_job() -> None:
    jobs = JobAdmissions()
    assert jobs.of(0) is None
    assert jobs.of(1) is jobs.of(1)
    assert jobs.of(1) is not jobs.of(2)


def test_jobs_that_were_used_last_are_kept() -> None:
    jobs = JobAdmissions()
    first = jobs.of(1)
    for number in range(2, MAX_JOBS + 2):
        jobs.of(number)
        assert jobs.of(1) is first
    second = JobAdmissions().of(2)
    assert jobs.of(2) is not second
