"""Requests of staged writes: whole records kept aside until their micro-batch is decided.

Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from headrace_broker.host_budget import Host
from headrace_broker.processors.send_answers import rejection
from headrace_broker.store.errors import RecordTooLarge, StoreNotWritable
from headrace_broker.store.log.commit_log import BLANK_BYTES
from headrace_protocol.bounds import check_items, check_marks
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    StageAbortHeader,
    StageCommitHeader,
    StageCommitResponseHeader,
    StageDecideHeader,
    StageQueryHeader,
    StageSealHeader,
    StageSealResponseHeader,
    StageSendHeader,
    StageStateResponseHeader,
)
from headrace_protocol.serving import Reply
from headrace_protocol.staging import Decision, decode_names

if TYPE_CHECKING:
    from headrace_broker.processors.bulk import BulkProcessor
    from headrace_broker.staging.staging import Staging
    from headrace_broker.store.log.encoded_records import EncodedRecords
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.serving import Registry, Request


class StagingProcessor:
    """Serves staged writes."""

    def __init__(self, store: MessageStore, bulk: BulkProcessor, staging: Staging) -> None:
        self._store = store
        self._bulk = bulk
        self._staging = staging

    def register(self, registry: Registry) -> None:
        """Route the requests of staged writes."""
        registry.route(RequestCode.STAGE_SEND, self.send)
        registry.route(RequestCode.STAGE_SEAL, self.seal)
        registry.route(RequestCode.STAGE_STATE, self.state)
        registry.route(RequestCode.STAGE_DECIDE, self.decide)
        registry.route(RequestCode.STAGE_COMMIT, self.commit)
        registry.route_long(RequestCode.STAGE_ABORT, self.abort)
        registry.route(RequestCode.STAGE_FORGET, self.forget)

    async def send(self, request: Request) -> Reply:
        """Keep a block that BULK_SEND would store at once."""
        header = request.header(StageSendHeader)
        user = self._user(request, header.query_id)
        records, target = self._bulk.check(request, header)
        self._check_fits(records, header.topic)
        try:
            self._store.commit_log.check_room(len(request.body))
        except StoreNotWritable as error:
            raise rejection(error, header.topic) from error
        host = Host.of(request.channel)
        await self._staging.stage(header, request.body, target.sys_flag, host, user)
        return Reply()

    def _user(self, request: Request, query_id: str) -> str | None:
        """The user of a request about a query, which must be that user's own, or nobody's yet.

        Raises RequestError.
        """
        subject, owner = request.subject, self._staging.queries.sound(query_id).owner
        if subject is None:
            return None
        if owner is not None and owner != subject.user and not subject.is_super:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"{subject} has no permission to access the staged query {query_id} from "
                f"{subject.address}: it belongs to the user of its first block",
            )
        return subject.user

    def _check_fits(self, records: EncodedRecords, topic: str) -> None:
        """Reject records that the log can't take, since a decided batch must be appended."""
        settings = self._store.settings
        for part, part_bytes, bytes_max in (
            ("body", records.body_bytes_max, settings.body_bytes_max),
            ("block", records.total_bytes, settings.commit_log_file_bytes - BLANK_BYTES),
        ):
            if part_bytes > bytes_max:
                raise rejection(RecordTooLarge(part, part_bytes, bytes_max), topic)

    async def seal(self, request: Request) -> Reply:
        """Answer once an attempt is on disk."""
        header = request.header(StageSealHeader)
        self._user(request, header.query_id)
        attempt = await self._staging.seal(header)
        return Reply(
            StageSealResponseHeader(
                file_bytes=attempt.file_bytes, record_count=attempt.record_count
            )
        )

    async def state(self, request: Request) -> Reply:
        """The state of a query, with the decision that holds."""
        query_id = request.header(StageQueryHeader).query_id
        self._user(request, query_id)
        state = await self._staging.state(query_id)
        header = StageStateResponseHeader(
            broker_name=self._staging.broker_name, applied_batch_id=state.applied_batch_id
        )
        return Reply(header, (state.decision.encode(),) if state.decision else ())

    async def decide(self, request: Request) -> Reply:
        """Adopt a decision unless another one holds; answer with the one that holds."""
        header = request.header(StageDecideHeader)
        user = self._user(request, header.query_id)
        check_marks("attempts of a decision", request.body, b",", 3)
        decision = Decision.decode(request.body)
        check_items("brokers of a decision", decision.attempts)
        check_items("attempts of a decision", list(chain(*decision.attempts.values())))
        host = Host.of(request.channel)
        held = await self._staging.decide(header.query_id, decision, header.replaces, host, user)
        return Reply(None, (held.encode(),))

    async def commit(self, request: Request) -> Reply:
        """Answer once a decided batch is in the log and on disk."""
        header = request.header(StageCommitHeader)
        self._user(request, header.query_id)
        was_done = await self._staging.commit(header.query_id, header.batch_id, header.decision_id)
        return Reply(StageCommitResponseHeader(already_done=was_done))

    async def abort(self, request: Request) -> Reply | None:
        """Remove attempts, except those that the pending decision names."""
        header = request.header(StageAbortHeader)
        self._user(request, header.query_id)
        check_marks("attempts to abort", request.body, b",", 1)
        names = decode_names(request.body)
        check_items("attempts to abort", names)
        await self._staging.abort(header.query_id, header.batch_id, names)
        return Reply()

    async def forget(self, request: Request) -> Reply:
        """Remove the state of a query."""
        query_id = request.header(StageQueryHeader).query_id
        self._user(request, query_id)
        await self._staging.forget(query_id)
        return Reply()
