"""Headers of POP and of what follows on it.

Their codes exceed 32767, so that they travel with JSON or MSGPACK headers only.
Source: docs/protocol.md "POP"; tests/protocol/test_pop.py.
"""

from __future__ import annotations

from typing import Final

from headrace_protocol.headers import Int32, Int64, QueueHeader, RequestHeader

# The queue id of a request that reads all queues of its topic.
ANY_QUEUE: Final = -1
# Most messages in an answer; the peer rejects requests for more.
POP_MESSAGES_MAX: Final = 32
# Where a group begins that has no offset yet: at the oldest message, or behind the newest.
INIT_MIN: Final = 0
INIT_MAX: Final = 1


class PopMessageHeader(QueueHeader, kw_only=True, gc=False):
    """POP_MESSAGE (200050).

    invisible_time: ms for which no other member gets the messages. poll_time: ms that the broker
    may wait for messages, from born_time on, the client's time in ms since 1970.
    init_mode: INIT_MIN or INIT_MAX. exp_type, exp: the filter, as in a subscription.
    order: at most one batch of a queue is out. attempt_id: a repeated request of an orderly
    consumer has the same one, and gets the same messages.
    """

    consumer_group: str
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    init_mode: Int32
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


class PopMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 200050; the body holds the records, and the infos their offsets (``infos``).

    rest_num: messages that remain.
    """

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class PeekMessageHeader(QueueHeader, kw_only=True, gc=False):
    """PEEK_MESSAGE (200052): like a POP, but the messages stay visible."""

    consumer_group: str
    max_msg_nums: Int32


class PeekMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 200052; see PopMessageResponseHeader."""

    rest_num: Int64


class AckMessageHeader(QueueHeader, kw_only=True, gc=False):
    """ACK_MESSAGE (200051).

    topic: the one that holds the message, which may be a retry topic. extra_info: its handle.
    offset: its queue offset.
    """

    consumer_group: str
    extra_info: str
    offset: Int64


class ChangeInvisibleTimeHeader(AckMessageHeader, kw_only=True, gc=False):
    """CHANGE_MESSAGE_INVISIBLETIME (200053).

    invisible_time: ms from now on. suspend: give the message back without counting an attempt.
    """

    invisible_time: Int64
    suspend: bool | None = None


class ChangeInvisibleTimeResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 200053: the parts of the message's new handle."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


class NotificationHeader(QueueHeader, kw_only=True, gc=False):
    """NOTIFICATION (200054): wait until there is a message; see PopMessageHeader."""

    consumer_group: str
    poll_time: Int64
    born_time: Int64
    order: bool | None = None
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 200054. polling_full: too many requests wait already."""

    has_msg: bool
    polling_full: bool = False


class PollingInfoHeader(QueueHeader, kw_only=True, gc=False):
    """POLLING_INFO (200055)."""

    consumer_group: str


class PollingInfoResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 200055: the number of requests that wait for a queue."""

    polling_num: Int32
