"""Transactions as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.consumer.unconsumed import InnerConsumer
from headrace_broker.feature import Feature
from headrace_broker.inner.topic_counts import TRANSACTIONS, TopicCounts
from headrace_broker.message_demands import Demand
from headrace_broker.transaction.files import TransactionFiles
from headrace_broker.transaction.halves import TRAN_MSG
from headrace_broker.transaction.processor import TransactionProcessor
from headrace_broker.transaction.rebuild import Checkpoint
from headrace_broker.transaction.transactions import Producers, Transactions
from headrace_daemon.services import Service
from headrace_protocol.message import TRANSACTION_MASK
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.system_topics import HALF_TOPIC

if TYPE_CHECKING:
    from headrace_broker.consumer.groups import Member
    from headrace_broker.core import Core
    from headrace_protocol.channel import Channel


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError if a checkpoint can't be read."""
    messages, transactions = core.messages, _transactions(core)
    decisions = TransactionProcessor(
        core.store,
        transactions,
        messages.writer,
        messages.delivery,
        messages.delays,
        messages.sends,
    )
    demand = Demand(
        "transactional messages",
        (TRAN_MSG,),
        TRANSACTION_MASK,
        apply=transactions.demand.serve,
        admit=transactions.demand.admit,
    )
    return Feature(
        inner_consumers=(
            InnerConsumer(
                HALF_TOPIC,
                "undecided transactions",
                transactions.next_offset,
                due_ms=transactions.due_ms,
            ),
        ),
        demands=(demand,),
        scans=(transactions.scan,),
        turn_ends=(transactions.write_ops,),
        processors=(decisions,),
        services=(
            Service(transactions.run, transactions.load, finish=transactions.finish),
            Service(transactions.run_looking),
            Service(transactions.run_writing),
            Service(transactions.run_saving),
        ),
        runtime_info=(transactions.runtime_info,),
    )


def _transactions(core: Core) -> Transactions:
    producers, messages, access = core.clients.producers, core.messages, core.rights.access

    def may_send(member: Member, topic: str) -> bool:
        subject = member.subject
        return subject is None or access.may(subject, Kind.TOPIC, topic, Action.PUB)

    def channels(group: str, topic: str) -> list[Channel]:
        """Anybody may join a producer group, and a check has the message."""
        members = producers.members(group)
        return [member.channel for member in members if may_send(member, topic)]

    files = TransactionFiles(
        core.position("transaction", Checkpoint),
        core.tables.offsets,
        TopicCounts(
            core.file(TRANSACTIONS[0]),
            TRANSACTIONS[1],
            core.store.clock.now_ms,
            core.tables.topics.get,
        ),
    )
    return Transactions(
        core.config,
        core.store,
        messages.writer,
        core.tables.topics,
        files,
        Producers(channels, core.budget, core.serving.server.host_log),
    )
