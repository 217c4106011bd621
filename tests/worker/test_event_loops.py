"""Handlers with an event loop, and enqueueing from one."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction

from django_jobqueue import Status, handler
from django_jobqueue.execution import JobContext
from django_jobqueue.handlers import Registry
from django_jobqueue.models import JobAttempt, ProcessingJob
from tests.app.jobs import add, noop
from tests.coordinators import burst
from tests.onlooker import Onlooker
from tests.rows import count_jobs, sql

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

THREADS = 8
OF_EACH = 12


def selected() -> int:
    return int(sql("SELECT 1")[0][0])


def selected_and_closed() -> int:
    try:
        return selected()
    finally:
        connections.close_all()


async def selected_async() -> int:
    return await sync_to_async(selected)()


@pytest.fixture
def kinds(handlers: Registry, loops: set[Any]) -> list[str]:
    """One handler for each way to meet an event loop. Each returns 1."""

    async def alone() -> int:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 1

    @handler(name="async, asks the ORM")
    async def asks_the_orm() -> int:
        await alone()
        return min(1, await ProcessingJob.objects.acount())

    @handler(name="async, iterates over rows")
    async def iterates() -> int:
        return len([row async for row in ProcessingJob.objects.order_by("pk")[:1]])

    @handler(name="sync, calls asyncio.run")
    def calls_run() -> int:
        return asyncio.run(alone()) * selected()

    @handler(name="sync, calls async_to_sync")
    def calls_async_to_sync() -> int:
        return async_to_sync(selected_async)() * selected()

    @handler(name="async, calls sync_to_async")
    async def calls_sync_to_async() -> int:
        return await sync_to_async(selected, thread_sensitive=True)()

    @handler(name="async, calls sync_to_async on any thread")
    async def calls_any_thread() -> int:
        return await sync_to_async(selected_and_closed, thread_sensitive=False)()

    @handler(name="async, blocks")
    async def blocks() -> int:
        time.sleep(0.1)
        return await alone()

    @handler(name="async, leaves a task behind")
    async def leaves_a_task() -> int:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        return await alone()

    left: list[asyncio.Task[None]] = []
    return handlers.names()


@pytest.fixture
def loops() -> set[Any]:
    """The event loops that handlers ran in."""
    return set()


def test_many_of_every_kind_succeed_side_by_side(
    kinds: list[str], loops: set[Any], onlooker: Onlooker, settings: Any
) -> None:
    settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 3, "RESCUE_INTERVAL": 0.1}
    jobs.enqueue_many({"handler": kind} for _round in range(OF_EACH) for kind in kinds)
    connection.close()

    summary = burst(threads=THREADS)

    count = OF_EACH * len(kinds)
    assert (summary.succeeded, summary.failed, summary.lost) == (count, 0, 0)
    assert jobs.filter(status=Status.SUCCEEDED, result=1, attempts=1).count() == count
    assert all(loop.is_closed() for loop in loops)
    # A helper thread of asyncio has a session as long as its function runs.
    assert onlooker.most <= 2 * THREADS + 2


def test_a_task_left_behind_is_cancelled_with_its_handler(handlers: Registry) -> None:
    left: list[asyncio.Task[None]] = []

    @handler(name="leaves")
    async def leaves() -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.sleep(0)

    job = leaves.enqueue()
    burst(threads=1)

    assert jobs.status(job.pk) == Status.SUCCEEDED
    assert left[0].cancelled()


def test_an_async_handler_that_blocks_longer_than_its_lock_keeps_it(
    handlers: Registry, settings: Any
) -> None:
    settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 1.5, "RESCUE_INTERVAL": 0.1}

    @handler(name="blocks", takes_context=True)
    async def blocks(context: JobContext) -> bool:
        time.sleep(3.5)
        return context.lock_lost

    due = [blocks.enqueue() for _number in range(4)]
    burst(threads=4)

    rows = jobs.filter(pk__in=[job.pk for job in due])
    assert set(rows.values_list("status", "attempts", "result")) == {("succeeded", 1, False)}
    assert not JobAttempt.objects.exists()


def test_async_code_of_two_jobs_on_one_thread_meets_two_loops(handlers: Registry) -> None:
    seen: list[tuple[int, Any]] = []

    @handler(name="looks")
    async def looks() -> None:
        seen.append((threading.get_ident(), asyncio.get_running_loop()))

    for _number in range(2):
        looks.enqueue()
    burst(threads=1)

    (one, first), (other, second) = seen
    assert one == other
    assert first is not second


class TestEnqueue:
    def test_200_calls_at_once_make_200_jobs_over_the_one_connection(
        self, onlooker: Onlooker
    ) -> None:
        @async_to_sync
        async def view() -> list[ProcessingJob]:
            return await asyncio.gather(*(add.aenqueue(a=number) for number in range(200)))

        made = view()

        assert [job.payload for job in made] == [{"a": number} for number in range(200)]
        assert len({job.pk for job in made}) == count_jobs() == 200
        assert onlooker.most == 0

    def test_the_sync_call_in_async_code_is_refused_by_django_and_writes_nothing(self) -> None:
        @async_to_sync
        async def view() -> None:
            with pytest.raises(SynchronousOnlyOperation, match="cannot call this from an async"):
                noop.enqueue()
            with pytest.raises(SynchronousOnlyOperation, match="cannot call this from an async"):
                jobs.enqueue(noop)
            with pytest.raises(SynchronousOnlyOperation, match="cannot call this from an async"):
                jobs.enqueue_many([{"handler": noop}])

        view()

        assert count_jobs() == 0

    def test_the_async_call_takes_part_in_the_transaction_around_it(self) -> None:
        def in_a_transaction() -> None:
            with transaction.atomic():
                async_to_sync(noop.aenqueue)()
                assert count_jobs() == 1
                transaction.set_rollback(True)

        @async_to_sync
        async def view() -> None:
            await sync_to_async(in_a_transaction)()

        view()

        assert count_jobs() == 0

    def test_an_async_handler_enqueues_its_successor(self, handlers: Registry) -> None:
        @handler(name="counts down")
        async def counts_down(number: int) -> int:
            if number:
                await counts_down.aenqueue(number=number - 1)
            return number

        counts_down.enqueue(number=5)
        summary = burst(threads=2)

        assert summary.succeeded == 6
