"""Messages that a member sends back: their broker delivers them again, or to the dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import ConsumerSendMsgBackHeader

if TYPE_CHECKING:
    from headrace.instance import ClientInstance
    from headrace.received import ReceivedMessage

# The delay level of a message for its group's dead letters.
DEAD_LETTERS: Final = -1


async def send_back(
    instance: ClientInstance,
    address: str,
    group: str,
    message: ReceivedMessage,
    delay_level: int,
    retries_max: int | None = None,
) -> None:
    """Have the broker that stored a message deliver it to its group again.

    address: of that broker. delay_level: 0 for a delay that grows with each retry. retries_max:
    retries after which the message goes to the dead letters; by default the group's.
    Raises BrokerError, ConnectionLost, RequestTimeout.
    """
    header = ConsumerSendMsgBackHeader(
        offset=message.stored.physical_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=message.message_id,
        origin_topic=message.topic,
        max_reconsume_times=retries_max,
    )
    response = await instance.request(address, RequestCode.CONSUMER_SEND_MSG_BACK, header)
    response.expect()
