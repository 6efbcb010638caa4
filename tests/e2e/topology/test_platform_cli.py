"""`penstock plan`, `apply` and `verify` as a person or a script runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import pytest
from tests.support import peers
from tests.support.commands import here, without_ours
from tests.support.streams import make_stream

from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.testing import EmbeddedCluster, LossyProxy, eventually

PENSTOCK = str(Path(sys.executable).parent / "penstock")
SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "plan.schema.json").read_text())
EXAMPLE = Path(__file__).parents[3] / "examples" / "gpuaas" / "penstock.yaml"
SECOND = 1_000_000_000
T = TypeVar("T")

PLATFORM = """\
name: shop
environments:
  dev: {{servers: ["{servers}"], replicas: 1}}
  prod: {{servers: ["nats://127.0.0.1:1"], replicas: 3}}
streams:
  BILLING: {{subjects: [platform.billing.>], max_age: 7d, max_bytes: 64MiB}}
  DLQ: {{subjects: [dlq.>]}}
  COPY: {{sources: [{{name: BILLING}}]}}
consumers:
  worker: {{stream: BILLING, filter: platform.billing.usage, ack_wait: 30s, max_deliver: 10, dlq: dlq.billing.usage}}
"""


def penstock(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [PENSTOCK, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=without_ours() | env, check=False)


def with_server(server: EmbeddedServer, ask: Callable[[JetStream], Awaitable[T]]) -> T:
    """Ask the server something, as another client."""

    async def asked() -> T:
        async with connect(server.settings) as broker:
            return await ask(broker.jetstream)

    return asyncio.run(asked())


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The only line of an error."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    return lines[0]


def validated(kind: str, result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON answer, once it was found to be as documented."""
    answer: dict[str, Any] = json.loads(result.stdout)
    jsonschema.validate(answer, {**SCHEMA, "$ref": f"#/$defs/{kind}"})
    return answer


@pytest.fixture
def platform(tmp_path: Path, nats_server: EmbeddedServer) -> Path:
    return written(tmp_path, nats_server.url)


def written(folder: Path, servers: str, *changes: tuple[str, str]) -> Path:
    """A platform file; each change replaces a text in it."""
    text = PLATFORM.format(servers=servers)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "penstock.yaml"
    path.write_text(text)
    return path


def test_the_example_applied_twice_changes_nothing_the_second_time(nats_server: EmbeddedServer) -> None:
    server = ("--servers", nats_server.url)
    planned = here(*server, "plan", EXAMPLE)
    assert (planned.returncode, "32 changes: 32 to create; 0 unchanged." in planned.stdout) == (2, True), planned
    assert penstock(*server, "apply", EXAMPLE).returncode == 0
    again = penstock(*server, "apply", EXAMPLE)
    assert again.returncode == 0
    assert again.stdout == (
        f"environment dev at {nats_server.url}\n"
        "Nothing to do: 32 resources as declared.\n6 lint warnings; see `penstock lint`\n"
    )
    assert penstock(*server, "plan", EXAMPLE).returncode == 0
    verified = here(*server, "verify", EXAMPLE)
    assert verified.returncode == 0
    assert "✓ consumers as declared (23)" in verified.stdout


def test_what_was_just_applied_is_found_well(platform: Path) -> None:
    assert here("apply", platform).returncode == 0
    verified = here("verify", platform, "--json")
    assert (verified.returncode, validated("verify", verified)["healthy"]) == (0, True), verified


def test_a_consumer_changed_behind_its_back_is_named_with_both_values(
    platform: Path, nats_server: EmbeddedServer
) -> None:
    assert here("apply", platform).returncode == 0
    with_server(nats_server, lambda js: js.update_consumer("BILLING", "worker", {"ack_wait": 60 * SECOND}))
    planned, verified = here("plan", platform), here("verify", platform)
    assert (planned.returncode, verified.returncode) == (2, 2)
    assert "~ consumer worker of BILLING  update\n    ack_wait: 1m → 30s\n" in planned.stdout
    assert "ack_wait: declared 30s, found 1m" in verified.stdout
    (change,) = validated("plan", here("plan", platform, "--json"))["changes"]
    assert change["fields"] == [{"name": "ack_wait", "before": 60 * SECOND, "after": 30 * SECOND}]
    (finding,) = validated("verify", here("verify", platform, "--json"))["findings"]
    assert finding["fields"] == [{"name": "ack_wait", "actual": 60 * SECOND, "declared": 30 * SECOND}]


def test_json_answers_are_as_documented(platform: Path, tmp_path: Path, nats_server: EmbeddedServer) -> None:
    created = validated("plan", here("plan", platform, "--json"))
    assert created["summary"]["create"] == 6
    assert (created["platform"], created["environment"], created["version"]) == ("shop", "dev", 1)
    applied = validated("apply", here("apply", platform, "--json"))
    assert [len(applied[part]) for part in ("done", "not_done")] == [6, 0]
    worse = written(tmp_path, nats_server.url, ("max_bytes: 64MiB", "storage: memory"), ("  DLQ", "  DEAD"))
    planned = validated("plan", here("plan", worse, "--json"))
    assert {(c["kind"], c["risk"]) for c in planned["changes"]} == {("create", "create"), ("recreate", "impossible")}
    assert [o["name"] for o in planned["orphans"]] == ["DLQ"]


def test_a_loss_is_refused_without_allow_destroy_and_made_with_it(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    before = with_server(nats_server, lambda js: js.stream_info("BILLING"))
    file = written(tmp_path, nats_server.url, ("64MiB", "64MiB, storage: memory"), ("30s", "30s, deliver: new"))
    refused = here("apply", file)
    assert refused.returncode == 1
    assert "add --allow-destroy" in one_line(refused)
    assert with_server(nats_server, lambda js: js.stream_info("BILLING")).created == before.created
    assert here("apply", file, "--allow-destroy").returncode == 0
    assert with_server(nats_server, lambda js: js.stream_info("BILLING")).config["storage"] == "memory"
    assert here("plan", file).returncode == 0


def test_prune_removes_what_is_no_longer_declared(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    file = written(tmp_path, nats_server.url, ("  COPY: {sources: [{name: BILLING}]}\n", ""))
    left = here("plan", file)
    assert (left.returncode, "left alone without --prune: stream COPY" in left.stdout) == (0, True)
    pruned = here("plan", file, "--prune")
    assert (pruned.returncode, "- stream COPY  delete" in pruned.stdout) == (2, True)
    assert "refused" in left.stdout, "a name that is gone, and is not deleted"
    applied = here("apply", file, "--prune")
    assert (applied.returncode, "refused" in pruned.stdout + applied.stdout) == (0, False), applied.stdout
    assert here("plan", file, "--prune").returncode == 0


def test_a_line_that_says_the_default_can_go_without_a_loss(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    """Against a real server: what it fills in by itself is what the table of fields says."""
    stream = "retention: limits, storage: file, discard: old, max_msgs: unlimited, compression: none, "
    consumer = "replay: instant, max_waiting: 512, max_ack_pending: 1000, "
    full = written(tmp_path, nats_server.url, ("{subjects: [platform", "{" + stream + "subjects: [platform"))
    full.write_text(full.read_text().replace("{stream: BILLING", "{" + consumer + "stream: BILLING"))
    assert here("apply", full).returncode == 0
    file = written(tmp_path, nats_server.url, ("ack_wait: 30s, ", ""))
    planned = validated("plan", here("plan", file, "--json"))
    assert {(c["name"], c["risk"]) for c in planned["changes"]} == {("BILLING", "safe"), ("worker", "safe")}, planned
    assert {f["name"] for c in planned["changes"] for f in c["fields"]} == {"metadata.penstock.declared"}
    assert here("apply", file).returncode == 0
    assert here("plan", file).returncode == 0


def test_a_file_without_a_name_never_prunes(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    first = written(tmp_path, nats_server.url, ("name: shop\n", ""))
    assert here("apply", first).returncode == 0
    other = tmp_path / "other.yaml"
    other.write_text(f"environments: {{dev: {{servers: ['{nats_server.url}']}}}}\nstreams: {{X: {{max_age: 1d}}}}\n")
    planned = validated("plan", here("plan", other, "--json"))
    assert (planned["orphans"], [c["name"] for c in planned["changes"]]) == ([], ["X"])
    for command in ("plan", "apply"):
        refused = here(command, other, "--prune")
        assert (refused.returncode, "add `name: <platform>`" in one_line(refused)) == (1, True)


def test_what_another_platform_owns_is_refused_until_it_is_taken_over(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    other = written(tmp_path, nats_server.url, ("name: shop", "name: other"))
    assert here("plan", other).returncode == 0, "declaring the same is no harm"
    other = written(tmp_path, nats_server.url, ("name: shop", "name: other"), ("64MiB", "65MiB"))
    planned = here("plan", other)
    assert (planned.returncode, "stream BILLING  impossible" in planned.stdout) == (2, True), planned
    refused = one_line(here("apply", other, "--allow-destroy"))
    assert "owned by platform 'shop'" in refused
    (change,) = validated("plan", here("plan", other, "--json"))["changes"]
    assert (change["risk"], change["owner"]) == ("impossible", "shop")
    assert "taken over from platform 'shop'" in here("plan", other, "--take-over").stdout
    assert here("apply", other, "--take-over").returncode == 0
    assert here("plan", other).returncode == 0


def many_streams(folder: Path, servers: str) -> Path:
    """A platform of 400 streams, which takes a while to apply."""
    streams = "".join(f"  S{n}: {{subjects: [s{n}]}}\n" for n in range(400))
    file = folder / "penstock.yaml"
    file.write_text(f"environments:\n  dev: {{servers: ['{servers}']}}\nstreams:\n{streams}")
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_apply_says_what_was_done_and_what_was_not(
    tmp_path: Path, nats_server: EmbeddedServer, number: int
) -> None:
    waits = threading.Event()

    def lost_at_s50(line: bytes) -> bool:  # the command then waits for an answer, however slow we are
        if b".STREAM.CREATE.S50 " in line:
            waits.set()
        return waits.is_set()

    with LossyProxy(nats_server.port) as proxy:
        proxy.drop_up = lost_at_s50
        command = [PENSTOCK, "--timeout", "60", "apply", str(many_streams(tmp_path, proxy.url)), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert waits.wait(60)
            running.send_signal(number)
            stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 1, stderr
    assert "error: stopped at stream S50" in stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    answer = validated("apply", subprocess.CompletedProcess(command, 1, stdout, stderr))
    assert len(answer["done"]) >= 5
    assert len(answer["done"]) + 1 + len(answer["not_done"]) == 400
    assert "interrupted" in answer["error"]


def test_a_refused_apply_is_a_document_too(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    refused = here("apply", written(tmp_path, nats_server.url, ("64MiB", "64MiB, storage: memory")), "--json")
    answer = validated("apply", refused)
    assert (refused.returncode, answer["done"], answer["failed"]) == (1, [], None)
    assert [c["name"] for c in answer["not_done"]] == ["BILLING"]
    assert "--allow-destroy" in answer["error"]
    assert one_line(refused) == f"error: {answer['error']}"


@pytest.mark.parametrize("command", ["plan", "apply", "verify"])
def test_an_error_before_any_answer_is_a_document_too(tmp_path: Path, command: str) -> None:
    unreachable = here("--timeout", "0.3", command, written(tmp_path, "nats://127.0.0.1:9"), "--json")
    assert unreachable.returncode == 1
    assert "nats://127.0.0.1:9" in validated("error", unreachable)["error"]
    wrong = here(command, written(tmp_path, "nats://127.0.0.1:9", ("7d", "7x")), "--json")
    assert [p["line"] for p in validated("error", wrong)["problems"]] == [6]


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_what_lint_calls_an_error_is_refused_before_a_server_is_asked(tmp_path: Path, command: str) -> None:
    file = written(tmp_path, "nats://127.0.0.1:9", (", dlq: dlq.billing.usage", ""))
    refused = here("--timeout", "0.3", command, file)
    assert refused.returncode == 1
    assert "D01" in refused.stdout
    assert "gives up after 10 deliveries and has no dlq (D01)" in one_line(refused)
    findings = validated("error", here(command, file, "--json"))["findings"]
    assert [f["code"] for f in findings] == ["D01"]


def test_a_renamed_consumer_is_refused_until_the_loss_is_allowed(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    lock = tmp_path / "penstock.lock.yaml"
    assert "worker:" in lock.read_text()
    file = written(tmp_path, nats_server.url, ("  worker:", "  labourer:"))
    planned = here("plan", file)
    assert planned.returncode == 2
    assert "N01: consumer 'worker' of stream 'BILLING' looks renamed to 'labourer'" in planned.stdout
    assert [f["code"] for f in validated("plan", here("plan", file, "--json"))["renames"]] == ["N01"]
    refused = here("apply", file)
    assert refused.returncode == 1
    assert "looks renamed to 'labourer' (N01); rename it back, write `renamed_from: worker`" in one_line(refused)
    answer = validated("apply", here("apply", file, "--json"))
    assert ([f["code"] for f in answer["renames"]], answer["done"]) == (["N01"], [])
    assert with_server(nats_server, lambda js: js.consumer_names("BILLING")) == ["worker"]
    assert "worker:" in lock.read_text(), "what was refused changes nothing"

    lock.unlink()  # another folder, another environment: the server itself still knows the old name
    refused = here("apply", file)
    assert refused.returncode == 1
    assert "looks renamed from worker, and would start over" in one_line(refused)
    assert here("apply", file, "--allow-destroy").returncode == 0
    assert "labourer:" in lock.read_text()
    assert "N01" not in here("plan", file).stdout


def test_a_removed_stream_is_refused_until_the_loss_is_allowed(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    assert here("apply", written(tmp_path, nats_server.url)).returncode == 0
    file = written(tmp_path, nats_server.url, ("  COPY: {sources: [{name: BILLING}]}\n", ""))
    refused = here("apply", file)
    assert (refused.returncode, "stream 'COPY' is no longer declared (N04)" in one_line(refused)) == (1, True)
    assert "COPY" in (tmp_path / "penstock.lock.yaml").read_text()
    applied = here("apply", file, "--allow-destroy")
    assert (applied.returncode, "refused" in applied.stdout) == (0, False)
    assert "allowed by --allow-destroy: N04: stream 'COPY' is no longer declared" in applied.stdout


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
def test_a_consumer_with_its_former_name_goes_on_where_that_one_was(
    tmp_path: Path, nats_server: EmbeddedServer, retention: str
) -> None:
    kept = (("max_age: 7d", f"max_age: 7d, retention: {retention}"), ("  COPY: {sources: [{name: BILLING}]}\n", ""))
    assert here("apply", written(tmp_path, nats_server.url, *kept)).returncode == 0

    async def acknowledge(js: JetStream) -> None:
        async with peers.nats_py(nats_server.settings) as peer:
            for number in range(5):
                await peer.publish("platform.billing.usage", b"%d" % number)
        await peers.acknowledge(nats_server.settings, "BILLING", "worker", 3, 3)

    with_server(nats_server, acknowledge)
    file = written(tmp_path, nats_server.url, *kept, ("  worker: {", "  labourer: {renamed_from: worker, "))
    assert here("lint", file).returncode == 0
    planned = here("plan", file)
    assert "goes on behind sequence 3, the ack floor of worker" in planned.stdout
    assert here("apply", file).returncode == 0, here("apply", file).stderr
    assert with_server(nats_server, lambda js: js.consumer_names("BILLING")) == ["labourer"]

    async def rest(js: JetStream) -> list[bytes]:
        async with peers.nats_py(nats_server.settings) as peer:
            reader = await peer.pull_subscribe_bind("labourer", "BILLING")
            return [message.data for message in await reader.fetch(2)]

    assert with_server(nats_server, rest) == [b"3", b"4"]
    assert with_server(nats_server, lambda js: js.consumer_info("BILLING", "labourer")).pending == 0
    assert here("plan", file).returncode == 0, "its start is not held against it"
    without = written(tmp_path, nats_server.url, *kept, ("  worker: {", "  labourer: {"))
    assert here("plan", without).returncode == 0, here("plan", without).stdout


def test_a_variable_does_not_send_an_environment_to_another_cluster(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    """`--env prod` with the variable of a dev shell: the file says where prod is."""
    file = written(tmp_path, nats_server.url)
    dev = {"PENSTOCK_SERVERS": nats_server.url}
    refused = here("apply", file, "--env", "prod", variables=dev)
    assert refused.returncode == 1
    assert "PENSTOCK_SERVERS overrides what" in refused.stderr
    assert "--allow-override" in refused.stderr
    assert (
        "PENSTOCK_SERVERS overrides"
        in validated("error", here("apply", file, "--env", "prod", "--json", variables=dev))["error"]
    )
    assert with_server(nats_server, lambda js: js.stream_names()) == []

    planned = here("plan", file, "--env", "prod", variables=dev)
    assert f"environment prod at {nats_server.url}, by PENSTOCK_SERVERS" in planned.stdout
    assert (
        f"warning: PENSTOCK_SERVERS overrides the platform file: {nats_server.url}, not nats://127.0.0.1:1"
        in planned.stderr
    )
    told = validated("plan", here("plan", file, "--env", "prod", "--json", variables=dev))
    assert (told["servers"], told["overridden_by"]) == ([nats_server.url], ["PENSTOCK_SERVERS"])

    assert here("apply", file, variables=dev).returncode == 0, "the same servers override nothing"
    assert here("apply", file, "--env", "dev", "--allow-override", variables=dev).returncode == 0
    flag = here("--servers", nats_server.url, "plan", file, "--env", "prod")
    assert ("overrides" in flag.stderr, f"environment prod at {nats_server.url}" in flag.stdout) == (False, True)


def test_commands_about_a_server_take_it_from_an_environment_of_the_file(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    file = written(tmp_path, nats_server.url)
    assert here("apply", file).returncode == 0
    for command in (["status"], ["consumer", "ls"], ["dlq", "ls"], ["fetch", "worker"]):
        done = here(*command, "--file", file, "--env", "dev", "--json")
        assert done.returncode == 0, done
        assert here(*command, "--env", "dev", cwd=tmp_path).returncode == 0
        elsewhere = here("--timeout", "0.3", *command, "--file", file, "--env", "prod")
        assert (elsewhere.returncode, "127.0.0.1:1" in elsewhere.stderr) == (1, True), elsewhere
    warned = here("status", "--file", file, "--env", "prod", variables={"PENSTOCK_SERVERS": nats_server.url})
    assert (warned.returncode, "PENSTOCK_SERVERS overrides" in warned.stderr) == (0, True)


def test_consumers_that_the_file_does_not_know_are_listed_and_unsafe_ones_are_findings(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    file = written(tmp_path, nats_server.url)
    assert here("apply", file).returncode == 0
    base = {"filter_subject": "platform.billing.other"}
    safe = {"durable_name": "safe", "ack_policy": "explicit", **base}
    with_server(nats_server, lambda js: js.create_consumer("BILLING", safe))
    verified = here("verify", file)
    assert (verified.returncode, "not declared: consumer safe of BILLING" in verified.stdout) == (0, True), verified
    unsafe = ({"durable_name": "deaf", "ack_policy": "none"}, {"durable_name": "pushed", "deliver_subject": "to.me"})
    for config in unsafe:
        wanted = {"ack_policy": "explicit", **base, **config}
        with_server(nats_server, partial(JetStream.create_consumer, stream="BILLING", config=wanted))
    answer = validated("verify", here("verify", file, "--json"))
    assert [one["name"] for one in answer["findings"]] == ["deaf", "pushed"]
    assert [one["name"] for one in answer["undeclared"]] == ["deaf", "pushed", "safe"]


def test_a_stream_that_is_in_the_way_is_named(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    with_server(nats_server, lambda js: make_stream(js, "OLD", subjects=["platform.billing.usage"]))
    failed = here("apply", written(tmp_path, nats_server.url))
    assert failed.returncode == 1
    assert "'platform.billing.>' overlaps 'platform.billing.usage' of stream 'OLD'" in one_line(failed)


@pytest.mark.kills
def test_a_cluster_without_a_quorum_is_ill_and_no_error(tmp_path: Path, nats_cluster: EmbeddedCluster) -> None:
    first, *others = nats_cluster.nodes
    file = written(tmp_path, first.url)
    assert here("apply", file).returncode == 0
    for node in others:
        node.kill()

    def ill() -> bool:  # streams whose node is gone are missed before the quorum is
        verified = here("--timeout", "3", "verify", file)
        return verified.returncode == 2 and "JetStream is unhealthy" in verified.stdout

    eventually(ill, within=120, what="a verification that finds no quorum")
    answer = validated("verify", here("--timeout", "3", "verify", file, "--json"))
    assert (answer["healthy"], set(answer["checks"].values())) == (False, {False})
    assert answer["error"]


@pytest.mark.kills
@pytest.mark.short
def test_a_server_killed_in_the_middle_of_an_apply_leaves_something_that_a_second_apply_completes(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    file = many_streams(tmp_path, nats_server.url)
    command = [PENSTOCK, "--timeout", "2", "apply", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        eventually(lambda: nats_server.monitor("/jsz")["streams"] >= 20, within=60, what="some streams")
        nats_server.kill()
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "Traceback" not in stderr
    assert "error: stopped at stream S" in stderr
    answer = validated("apply", subprocess.CompletedProcess(command, 1, stdout, stderr))
    done = len(answer["done"])
    assert 19 <= done < 400, "of the last one the server may have died before it answered"
    assert done + 1 + len(answer["not_done"]) == 400
    nats_server.start()
    second = validated("apply", here("apply", file, "--json"))
    assert second["unchanged"] + len(second["done"]) == 400
    assert here("plan", file).returncode == 0


# -- what a person gets wrong ------------------------------------------------------------------------------------------


def test_an_unreachable_server_is_one_line_that_names_it(tmp_path: Path) -> None:
    for command in ("plan", "apply", "verify"):
        result = here("--timeout", "0.3", command, written(tmp_path, "nats://127.0.0.1:9"))
        assert result.returncode == 1
        assert "nats://127.0.0.1:9" in one_line(result)


def test_wrong_credentials_are_one_line_that_says_so(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path / "nats", user="me", password="right") as server:
        file = written(tmp_path, server.url)
        result = penstock("plan", file, PENSTOCK_USER="me", PENSTOCK_PASSWORD="wrong")
        assert result.returncode == 1
        assert "refused the login" in one_line(result)
        assert here("--user", "me", "--password", "right", "plan", file).returncode == 2


def test_a_server_without_jetstream_is_one_line_that_says_so(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path / "nats", jetstream=False) as server:
        for command in ("plan", "apply", "verify"):
            result = here(command, written(tmp_path, server.url))
            assert result.returncode == 1
            assert "JetStream" in one_line(result)


def test_a_server_that_is_too_old_is_one_line_with_feature_and_versions(
    tmp_path: Path, old_nats_server_binary: Path
) -> None:
    with EmbeddedServer(data=tmp_path / "nats", binary=old_nats_server_binary) as server:
        plain = written(tmp_path, server.url)
        assert here("apply", plain).returncode == 0, "what it knows works"
        assert here("plan", plain).returncode == 0
        file = written(tmp_path, server.url, ("max_bytes: 64MiB", "allow_batched: true"))
        for command in ("plan", "apply", "verify"):
            result = here(command, file)
            assert result.returncode == 1
            assert "stream BILLING: fast batch publishing needs nats-server 2.14.0 or newer" in one_line(result)
            assert "this server is 2.1" in one_line(result)


def test_flags_win_over_the_environments_servers(platform: Path, nats_server: EmbeddedServer) -> None:
    assert here("--servers", nats_server.url, "plan", platform, "--env", "prod").returncode == 2
    assert here("--timeout", "0.3", "plan", platform, "--env", "prod").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan"], 1, "there is no file 'penstock.yaml'"),
        (["plan", "nowhere.yaml"], 1, "there is no file 'nowhere.yaml'"),
        (
            ["apply", "penstock.yaml", "--env", "production"],
            1,
            "there is no environment 'production'; known are dev, prod",
        ),
        (["verify", "penstock.yaml", "--alow-destroy"], 64, "No such option"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(platform: Path, arguments: list[str], code: int, words: str) -> None:
    given = [str(platform) if argument == "penstock.yaml" else argument for argument in arguments]
    result = here(*given)
    assert result.returncode == code, result
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["plan", "apply", "verify"])
def test_help_has_an_example(command: str) -> None:
    result = here(command, "--help")
    assert (result.returncode, "Example:" in result.stdout) == (0, True)
