"""The tables in which a scenario writes down what really happened."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command
from django.db import connection

_SQL = """
CREATE TABLE chaos_effects (
    job_id bigint NOT NULL,
    lock_token bigint NOT NULL,
    attempt int NOT NULL,
    pid int NOT NULL,
    moment timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE chaos_audit (
    -- Drawn while the job's row is locked, so within one job it is the order of the moves.
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id bigint NOT NULL,
    old_status text NOT NULL,
    new_status text NOT NULL,
    old_token bigint NOT NULL,
    new_token bigint NOT NULL,
    attempts int NOT NULL,
    worker text,
    session text NOT NULL,
    -- The claim that the result or the error names; the handlers put it there.
    signed_token bigint,
    error text,
    lock_left interval,
    moment timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX chaos_audit_job ON chaos_audit (job_id, seq);

CREATE FUNCTION chaos_audit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    failure text := CASE WHEN NEW.status IN ('failed', 'dead_letter') THEN NEW.last_error END;
BEGIN
    INSERT INTO chaos_audit (
        job_id, old_status, new_status, old_token, new_token, attempts, worker, session,
        signed_token, error, lock_left
    ) VALUES (
        NEW.id, OLD.status, NEW.status, OLD.lock_token, NEW.lock_token, NEW.attempts,
        COALESCE(OLD.locked_by, NEW.locked_by), current_setting('application_name'),
        CASE WHEN NEW.status = 'succeeded' THEN (NEW.result ->> 'token')::bigint
             ELSE substring(failure FROM 'token=([0-9]+)')::bigint END,
        left(failure, 300), OLD.lock_expires_at - statement_timestamp()
    );
    RETURN NULL;
END
$$;

CREATE TRIGGER chaos_audit AFTER UPDATE ON processing_jobs FOR EACH ROW
WHEN (OLD.status IS DISTINCT FROM NEW.status OR OLD.lock_token IS DISTINCT FROM NEW.lock_token)
EXECUTE FUNCTION chaos_audit();
"""


def make_tables() -> None:
    """The tables of the product, then ours and the trigger that fills them."""
    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(_SQL)


def rows(query: str, *params: Any) -> list[tuple[Any, ...]]:
    """What a statement of the driver's answers."""
    with connection.cursor() as cursor:
        cursor.execute(query, params or None)
        return cursor.fetchall() if cursor.description else []
