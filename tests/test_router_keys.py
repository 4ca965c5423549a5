"""API keys, tenants and limits at the router's front."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from services.router.access import KeyEntry, key_digest, new_key
from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.config import ConfigError
from shared.pages import page_hashes
from tests.conftest import eventually
from tests.test_router import body, cluster, done_records
from tests.test_router_front import BOTH, CHAT

# ---------------------------------------------------------------------- keys


def key_file(path, **entries):
    """A file with a new key for each entry; returns the keys by name."""
    keys, text = {}, f'[tenants]\nsecret = "{"s" * 40}"\n'
    for name, fields in entries.items():
        keys[name] = new_key()
        lines = {"name": name, "sha256": key_digest(keys[name]).hex(), **fields}
        text += "[[key]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items())
    path.write_text(text)
    return keys


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_keys_are_asked_for_and_limit(redis_url, cluster_name, tmp_path):
    file = tmp_path / "keys.toml"
    keys = key_file(file, user={"requests_per_minute": 2}, root={"admin": True})
    async with cluster(redis_url, cluster_name, ("n", BOTH), keys_file=str(file)) as (_, (n,), http, bus):
        for headers, status in (({}, 401), (bearer("ei-nonsense"), 401), ({"x-api-key": keys["user"]}, 200)):
            async with http.post("/v1/completions", json=body(), headers=headers) as answer:
                assert answer.status == status
                assert status == 200 or answer.headers["WWW-Authenticate"].startswith("Bearer")
        async with http.post("/v1/messages", json=CHAT) as answer:
            assert answer.status == 401 and (await answer.json())["error"]["type"] == "authentication_error"
        ((headers, _),) = n.decodes
        assert "X-Api-Key" not in headers and "x-api-key" not in headers
        async with http.post("/v1/completions", json=body(), headers=bearer(keys["user"])) as answer:
            assert answer.status == 200
        async with http.post("/v1/completions", json=body(), headers=bearer(keys["user"])) as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "rate_limit_requests"
        async with http.get("/nothing", headers=bearer(keys["user"])) as answer:
            assert answer.status == 404
        for path in ("/metrics", "/ei/v1/cluster"):
            async with http.get(path, headers=bearer(keys["user"])) as answer:
                assert answer.status == 403
            async with http.get(path, headers=bearer(keys["root"])) as answer:
                assert answer.status == 200
        async with http.get("/healthz") as answer:
            assert answer.status == 200
        assert {record.key for record in await done_records(bus, 2)} == {"user"}
        # A new file takes effect without a restart, a broken one does not.
        file.write_text("[[key]\n")
        await asyncio.sleep(0)
        keys = key_file(file, fresh={})
        await eventually(lambda: _status(http, keys["fresh"], 200))


async def _status(http, key, wanted):
    async with http.post("/v1/completions", json=body(), headers=bearer(key)) as answer:
        return answer.status == wanted


async def test_tenants_share_neither_pages_nor_branches(redis_url, cluster_name, tmp_path):
    file = tmp_path / "keys.toml"
    keys = key_file(file, a={"tenant": "a"}, b={"tenant": "b"}, plain={})
    async with cluster(redis_url, cluster_name, ("n", BOTH), keys_file=str(file)) as (
        service,
        (n,),
        http,
        bus,
    ):
        for key in keys.values():
            headers = bearer(key) | {"X-EI-Branch": "same"}
            async with http.post("/v1/completions", json=body(), headers=headers) as answer:
                assert answer.status == 200
        salts = {call.branch: call.salt for call in n.prefills}
        assert len(salts) == 3 and len(set(salts.values())) == 3 and salts["same"] == ""
        assert {headers.get("X-EI-Salt", "") for headers, _ in n.decodes} == set(salts.values())
        await service.branch_out.flush()
        requests = [
            e.message for e in await bus.last("branch", 20) if type(e.message).__name__ == "BranchRequest"
        ]
        tokens = np.arange(1000, 1100, dtype=np.int32)
        for message in requests:
            assert message.pages == page_hashes(tokens, 16, salt=salts[message.branch]).tobytes()
        async with http.get("/v1/branches", headers=bearer(keys["a"])) as answer:
            assert [view["branch"] for view in (await answer.json())["branches"]] == ["same"]
        async with http.delete("/v1/branches/@b|same", headers=bearer(keys["a"])) as answer:
            assert (await answer.json())["known"] is False  # it is @a|@b|same that this ends
        async with http.get("/v1/branches/same", headers=bearer(keys["b"])) as answer:
            assert answer.status == 200


async def test_the_admin_port_has_what_the_clients_port_has_not(redis_url, cluster_name):
    from shared.embedded import free_port

    port = free_port("127.0.0.1")
    async with cluster(redis_url, cluster_name, ("n", BOTH), admin_port=port) as (_, _fakes, http, _bus):
        for path in ("/metrics", "/ei/v1/cluster"):
            async with http.get(path) as answer:
                assert answer.status == 404
            async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status == 200
        async with http.get(f"http://127.0.0.1:{port}/v1/branches") as answer:
            assert answer.status == 404


async def test_the_application_behind_serves_nobody_else(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (service, _fakes, http, _bus):
        for headers in ({}, {"X-EI-Inner": "guess"}):
            async with http.get(service.front.inner_url + "/v1/branches", headers=headers) as answer:
                assert answer.status == 404
        async with http.get("/v1/branches", headers={"X-EI-Inner": "guess", "X-EI-Admin": "0"}) as answer:
            assert answer.status == 200


def test_without_keys_only_loopback(tmp_path):
    with pytest.raises(ConfigError, match="keys"):
        RouterService(RouterSettings(host="0.0.0.0"))
    RouterService(RouterSettings(host="0.0.0.0", allow_anonymous=True))
    key_file(tmp_path / "k.toml", a={})
    RouterService(RouterSettings(host="0.0.0.0", keys_file=str(tmp_path / "k.toml")))
    assert KeyEntry(name="x", sha256="0" * 64)
