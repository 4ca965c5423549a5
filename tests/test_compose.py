"""The containers of compose.yaml, run for real. `make compose-test` (docker/compose-test.sh) provides Docker and
the image, names them in the environment, and runs this; the tests share one cluster and go in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

pytestmark = [
    pytest.mark.compose,
    pytest.mark.skipif("EI_TEST_COMPOSE" not in os.environ, reason="needs Docker: run make compose-test"),
]

ROOT = Path(__file__).parent.parent
OURS = ("directory", "planner", "telemetry", "router", "worker-1", "worker-2", "worker-3")
PUBLISHED = ("router", "telemetry")
HEALTHY_S = 120.0
REPLAY_S = 600.0

T = TypeVar("T")


def wait_until(what: str, check: Callable[[], T | None], deadline_s: float) -> T:
    """The first value of `check` that is not None or False; fails after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.5)


def docker(*args: str, timeout_s: float = 60.0) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"docker {' '.join(args)}: {done.stderr.strip()}"
    return done.stdout.strip()


class Cluster:
    """The compose project that the script named, seen from the host."""

    def __init__(self) -> None:
        self.command = os.environ["EI_TEST_COMPOSE"].split()
        self.project = os.environ["COMPOSE_PROJECT_NAME"]

    def compose(self, *args: str, timeout_s: float = 300.0) -> None:
        command = [*self.command, *args]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"

    def container(self, service: str) -> str:
        """Id of the service's container, running or not."""
        project = f"label=com.docker.compose.project={self.project}"
        found = docker(
            "ps", "-aq", "-f", project, "-f", f"label=com.docker.compose.service={service}"
        ).split()
        assert len(found) == 1, f"{service} has {len(found)} containers"
        return found[0]

    def inspect(self, service: str) -> dict[str, object]:
        details = json.loads(docker("inspect", self.container(service)))[0]
        assert isinstance(details, dict)
        return details

    def state(self, service: str, key: str) -> object:
        state = self.inspect(service)["State"]
        assert isinstance(state, dict)
        return state[key]

    def healthy(self, service: str) -> bool:
        health = self.state(service, "Health")
        return isinstance(health, dict) and health["Status"] == "healthy"

    def all_healthy(self) -> bool:
        return all(self.healthy(service) for service in ("redis", *OURS))

    def url(self, service: str) -> str:
        return "http://" + docker("port", self.container(service), "8000/tcp")

    def logs(self) -> str:
        """The end of every container's log, the longer where it is not well."""
        parts = []
        names = docker(
            "ps", "-a", "-f", f"label=com.docker.compose.project={self.project}", "--format", "{{.Names}}"
        )
        for name in names.splitlines():
            state = json.loads(docker("inspect", "--format", "{{json .State}}", name))
            well = state.get("Health", {}).get("Status", "healthy") == "healthy" and not state["ExitCode"]
            done = subprocess.run(
                ["docker", "logs", "--tail", "15" if well else "200", name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
            )
            parts.append(f"---- {name}: {json.dumps(state)}\n{done.stdout}")
        return "\n".join(parts)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster()
    failed_before = request.session.testsfailed
    up = False
    try:
        cluster.compose("up", "-d")
        wait_until("all services healthy", cluster.all_healthy, HEALTHY_S)
        up = True
        yield cluster
    finally:
        if not up or request.session.testsfailed > failed_before:
            print(cluster.logs(), file=sys.stderr)
        cluster.compose("--profile", "loadtest", "down", "--volumes")


def get_json(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body = json.load(answer)
    assert isinstance(body, dict)
    return body


def model(router: str) -> str:
    data = get_json(f"{router}/v1/models")["data"]
    assert isinstance(data, list)
    return str(data[0]["id"])


def streamed_chat(router: str, text: str, max_tokens: int = 24) -> tuple[str, int]:
    """Text and number of pieces of one streamed answer; checks its form and its usage."""
    body = {
        "model": model(router),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{router}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    pieces: list[str] = []
    usage: dict[str, int] = {}
    last = ""
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers.get_content_type() == "text/event-stream"
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            last = line[6:].decode().strip()
            if last == "[DONE]":
                continue
            chunk = json.loads(last)
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            pieces += [piece for choice in chunk["choices"] if (piece := choice["delta"].get("content"))]
    assert last == "[DONE]"
    assert 0 < usage["completion_tokens"] <= max_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return "".join(pieces), len(pieces)


def test_three_nodes_join(cluster: Cluster) -> None:
    def nodes() -> set[str] | None:
        listed = get_json(f"{cluster.url('router')}/ei/v1/cluster")["nodes"]
        assert isinstance(listed, list)
        names = {str(node["node"]) for node in listed}
        return names if len(names) == 3 else None

    assert wait_until("three nodes", nodes, 30) == {"worker-1", "worker-2", "worker-3"}


def test_only_the_api_and_the_live_page_are_published(cluster: Cluster) -> None:
    for service in ("redis", *OURS):
        network = cluster.inspect(service)["NetworkSettings"]
        assert isinstance(network, dict)
        bound = [binding["HostIp"] for port in network["Ports"].values() for binding in port or []]
        assert bound == (["127.0.0.1"] if service in PUBLISHED else []), service


def test_no_container_runs_as_root_or_writes_its_image(cluster: Cluster) -> None:
    for service in OURS:
        details = cluster.inspect(service)
        config, host = details["Config"], details["HostConfig"]
        assert isinstance(config, dict) and isinstance(host, dict)
        assert config["User"] == "10001:10001", service
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service


def test_a_chat_streams_through_the_router(cluster: Cluster) -> None:
    text, pieces = streamed_chat(cluster.url("router"), "Say something through the containers.")
    assert text
    assert pieces > 1, "the answer came in one piece"


def test_the_live_page_and_the_metrics_are_served(cluster: Cluster) -> None:
    telemetry = cluster.url("telemetry")
    with urllib.request.urlopen(f"{telemetry}/", timeout=10) as answer:
        assert answer.headers.get_content_type() == "text/html"
    with urllib.request.urlopen(f"{telemetry}/metrics", timeout=10) as answer:
        assert b"# TYPE" in answer.read()


def test_the_loadtest_profile_replays_with_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    cluster.compose("--profile", "loadtest", "up", "-d", "loadtest")
    container = cluster.container("loadtest")
    assert docker("wait", container, timeout_s=REPLAY_S) == "0", docker("logs", container)
    docker("cp", f"{container}:/reports/report.json", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == 0
    assert report["requests"] > 0
    assert report["kv_hit_rate"] > 0


def test_requests_are_served_while_the_directory_is_down(cluster: Cluster) -> None:
    cluster.compose("stop", "directory")
    assert cluster.state("directory", "Running") is False
    text, _ = streamed_chat(cluster.url("router"), "Is anyone there without a directory?")
    assert text
    cluster.compose("start", "directory")
    wait_until("directory healthy again", lambda: cluster.healthy("directory"), HEALTHY_S)


def test_a_killed_directory_comes_back_by_itself(cluster: Cluster) -> None:
    started = cluster.state("directory", "StartedAt")
    # From inside, so that it looks like a crash to Docker: a container that `docker kill` ends is not restarted.
    kill = ["docker", "exec", cluster.container("directory"), "sh", "-c", "kill -KILL -1"]
    subprocess.run(kill, capture_output=True, timeout=60)
    text, _ = streamed_chat(cluster.url("router"), "And while it restarts?")
    assert text
    wait_until("a restart", lambda: cluster.state("directory", "StartedAt") != started, 30)
    wait_until("directory healthy again", lambda: cluster.healthy("directory"), HEALTHY_S)


def test_every_service_stops_cleanly(cluster: Cluster) -> None:
    cluster.compose("stop", *OURS)
    codes = {service: cluster.state(service, "ExitCode") for service in OURS}
    assert codes == dict.fromkeys(OURS, 0)
