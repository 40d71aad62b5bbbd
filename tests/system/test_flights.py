"""The flights find what a broker could do wrong, and find nothing wrong with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from examples.flights.ledger import FLIGHT_COUNT, QUEUES, CarrierDelays, Ledger, airlines, flights
from headrace.messages import Message
from headrace.received import MessageBatch
from tests.support.documents import ROOT
from tests.support.processes import dev


def run_flights(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.flights", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
    )


def first_flights(count: int) -> list[Message]:
    return list(islice(flights(), count))


def receive(ledger: Ledger, messages: list[Message]) -> None:
    """Hand messages out as a batch; they have all that the ledger asks of received ones."""
    ledger.received(cast("MessageBatch", messages))


def broken(damage: Callable[[list[Message]], list[Message]]) -> set[str]:
    """The first words of the promises that do not hold after this damage."""
    ledger = Ledger()
    sent = first_flights(300)
    for message in sent:
        ledger.sent(message)
    receive(ledger, damage(first_flights(300)))
    return {check.promise.split()[0] for check in ledger.checks() if not check.holds} - {"all"}


def test_flights_are_keyed_by_tail_number_and_tagged_by_carrier() -> None:
    first = first_flights(1)[0]
    assert (first.topic, first.key, first.tag) == ("flights", "N14228", "UA")
    assert first.properties == {"row": "0"}
    assert first.body.startswith(b'{"year":"2013","month":"1","day":"1","dep_time":"517"')


def test_a_flight_without_a_tail_number_has_no_key() -> None:
    # Row 1782 of the file is the first whose tail number is NA.
    keys = [message.key for message in first_flights(1783)]
    assert keys.index("") == 1782


def test_all_is_well_when_nothing_is_damaged() -> None:
    assert broken(lambda messages: messages) == set()


@pytest.mark.parametrize(
    ("damage", "promise"),
    [
        (lambda messages: messages[:-1], "each"),
        (lambda messages: [*messages, messages[0]], "each"),
        (lambda messages: sorted(messages, key=lambda m: -int(m.properties["row"])), "flights"),
    ],
    ids=["lost", "repeated", "out of order"],
)
def test_damage_is_found(damage: Callable[[list[Message]], list[Message]], promise: str) -> None:
    assert promise in broken(damage)


def test_a_changed_body_is_found() -> None:
    def change(messages: list[Message]) -> list[Message]:
        messages[5].body = messages[5].body.replace(b"2013", b"2014")
        return messages

    assert broken(change) == {"bodies"}


def test_cancelled_flights_have_no_delay() -> None:
    ledger = Ledger()
    # Row 838 never left.
    sent = first_flights(839)
    for message in sent:
        ledger.sent(message)
    receive(ledger, sent)
    totals = ledger.carriers.values()
    assert sum(delays.flights for delays in totals) == 839
    assert sum(delays.departed for delays in totals) == 838
    assert all(isinstance(delays, CarrierDelays) for delays in totals)
    assert ledger.carriers.keys() <= airlines().keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "promises", "later"),
    [
        ("--no-spark", 4, 0),
        # Spark needs one flight of the next year, which the consumers do not wait for.
        pytest.param("--spark", 8, 1, marks=pytest.mark.long),
    ],
)
def test_the_whole_example_and_its_folder_afterwards(
    option: str, promises: int, later: int, tmp_path: Path
) -> None:
    done = run_flights(option, "--data", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"all {FLIGHT_COUNT} flights sent" in done.stdout
    assert done.stdout.count("\nok  ") == promises
    # Facts of the data set, out of what the consumers received.
    assert "United Air Lines Inc.\t58665\t686\t12.1\t3.56" in done.stdout
    with dev("--data", str(tmp_path)) as broker:
        queues = broker.json("topic", "describe", "flights")["queues"]
        assert len(queues) == QUEUES
        assert sum(queue["messages"] for queue in queues) == FLIGHT_COUNT + later
        assert sum(row["lag"] for row in broker.json("group", "lag", "flights")) == later
    again = run_flights("--data", str(tmp_path))
    assert again.returncode == 2
    assert "already has a topic flights" in again.stderr
