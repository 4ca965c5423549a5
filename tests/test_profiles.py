"""Timing profiles by name or file: what `evolving fit --out` wrote comes back, all else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadtest.profiles import load_profile
from loadtest.simulate.command import SimulateSettings, build
from shared.timing import GLM_52_4XGB300 as GLM
from shared.timing import TINY


def test_a_profile_is_loaded_by_name_or_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_profile("tiny") is TINY
    for path in ("tiny", "mine", "mine.json"):  # a name wins over a file
        (tmp_path / path).write_bytes(msgspec.json.encode(msgspec.structs.replace(GLM, name="mine")))
    assert load_profile("tiny") is TINY
    assert load_profile("mine") == load_profile(str(tmp_path / "mine.json")) == load_profile("mine.json")
    assert load_profile("mine").name == "mine"


def test_the_simulator_takes_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    prefill = msgspec.structs.replace(TINY.prefill, c0=0.123)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(TINY, name="slow", prefill=prefill)))
    simulation, _, _ = build(SimulateSettings(trace="claude-code", profile=str(path)))
    assert {node.profile.prefill.c0 for node in simulation.cluster.nodes.values()} == {0.123}


def _without(field: str) -> dict[str, object]:
    return {name: value for name, value in msgspec.to_builtins(TINY).items() if name != field}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no timing profile: Input data was truncated"),
        (b"[]", "is no timing profile: Expected `object`, got `array`"),
        (b'{"more": ' + b"[" * 100_000, "is no timing profile: "),
        (_without("prefill"), "missing required field `prefill`"),
        ({**_without("decode"), "decode": {"d0": 1, "d1": 1}}, "missing required field `d2` - at `$.decode`"),
        ({**_without("prefill"), "prefill": {"c0": -1, "c1": 0, "c2": 0, "c3": 0}}, "c0 must be a finite number"),
        ({**_without("l1_tokens"), "l1_tokens": 100}, "l1_tokens must be whole pages of 16, not 100"),
        ({**_without("page_size"), "page_size": 0}, "page_size must be above 0, not 0"),
        ({**_without("page_size"), "page_size": -16}, "page_size must be above 0, not -16"),
        ({**_without("t_acc"), "t_acc": 0}, "t_acc must be above 0, not 0"),
        ({**_without("idle_gap_s"), "idle_gap_s": -1}, "idle_gap_s must be at least 0, not -1"),
        ({**_without("t_acc"), "t_acc": "1"}, "Expected `float`, got `str` - at `$.t_acc`"),
        ({**_without(""), "chunk": 1}, "it has no chunk"),
        ({**_without("prefill"), "prefill": {"c0": 1, "c1": 0, "c2": 0, "c3": 0, "c4": 0}}, "it has no prefill.c4"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(data: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(ValueError, match="p.json: ") as error:
        load_profile(str(path))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gone.json", "no/such/file", "."])
def test_a_file_that_cannot_be_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: cannot be read: "):
        load_profile(name)
