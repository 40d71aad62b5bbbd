"""The official Java client and mqadmin against a broker: ours, or with PEER=apache their own.

``allow.txt`` lists what passes on headrace. A listed scenario that fails is a regression; one
that passes unlisted belongs on the list, so the list only grows. ``FINDINGS.md`` says why the
rest does not pass. Apache's own broker must pass everything: that run proves the scenarios.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.peer import QUICK_JVM, driver_command, quick_peer

PEER = os.environ.get("CONFORMANCE_PEER", "headrace")
CODECS = ("JSON", "ROCKETMQ")
SCENARIOS = (
    "lite_pull_assign_seek",
    "lite_pull_offset_for_timestamp",
    "lite_pull_subscribe",
    "lite_pull_tags",
    "mqadmin_brokerStatus",
    "mqadmin_clusterList",
    "mqadmin_consumerConnection",
    "mqadmin_consumerProgress",
    "mqadmin_deleteTopic",
    "mqadmin_getBrokerConfig",
    "mqadmin_queryMsgById",
    "mqadmin_queryMsgByKey",
    "mqadmin_resetOffsetByTime",
    "mqadmin_topicList",
    "mqadmin_topicRoute",
    "mqadmin_topicStatus",
    "mqadmin_updateSubGroup",
    "mqadmin_updateTopic",
    "producer_async",
    "producer_auto_created_topic",
    "producer_batch",
    "producer_big_body",
    "producer_compressed_body",
    "producer_one_way",
    "producer_refused",
    "producer_sync",
    "producer_tags_keys_properties",
    "producer_to_chosen_queue",
    "push_broadcast",
    "push_concurrently",
    "push_delay_level",
    "push_held_pull",
    "push_orderly",
    "push_retry",
    "push_tags",
    "push_two_members",
    "query_by_key",
    "query_offsets",
    "request_reply",
    "static_deleteTopic",
    "static_remappingStaticTopic",
    "static_resetOffsetByTime",
    "static_topicRoute",
    "static_topicStatus",
    "static_updateStaticTopic",
    "static_updateTopicPerm",
    "transaction",
    "view_by_offset_id",
    "view_by_unique_id",
)
# Undecided transactions are checked soon.
SETTINGS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}
SUITE_TIMEOUT_S = 300
ALLOW = Path(__file__).with_name("allow.txt")

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@dataclass(frozen=True)
class Result:
    ok: bool
    detail: str


@dataclass(frozen=True)
class Suite:
    """The outcomes of the scenarios in one codec, by name."""

    codec: str
    results: dict[str, Result]


@pytest.fixture(scope="session", params=["JSON", pytest.param("ROCKETMQ", marks=pytest.mark.long)])
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Every scenario, run side by side by one JVM on a fresh broker."""
    codec: str = request.param
    home = tmp_path_factory.mktemp(codec)
    command = driver_command("conformance.Suite", home=home, codec=codec, options=QUICK_JVM)
    with quick_peer(PEER, settings=SETTINGS) as peer, (home / "stderr").open("w") as errors:
        run = subprocess.Popen(
            [*command, peer.nameserver], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return Suite(codec, outcome(run))


def outcome(run: subprocess.Popen[str]) -> dict[str, Result]:
    try:
        printed, _ = run.communicate(timeout=SUITE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        run.kill()
        printed, _ = run.communicate()
    lines = [json.loads(line) for line in printed.splitlines()]
    return {line["scenario"]: Result(line["ok"], line["detail"]) for line in lines}


def allowed() -> set[tuple[str, str]]:
    """(scenario, codec) of each line of the allow list; for Apache's own broker, all there are."""
    if PEER == "apache":
        return {(scenario, codec) for scenario in SCENARIOS for codec in CODECS}
    lines = [line.partition("#")[0].split() for line in ALLOW.read_text().splitlines()]
    return {(line[0], line[1]) for line in lines if line}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, suite: Suite) -> None:
    result = suite.results.get(scenario, Result(ok=False, detail="no result"))
    if (scenario, suite.codec) in allowed():
        assert result.ok, f"on {PEER}, in allow.txt, but failed: {result.detail}"
    else:
        assert not result.ok, f"passes on {PEER}: add `{scenario} {suite.codec}` to {ALLOW.name}"


def test_every_scenario_is_known(suite: Suite) -> None:
    assert set(suite.results) == set(SCENARIOS)


def test_allow_list_names_scenarios() -> None:
    assert allowed() <= {(scenario, codec) for scenario in SCENARIOS for codec in CODECS}
