"""Records of the message trace, as our clients and Java's write them."""

from __future__ import annotations

import pytest

from headrace_protocol.trace_records import (
    Code,
    EndTransaction,
    Kind,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    decode_trace,
    encode_trace,
)

PUB = Pub(1, "g", "T", "id", "a", "k1 k2", "h:1", 5, 6, Kind.DELAYED, "off", success=False)
# As TraceDataEncoder of RocketMQ 5.5 writes them.
TEXTS: dict[str, TraceRecord] = {
    "Pub,1,DefaultRegion,g,T,id,a,k1 k2,h:1,5,6,3,off,false": PUB,
    "SubBefore,1,DefaultRegion,g,r,id,3,k": SubBefore(1, "g", "r", "id", 3, "k"),
    "SubAfter,r,id,4,false,k,4,9,g": SubAfter(
        "r", "id", 4, success=False, keys="k", code=Code.FAILED, time_ms=9, group="g"
    ),
    "EndTransaction,1,DefaultRegion,g,T,id,,,h:1,2,id,COMMIT_MESSAGE,true": EndTransaction(
        1, "g", "T", "id", "", "", "h:1", Kind.COMMITTED, "id", "COMMIT_MESSAGE", is_check=True
    ),
    "Recall,1,DefaultRegion,g,T,id,true": Recall(1, "g", "T", "id"),
}
# Other forms of Java clients, old and new, which are only read.
READ_ONLY = {
    "Pub,1,null,g,T,id,null,null,h:1,5,6,0,true": Pub(1, "g", "T", "id", "", "", "h:1", 5, 6),
    "Pub,1,R,g,T,id,a,k,h:1,5,6,0,off,true,host": Pub(
        1, "g", "T", "id", "a", "k", "h:1", 5, 6, Kind.NORMAL, "off"
    ),
    "SubAfter,r,id,4,true,k": SubAfter("r", "id", 4, keys="k"),
    "SubAfter,r,id,4,true,k,0": SubAfter("r", "id", 4, keys="k"),
    "SubBefore,x,R,g,r,id": SubBefore(0, "g", "r", "id"),
    " Recall,1,R,g,T,id,false": Recall(1, "g", "T", "id", success=False),
}


def raw(text: str) -> str:
    return text.replace(",", "\x01") + "\x02"


@pytest.mark.parametrize("text", TEXTS)
def test_a_record_is_written_and_read(text: str) -> None:
    assert encode_trace(TEXTS[text]) == raw(text)
    assert list(decode_trace(raw(text))) == [TEXTS[text]]


@pytest.mark.parametrize("text", READ_ONLY)
def test_other_forms_are_read(text: str) -> None:
    assert list(decode_trace(raw(text))) == [READ_ONLY[text]]


def test_a_message_has_many_records() -> None:
    text = "".join(map(raw, TEXTS))
    assert list(decode_trace(text)) == list(TEXTS.values())


@pytest.mark.parametrize("text", ["", "\x02\x02", "Pub", "Pub,1,R", "Sub,1", "SubAfter,r", ",,,"])
def test_what_is_no_record_is_left_out(text: str) -> None:
    assert list(decode_trace(raw(text))) == []


def test_separators_in_a_field_do_not_make_records() -> None:
    recall = Recall(1, "g\x01h", "T", "id\x02Recall\x012")
    assert list(decode_trace(encode_trace(recall))) == [Recall(1, "g h", "T", "id Recall 2")]
