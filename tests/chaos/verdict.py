"""What must be true of every job after a scenario, asked in SQL.

The audit has every move in its order, the effects every run of a handler, the history every attempt
that failed or was lost. The questions below find rows where these do not agree with each other or
with the diagram in `states.py`; each should find none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django_jobqueue import states
from django_jobqueue.states import Move
from tests.chaos.record import rows

_SHOWN = 5
_MOVES = (states.CLAIM, states.COMPLETE, states.FAIL, states.RESCUE, states.RELEASE)
_TO_DIE = ("tests.chaos.app.jobs.doomed", "tests.chaos.app.jobs.kills_always")

LOST = "committed jobs are lost"
STALE = "verdicts do not come from the claim that held the job"


class PromiseBroken(AssertionError):
    """Something was lost, doubled, or decided by somebody who had no right to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a scenario came to. `findings` has the rows that break a promise, by promise.

    `lost_locks` and `releases` are the claims that ended so; each is delivered again.
    """

    jobs: int
    lost_locks: int
    releases: int
    findings: dict[str, list[tuple[Any, ...]]]

    @property
    def lost(self) -> int:
        """Committed jobs that are neither done nor a dead letter."""
        return len(self.findings.get(LOST, []))

    @property
    def redelivered(self) -> int:
        """Claims after which another one had to follow, though the handler had not failed."""
        return self.lost_locks + self.releases

    @property
    def stale(self) -> int:
        """Verdicts that were accepted from a claim that had lost its lock."""
        return len(self.findings.get(STALE, []))


def assert_nothing_lost_or_doubled(committed: Sequence[str]) -> Verdict:
    """The verdict on the jobs with these keys and on everything else in the table.

    Raises `PromiseBroken` with the rows found and the audit of some of their jobs.
    """
    verdict = verdict_on(committed)
    if verdict.findings:
        raise PromiseBroken("\n".join(_described(verdict)))
    return verdict


def verdict_on(committed: Sequence[str]) -> Verdict:
    """The same without an error."""
    asked = {LOST: rows(_LOST, list(committed))} | {
        promise: rows(question) for promise, question in _QUESTIONS.items()
    }
    ((lost_locks, releases),) = rows(_REDELIVERED)
    return Verdict(
        jobs=len(committed),
        lost_locks=lost_locks,
        releases=releases,
        findings={promise: found for promise, found in asked.items() if found},
    )


def unfinished() -> int:
    """How many jobs still wait or run."""
    ((count,),) = rows(
        "SELECT count(*) FROM processing_jobs WHERE status IN ('pending', 'failed', 'processing')"
    )
    return int(count)


def unfinished_in_words() -> str:
    """What they are, for a scenario that waits in vain."""
    groups = rows(
        "SELECT status, handler, locked_by, count(*), min(available_at), max(lock_expires_at)"
        " FROM processing_jobs WHERE status IN ('pending', 'failed', 'processing')"
        " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    )
    return "\n".join(str(row) for row in groups)


def _described(verdict: Verdict) -> Iterator[str]:
    for promise, found in verdict.findings.items():
        yield f"{promise}: {len(found)}"
        for row in found[:_SHOWN]:
            yield f"    {row}"
            yield from (f"        {move}" for move in _audit_of(row[0]))


def _audit_of(job: object) -> list[tuple[Any, ...]]:
    if not isinstance(job, int):
        return []
    return rows(
        "SELECT moment::text, old_status, new_status, old_token, new_token, attempts, worker,"
        " signed_token, error, lock_left::text FROM chaos_audit WHERE job_id = %s ORDER BY seq",
        job,
    )


# --- the questions -----------------------------------------------------------------------------
# The first column is a job's id, wherever there is one.


def _allowed(moves: Sequence[Move]) -> str:
    pairs = {
        (source.value, target.value)
        for move in moves
        for source in move.sources
        for target in move.targets
    }
    return ", ".join(f"('{source}', '{target}')" for source, target in sorted(pairs))


_TO_DIE_SQL = ", ".join(f"'{name}'" for name in _TO_DIE)

_LOST = """
SELECT job.id, key, job.status
FROM unnest(%s::text[]) AS key
LEFT JOIN processing_jobs job ON job.idempotency_key = key
WHERE job.id IS NULL OR job.status NOT IN ('succeeded', 'dead_letter')
"""

_REDELIVERED = """
SELECT count(*) FILTER (WHERE error LIKE 'Worker lost: %'),
       count(*) FILTER (WHERE new_status = 'pending')
FROM chaos_audit WHERE old_status = 'processing'
"""

_QUESTIONS = {
    "jobs are dead letters that should not be, or the other way round": f"""
        SELECT id, handler, status, attempts, last_error FROM processing_jobs
        WHERE (status = 'dead_letter') <> (handler IN ({_TO_DIE_SQL}))
    """,
    "jobs are still held by somebody": """
        SELECT id, locked_by, lock_expires_at FROM processing_jobs WHERE status = 'processing'
    """,
    "claims have more than one effect": """
        SELECT job_id, lock_token, count(*), array_agg(pid) FROM chaos_effects
        GROUP BY job_id, lock_token HAVING count(*) > 1
    """,
    "successes have no effect": """
        SELECT job_id, new_token, worker FROM chaos_audit
        WHERE new_status = 'succeeded' AND NOT EXISTS (
            SELECT FROM chaos_effects effect
            WHERE effect.job_id = chaos_audit.job_id AND effect.lock_token = new_token
        )
    """,
    "effects belong to a claim whose end nobody recorded": """
        SELECT job_id, lock_token, attempt, pid, moment FROM chaos_effects effect
        WHERE NOT EXISTS (
            SELECT FROM chaos_audit ended
            WHERE ended.job_id = effect.job_id AND ended.old_status = 'processing'
              AND ended.old_token = effect.lock_token
        )
    """,
    STALE: """
        SELECT job_id, new_status, new_token, signed_token, worker, error FROM chaos_audit
        WHERE old_status = 'processing' AND new_status <> 'pending'
          AND COALESCE(error, '') NOT LIKE 'Worker lost: %'
          AND signed_token IS DISTINCT FROM new_token
    """,
    "locks were taken away before they ran out": """
        SELECT job_id, worker, lock_left::text FROM chaos_audit
        WHERE error LIKE 'Worker lost: %' AND lock_left >= interval '0'
    """,
    "moves are not in the diagram": f"""
        SELECT job_id, old_status, new_status, session FROM chaos_audit
        WHERE (old_status, new_status) NOT IN ({_allowed(_MOVES)})
    """,
    "the token did not rise with a claim, or changed without one": """
        SELECT job_id, old_status, new_status, old_token, new_token FROM chaos_audit
        WHERE new_token <> old_token + (new_status = 'processing')::int
    """,
    "a move does not go on where the one before ended": """
        SELECT job_id, seq, was_status, old_status, was_token, old_token
        FROM (
            SELECT job_id, seq, old_status, old_token,
                   lag(new_status, 1, 'pending') OVER moves AS was_status,
                   lag(new_token, 1, 0::bigint) OVER moves AS was_token
            FROM chaos_audit WINDOW moves AS (PARTITION BY job_id ORDER BY seq)
        ) AS chain
        WHERE (was_status, was_token) <> (old_status, old_token)
    """,
    "a row does not show its last move": """
        SELECT id, status, new_status, lock_token, new_token
        FROM processing_jobs LEFT JOIN LATERAL (
            SELECT new_status, new_token FROM chaos_audit WHERE job_id = id
            ORDER BY seq DESC LIMIT 1
        ) AS last_move ON true
        WHERE (status, lock_token) IS DISTINCT FROM (new_status::varchar, new_token)
    """,
    "attempts are not the claims that were not given back": """
        SELECT id, attempts, spent FROM processing_jobs JOIN (
            SELECT job_id, count(*) FILTER (WHERE new_status = 'processing')
                         - count(*) FILTER (WHERE new_status = 'pending') AS spent
            FROM chaos_audit GROUP BY job_id
        ) AS counted ON job_id = id
        WHERE attempts <> spent
    """,
    "failed or lost attempts and the history differ": """
        SELECT COALESCE(ended.job_id, history.job_id), ended.new_token, history.lock_token,
               ended.outcome, history.outcome
        FROM (
            SELECT job_id, new_token,
                   CASE WHEN error LIKE 'Worker lost: %' THEN 'lost' ELSE 'failed' END AS outcome
            FROM chaos_audit WHERE new_status IN ('failed', 'dead_letter')
        ) AS ended
        FULL JOIN processing_job_attempts history
          ON history.job_id = ended.job_id AND history.lock_token = ended.new_token
        WHERE ended.outcome IS DISTINCT FROM history.outcome
    """,
}
