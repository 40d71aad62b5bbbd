"""Changes of static topics, carried out on all masters; and their chains, as brokers have them.

Source: docs/static-topics.md; tests/clients/test_admin_static.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from headrace.admin.chains import ChainAdmin
from headrace.errors import HeadraceError, RouteNotFound
from headrace.names import check_topic
from headrace.tasks import gather, gather_or_raise
from headrace.values import now_ms
from headrace_protocol.admin_headers import CreateStaticTopicHeader
from headrace_protocol.bodies import MessageQueue, TopicConfigAndQueueMapping
from headrace_protocol.codes import RequestCode
from headrace_protocol.statictopic.checks import BadMapping, check_cluster
from headrace_protocol.statictopic.mapping import TopicMapping, encode_detail
from headrace_protocol.statictopic.plans import (
    BrokerTopic,
    Closed,
    InvalidChange,
    LostMapping,
    Mode,
    NoChange,
    plan_create,
    plan_rebalance,
    plan_remap,
)
from headrace_protocol.statictopic.repair import plan_repair
from headrace_protocol.system_topics import DEFAULT_TOPIC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from headrace_protocol.statictopic.mapping import MappingItem
    from headrace_protocol.statictopic.plans import Plan, Step

_POLICY: Final = "cleanup.policy"
_COMPACTED: Final = "COMPACTION"


def is_compacted(attributes: Mapping[str, str]) -> bool:
    """True if a topic with these attributes keeps the newest message of each key."""
    return attributes.get(_POLICY) == _COMPACTED


class StaticTopicError(HeadraceError):
    """A static topic can't be changed as asked. The message has the place and the way out."""


class UnchangedTopic(StaticTopicError):
    """A topic is as wanted already."""


class HalfDone(StaticTopicError):
    """A change ended in the middle; ``headrace topic repair`` finishes it."""

    def __init__(self, topic: str, error: HeadraceError) -> None:
        super().__init__(
            f"the change of static topic {topic} is half done: {error}; once its brokers are up, "
            f"run: headrace topic repair {topic}"
        )
        self.error = error


class Found(NamedTuple):
    """A topic as its masters have it.

    masters: addresses of all masters, by broker name. configs: of the brokers that have the topic.
    exact: brokers that are headrace's. remembered: brokers that nameservers know for the topic.
    attributes: of the topic.
    """

    masters: dict[str, str]
    configs: dict[str, TopicConfigAndQueueMapping]
    exact: frozenset[str]
    remembered: frozenset[str]
    attributes: dict[str, str]

    @property
    def is_compacted(self) -> bool:
        """True if the topic keeps the newest message of each key."""
        return is_compacted(self.attributes)

    def brokers(self) -> dict[str, BrokerTopic]:
        """The state that plans are made of."""
        return {name: _broker_topic(self.configs.get(name)) for name in self.masters}


class Change(NamedTuple):
    """A change that is planned, or done.

    before, after: in the form of mqadmin's files.
    """

    plan: Plan
    before: dict[str, Any]
    after: dict[str, Any]

    def leaders(self) -> dict[int, tuple[MappingItem | None, MappingItem]]:
        """Leader of each queue before and after the change."""
        old, new = (_leaders(table) for table in (self.before, self.after))
        return {queue: (old.get(queue), item) for queue, item in sorted(new.items())}


class StaticTopicAdmin(ChainAdmin):
    """The methods of Admin that change static topics.

    Each change reads all masters first, and sends nothing if it is a ``dry_run``.
    Raises StaticTopicError, and the errors of Admin.
    """

    async def becomes_static(self, topic: str) -> bool:
        """True if a compacted topic is static without a broker named at its creation.

        It is on several brokers of headrace's: a key of a plain one goes to another queue when a
        broker joins, while its old value stays. A topic that exists stays what it is.
        """
        try:
            return (await self._instance.current_route(topic)).is_static
        except RouteNotFound:
            masters = await self._masters()
            kinds = await gather(self._is_headrace, list(masters.values()))
            return len(masters) > 1 and all(kind is True for kind in kinds)

    async def create_static_topic(
        self,
        topic: str,
        queues: int,
        *,
        attributes: Mapping[str, str] | None = None,
        brokers: Collection[str] = (),
        cluster: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> Change:
        """Create a topic of ``queues`` logic queues, or add queues to one that has fewer.

        attributes: as for ``create_topic``; those of a topic that exists must be the same.
        brokers: get the new queues; by default all masters, or those of ``cluster``.
        force: add queues to a compacted topic, too, whose keys then move.
        """
        check_topic(topic)
        found = await self.read_static_topic(topic)
        if found.configs:
            _check_growth(found, queues, attributes or {}, force=force)
        else:
            found = found._replace(attributes=dict(attributes or {}))
        targets = brokers or await self._names_of(found, cluster)
        with _as_admin_errors():
            plan = plan_create(topic, queues, targets, found.brokers(), now_ms())
        change = await self._change(plan, found, dry_run=dry_run)
        if not dry_run:
            await self._instance.wait_for_route(topic)
        return change

    async def remap_static_topic(
        self,
        topic: str,
        to: Collection[str],
        *,
        queues: Collection[int] | None = None,
        mode: Mode = Mode.STRICT,
        dry_run: bool = False,
    ) -> Change:
        """Move all queues, or only ``queues``, to the brokers ``to``."""
        found = await self._existing_static(topic)
        with _as_admin_errors():
            plan = plan_remap(topic, to, found.brokers(), now_ms(), queues=queues, mode=mode)
        inexact = {item.bname for item in plan.closed_items().values()} - found.exact
        if mode is Mode.STRICT and inexact:
            raise StaticTopicError(
                f"broker {min(inexact)} is not headrace's: a send that it still takes while it "
                "gives up a queue would be lost behind the new leader's start; use --mode available"
            )
        return await self._change(plan, found, dry_run=dry_run)

    async def rebalance_static_topic(self, topic: str, *, dry_run: bool = False) -> Change:
        """Move the fewest queues after which masters lead equally many, give or take one."""
        found = await self._existing_static(topic)
        with _as_admin_errors():
            plan = plan_rebalance(topic, found.brokers(), now_ms())
        return await self._change(plan, found, dry_run=dry_run)

    async def repair_static_topic(
        self, topic: str, *, forget: Collection[str] = (), dry_run: bool = False
    ) -> Change:
        """Finish a change that ended in the middle; give up the messages of brokers to forget."""
        found = await self.read_static_topic(topic)
        with _as_admin_errors():
            plan = plan_repair(
                topic, found.brokers(), now_ms(), known=found.remembered, forget=forget
            )
        return await self._change(plan, found, dry_run=dry_run)

    # -- reading -----------------------------------------------------------------------------------

    async def read_static_topic(self, topic: str) -> Found:
        """A topic as all masters have it, whether or not the nameserver knows it."""
        check_topic(topic)
        masters = await self._masters()
        configs = await self._configs(topic, masters)
        exact = [name for name in configs if await self._is_headrace(masters[name])]
        remembered = await self._remembered(topic)
        return Found(masters, configs, frozenset(exact), remembered, _attributes(configs))

    async def static_leaders(self, topic: str) -> tuple[Found, dict[int, str]]:
        """A static topic and the leader of each queue.

        Raises RouteNotFound, and StaticTopicError for one that is not whole.
        """
        found = await self._existing_static(topic)
        with _as_admin_errors():
            mappings = (each.mapping for each in found.brokers().values())
            chains = check_cluster(mapping for mapping in mappings if mapping)
        return found, {queue: chain[-1].bname for queue, chain in chains.items()}

    async def _existing_static(self, topic: str) -> Found:
        found = await self.read_static_topic(topic)
        if not found.configs:
            raise RouteNotFound(topic, "no master has it; see `headrace topic list`")
        if not any(each.mapping_detail for each in found.configs.values()):
            raise StaticTopicError(
                f"topic {topic} is not static: its brokers have no mapping of it; create a static "
                f"topic with `headrace topic create TOPIC --static --queues N`"
            )
        return found

    async def _remembered(self, topic: str) -> frozenset[str]:
        """Brokers of the topic at a nameserver, also those that are away."""
        try:
            route = await self._instance.fetch_route(topic)
        except RouteNotFound:
            return frozenset()
        return frozenset(route.data.topic_queue_mapping_by_broker or {})

    async def _names_of(self, found: Found, cluster: str | None) -> list[str]:
        """Names of all masters, or of those of a cluster."""
        if cluster is None:
            return list(found.masters)
        names = {node.broker_name for node in await self.cluster() if node.cluster == cluster}
        return [name for name in found.masters if name in names]

    # -- carrying out ------------------------------------------------------------------------------

    async def _change(self, plan: Plan, found: Found, *, dry_run: bool) -> Change:
        """Carry out a plan, or show what it would do."""
        after = _table(plan, _mappings(plan.final({}, found.exact)), plan.queues)
        if found.is_compacted:
            await self._check_exact(plan.topic, _leaders(after).values(), found)
        change = Change(plan, _before(plan), after)
        if dry_run:
            return change
        epochs = {
            name: each.mapping.epoch if each.mapping else 0 for name, each in plan.before.items()
        }
        known = dict(epochs)
        # Half a change needs a repair, and each request has a time limit of its own.
        with anyio.CancelScope(shield=True):
            try:
                mappings = await self._carry_out(plan, found, epochs)
            except HeadraceError as error:
                if epochs == known:
                    raise
                raise HalfDone(plan.topic, error) from error
            finally:
                self._instance.invalidate_route(plan.topic)
        return change._replace(after=_table(plan, mappings, plan.queues))

    async def _check_exact(self, topic: str, leaders: Iterable[MappingItem], found: Found) -> None:
        """Raise StaticTopicError if a compacted topic would have a leader at one of Apache's."""
        for name in sorted({item.bname for item in leaders} - found.exact):
            if not await self._is_headrace(found.masters[name]):
                raise StaticTopicError(
                    f"topic {topic} is compacted, and broker {name} is not headrace's: it would "
                    "drop delete markers whose values are in older items; choose another broker"
                )

    async def _carry_out(
        self, plan: Plan, found: Found, epochs: dict[str, int]
    ) -> dict[str, TopicMapping | None]:
        """Send the requests of a plan; returns the brokers' new mappings.

        epochs: of the mappings that the brokers have, updated with each request.
        """
        for stage in (*plan.claims(), *plan.closing()):
            await self._send(stage, found, epochs)
        last = plan.final(await self._closed(plan, found), found.exact)
        for stage in last:
            await self._send(stage, found, epochs)
        return _mappings(last)

    async def _send(self, steps: list[Step], found: Found, epochs: dict[str, int]) -> None:
        """Send requests to different brokers side by side, then raise the first error.

        A broker refuses the request if another tool has changed its mapping since it was read.
        """

        async def send(step: Step) -> None:
            header = _header(step, found, epochs[step.broker])
            body = encode_detail(step.mapping, step.emptied)
            code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
            await self._ask(found.masters[step.broker], code, header, body)
            epochs[step.broker] = step.mapping.epoch

        await gather_or_raise(send, steps)

    async def _closed(self, plan: Plan, found: Found) -> dict[int, Closed]:
        """The closed items as their brokers have them now, and where they end."""
        items = plan.closed_items()
        if not items:
            return {}
        masters = {item.bname: found.masters[item.bname] for item in items.values()}
        configs = await self._configs(plan.topic, masters)
        ranges = await self._ranges(plan.topic, masters)
        return {
            queue: Closed(
                _same_item(configs.get(item.bname), queue, item),
                ranges[MessageQueue(plan.topic, item.bname, item.queue_id)].max_offset,
            )
            for queue, item in items.items()
        }


def _same_item(
    config: TopicConfigAndQueueMapping | None, queue: int, item: MappingItem
) -> MappingItem:
    mapping = config.mapping_detail if config else None
    chain = mapping.hosted.get(queue, ()) if mapping else ()
    return next((each for each in chain if each.gen == item.gen), item)


# -- conversions -----------------------------------------------------------------------------------


def _broker_topic(config: TopicConfigAndQueueMapping | None) -> BrokerTopic:
    if config is None:
        return BrokerTopic()
    return BrokerTopic(
        mapping=config.mapping_detail,
        read_queues=config.read_queue_nums,
        write_queues=config.write_queue_nums,
        is_lost=config.mapping_detail is None,
    )


def _attributes(configs: Mapping[str, TopicConfigAndQueueMapping]) -> dict[str, str]:
    """The attributes of a topic; a broker that was killed when it joined may lack them."""
    found = [configs[name].attributes for name in sorted(configs)]
    compacted = [each for each in found if is_compacted(each)]
    return dict([*compacted, *found, {}][0])


def _check_growth(found: Found, queues: int, attributes: Mapping[str, str], *, force: bool) -> None:
    """Raise StaticTopicError if a topic that exists must not become what is asked for."""
    for key, value in attributes.items():
        if (known := found.attributes.get(key)) != value:
            raise StaticTopicError(
                f"the topic exists with {key}={known or 'its default'}, not {value}; "
                "`headrace topic alter --attribute` changes attributes, and cleanup.policy is "
                "fixed at the creation"
            )
    totals = {each.mapping.total_queues for each in found.brokers().values() if each.mapping}
    if found.is_compacted and not force and totals and queues > max(totals):
        raise StaticTopicError(
            f"the topic is compacted and has {max(totals)} queues: with {queues} its keys would "
            "go to other queues, and their old values would stay in the old ones. Create another "
            "topic, or force the change with --force"
        )


def _header(step: Step, found: Found, read_epoch: int) -> CreateStaticTopicHeader:
    """The request of a step. A broker that is new to the topic gets the settings of another one."""
    config = found.configs.get(step.broker)
    others = [found.configs[name] for name in sorted(found.configs)]
    known = config or [*others, TopicConfigAndQueueMapping(topic_name=step.mapping.topic)][0]
    attributes = ""
    if config is None or config.attributes.get(_POLICY) != found.attributes.get(_POLICY):
        attributes = ",".join(f"+{key}={value}" for key, value in found.attributes.items())
    return CreateStaticTopicHeader(
        topic=step.mapping.topic,
        default_topic=DEFAULT_TOPIC,
        read_queue_nums=step.read_queues,
        write_queue_nums=step.write_queues,
        perm=known.perm,
        topic_filter_type=known.topic_filter_type,
        topic_sys_flag=known.topic_sys_flag,
        order=known.order,
        force=step.force,
        attributes=attributes or None,
        read_epoch=read_epoch,
    )


def _mappings(stages: list[list[Step]]) -> dict[str, TopicMapping | None]:
    return {step.broker: step.mapping for stage in stages for step in stage}


def _leaders(table: dict[str, Any]) -> dict[int, MappingItem]:
    """The leader of each queue, of the highest gen where brokers disagree."""
    found: dict[int, MappingItem] = {}
    for each in table["brokerConfigMap"].values():
        for queue, chain in each["mappingDetail"].hosted.items() if each["mappingDetail"] else ():
            if queue not in found or found[queue].gen <= chain[-1].gen:
                found[queue] = chain[-1]
    return found


def _before(plan: Plan) -> dict[str, Any]:
    mappings = {name: each.mapping for name, each in plan.before.items()}
    return _table(plan, mappings, {name: each.write_queues for name, each in plan.before.items()})


def _table(
    plan: Plan, mappings: Mapping[str, TopicMapping | None], queues: Mapping[str, int]
) -> dict[str, Any]:
    """Mappings in the form of the files that mqadmin writes before and after a change."""
    moved = plan.moved().values()
    return {
        "topic": plan.topic,
        "type": "REMAPPING" if moved else "CREATE_OR_UPDATE",
        "epoch": plan.epoch,
        "brokerConfigMap": {
            name: {
                "topicName": plan.topic,
                "readQueueNums": queues[name],
                "writeQueueNums": queues[name],
                "mappingDetail": mapping,
            }
            for name, mapping in sorted(mappings.items())
        },
        "brokerToMapIn": sorted({chain[-1].bname for chain in moved}),
        "brokerToMapOut": sorted({chain[-2].bname for chain in moved}),
    }


@contextmanager
def _as_admin_errors() -> Iterator[None]:
    try:
        yield
    except NoChange as error:
        raise UnchangedTopic(str(error)) from error
    except (BadMapping, InvalidChange, LostMapping) as error:
        raise StaticTopicError(str(error)) from error
