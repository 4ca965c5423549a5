"""`evolving fit`: records give the profile back that made them, and what they do not tell is said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from loadtest.fit import main, read_records
from loadtest.profiles import load_profile
from services.cli import COMMANDS
from shared.timing import GLM_52_4XGB300, TINY, Profile, query_key_pairs

GLM = GLM_52_4XGB300
PREFILL = {"phase": "prefill", "batch": 1, "t_uc": 100, "pairs": 5050, "t_rst": 0, "seconds": 0.02}
DECODE = {"phase": "decode", "batch": 4, "tokens": 6, "seconds": 0.02}
SIZES = (64, 512, 2048, 4096, 8192)


def measured(
    node: Profile = GLM,
    *,
    n: int = 300,
    sizes: tuple[int, ...] = SIZES,
    contexts: tuple[int, ...] = (0, 16_384, 65_536, 131_072, 524_288),
    restored: bool = True,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    seed: int = 1,
) -> list[dict[str, object]]:
    """`n` prefill and `n` decode records of a node, with 2 % of noise an iteration."""
    rng = random.Random(seed)
    records: list[dict[str, object]] = []
    for _ in range(n):
        requests = [(rng.choice(sizes), rng.choice(contexts)) for _ in range(rng.choice((1, 1, 2)))]
        t_uc, t_rst = (
            sum(t_uc for t_uc, _ in requests),
            requests[0][1] if restored and rng.random() < 0.5 else 0,
        )
        seconds = node.prefill.iteration_s(t_uc, sum(query_key_pairs(*r) for r in requests), t_rst)
        record = {
            "phase": "prefill",
            "batch": len(requests),
            "t_uc": t_uc,
            "t_rst": t_rst,
            "requests": requests,
        }
        records.append({**record, "seconds": seconds * rng.gauss(1, 0.02)})
    for _ in range(n):
        batch, count = rng.choice(batches), rng.choice((1, 10))
        seconds = node.decode.iteration_s(batch) * count * rng.gauss(1, 0.02 / count**0.5)
        tokens = round(batch * count * node.t_acc)
        records.append(
            {"phase": "decode", "batch": batch, "count": count, "tokens": tokens, "seconds": seconds}
        )
    return records


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def fitted(tmp_path: Path, records: list[dict[str, object]], *more: str) -> Profile:
    out = str(tmp_path / "fitted.json")
    assert main([write(tmp_path / "records.jsonl", records), "--out", out, *more]) == 0
    return load_profile(out)


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert not err
    return [line.removeprefix("warning: ") for line in out.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noisy_records_of_a_profile_give_it_back(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = msgspec.structs.replace(GLM.prefill, c0=0.02, c1=0.07e-3, c2=4e-10, c3=8e-7)
    decode = msgspec.structs.replace(GLM.decode, d0=0.012, d1=0.02, d2=0.9e-3)
    true = msgspec.structs.replace(GLM, prefill=prefill, decode=decode)
    node = fitted(tmp_path, measured(true, n=1000, seed=seed), "--name", "mine")
    for name in ("c0", "c1", "c2", "c3"):
        assert getattr(node.prefill, name) == pytest.approx(getattr(true.prefill, name), rel=0.05)
    for name in ("d0", "d1", "d2"):
        assert getattr(node.decode, name) == pytest.approx(getattr(true.decode, name), rel=0.05)
    # All else is the base profile's.
    assert node == msgspec.structs.replace(GLM, name="mine", prefill=node.prefill, decode=node.decode)
    assert warnings(capsys) == []


def test_the_output_says_what_was_fitted_to_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = measured(restored=False)
    fitted(tmp_path, records)
    out = capsys.readouterr().out
    iterations = sum(int(str(r.get("count", 1))) for r in records if r["phase"] == "decode")
    assert (
        "prefill: 300 records, 300 iterations of 1 to 2 requests, 64 to 16,384 uncached and 0 restored tokens"
        in out
    )
    assert f"decode: 300 records, {iterations:,} iterations of 1 to 64 requests; mean relative error " in out
    errors = [float(line.split()[-2]) for line in out.splitlines() if "mean relative error" in line]
    assert len(errors) == 2 and all(0.5 < error < 2.5 for error in errors)
    shown = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    assert list(shown) == ["c0", "c1", "c2", "c3", "d0", "d1", "d2"]
    assert (
        float(shown["c1"][0]) == pytest.approx(50, rel=0.05) and shown["c1"][1] == "us" and "±" in shown["c1"]
    )
    assert float(shown["d0"][0]) == pytest.approx(8.7, rel=0.1) and shown["d0"][1] == "ms"
    assert shown["c3"][-2:] == ["base", "profile"] and "±" not in shown["c3"]


@pytest.mark.parametrize("term", ["c0", "d0"])
def test_the_standard_error_is_what_other_records_would_have_changed(
    term: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = [], []
    for seed in range(30):
        node = fitted(tmp_path, measured(n=100, seed=seed))
        found.append(getattr(node.prefill if term == "c0" else node.decode, term))
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {term}"))
        said.append(float(line.split()[-2]) / 100)
    mean = sum(found) / len(found)
    seen = (sum((value - mean) ** 2 for value in found) / len(found)) ** 0.5 / mean
    assert sum(said) / len(said) == pytest.approx(seen, rel=0.35)


def test_full_chunks_alone_do_not_tell_the_fixed_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [r for r in measured(sizes=(8192,)) if r["phase"] == "decode" or r["batch"] == 1]
    node = fitted(tmp_path, records)
    told = warnings(capsys)
    assert "too few sizes of iterations (uncached tokens: 8,192): 3 are needed, factors of two apart" in told
    assert [text.split()[0] for text in told if "not determined" in text] == ["c0", "c1"]
    # Together they are right for such batches.
    args = 8192, query_key_pairs(8192, 65_536), 0
    assert node.prefill.iteration_s(*args) == pytest.approx(GLM.prefill.iteration_s(*args), rel=0.03)


def test_sizes_in_one_factor_of_two_are_one_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        r for r in measured(sizes=(4100, 5000, 6000, 8000)) if r["phase"] == "decode" or r["batch"] == 1
    ]
    fitted(tmp_path, records)
    assert any(text.startswith("too few sizes of iterations") for text in warnings(capsys))


def test_nothing_restored_keeps_the_base_profiles_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = msgspec.structs.replace(GLM, prefill=msgspec.structs.replace(GLM.prefill, c3=7e-7))
    path = tmp_path / "base.json"
    path.write_bytes(msgspec.json.encode(base))
    node = fitted(tmp_path, measured(restored=False), "--profile", str(path))
    assert node.prefill.c3 == 7e-7
    assert warnings(capsys) == ["c3 is not determined: nothing was restored; it stays the base profile's"]


def test_a_term_that_follows_another_is_not_determined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every prefill restores as many tokens as it computes: c1 and c3 are one."""
    records = [{**r, "t_rst": r["t_uc"]} if r["phase"] == "prefill" else r for r in measured()]
    fitted(tmp_path, records)
    told = warnings(capsys)
    assert "c1 is not determined: the records do not tell it apart" in told
    assert "c3 is not determined: the records do not tell it apart" in told
    assert not any(text.startswith(("c2", "d")) for text in told)


def test_a_cost_that_drowns_in_the_noise_is_not_determined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(tmp_path, measured(contexts=(1_000_000, 1_010_000), sizes=(4096, 8192, 16_384), n=40))
    told = {text.split()[0]: text for text in warnings(capsys)}
    assert "c0 is not determined" in told["c0"]


def test_equal_decode_batches_do_not_tell_the_decode_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = fitted(tmp_path, measured(batches=(8, 16)))
    told = warnings(capsys)
    assert "too few sizes of iterations (running requests: 8, 16): 3 are needed, factors of two apart" in told
    assert {"d0", "d1", "d2"} == {text.split()[0] for text in told if "not determined" in text}
    assert node.decode.iteration_s(8) == pytest.approx(GLM.decode.iteration_s(8), rel=0.02)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_phase_without_records_stays_the_base_profiles(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = fitted(tmp_path, [r for r in measured() if r["phase"] != phase])
    assert getattr(node, phase) == getattr(GLM, phase)
    assert f"{phase} stays the base profile's" in warnings(capsys)


def test_decode_is_fitted_with_the_base_profiles_experts(tmp_path: Path) -> None:
    node = fitted(tmp_path, measured(TINY, n=1000), "--profile", "tiny")
    assert (node.decode.experts_per_token, node.decode.experts, node.decode.t_fwd) == (8, 256, 1)
    assert node.decode.d1 == pytest.approx(TINY.decode.d1, rel=0.05)


def test_other_acceptance_than_the_profiles_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{**r, "tokens": 3 * r["batch"] * r["count"]} if "count" in r else r for r in measured()]  # type: ignore[operator]
    assert fitted(tmp_path, records).t_acc == GLM.t_acc
    assert warnings(capsys) == ["the records say t_acc 3, the profile keeps 1.4"]


def test_pairs_may_be_given_or_come_from_the_requests(tmp_path: Path) -> None:
    lengths = {"phase": "prefill", "batch": 2, "t_uc": 300, "seconds": 0.03}
    requests = {**lengths, "requests": [[100, 0], [200, 1000]]}
    path = write(
        tmp_path / "r.jsonl", [requests, {**lengths, "pairs": 225_150}, {**DECODE, "t_c": 0, "begun": 0}]
    )
    first, second, third = read_records(path)
    assert first == second and first.pairs == 5050 + 200_000 + 20_100
    assert (third.count, third.batch, third.tokens, third.seconds) == (1, 4, 6, 0.02)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("\xff", ""),
        ({**PREFILL, "phase": "both"}, "Invalid enum value 'both' - at `$.phase`"),
        ({**PREFILL, "t_rest": 1}, "unknown field `t_rest`"),
        ({k: v for k, v in PREFILL.items() if k != "seconds"}, "missing required field `seconds`"),
        ({k: v for k, v in PREFILL.items() if k != "batch"}, "missing required field `batch`"),
        ({**PREFILL, "batch": "1"}, "Expected `int`, got `str` - at `$.batch`"),
        ({**PREFILL, "seconds": 0}, "seconds must be above 0, not 0"),
        ({**PREFILL, "seconds": -1}, "seconds must be above 0, not -1"),
        ('{"phase": "decode", "batch": 1, "seconds": 1e999}', "out of range"),
        ({**PREFILL, "batch": 0}, "batch must be at least 1, not 0"),
        ({**PREFILL, "count": 0}, "count must be at least 1, not 0"),
        ({**PREFILL, "t_rst": -1}, "t_rst must be at least 0, not -1"),
        ({**DECODE, "tokens": -1}, "tokens must be at least 0, not -1"),
        ({**PREFILL, "t_uc": 0}, "t_uc of a prefill iteration must be at least 1, not 0"),
        ({k: v for k, v in PREFILL.items() if k != "pairs"}, "needs either pairs or requests"),
        ({**PREFILL, "requests": [[100, 0]]}, "needs either pairs or requests"),
        ({**PREFILL, "pairs": None, "requests": [[90, 0]]}, "requests are 1 with 90 uncached tokens, batch and t_uc say"),
        ({**PREFILL, "pairs": None, "requests": [[50, 0], [50, 0]]}, "requests are 2 with 100 uncached tokens"),
        ({**PREFILL, "pairs": None, "requests": [[100, -1]]}, "at least 1 and at least 0"),
        ({**PREFILL, "pairs": None, "requests": [[100]]}, "length 2"),
        ({**PREFILL, "pairs": 5000}, "pairs must be at least 5050 for such a batch, not 5000"),
        ({**DECODE, "t_uc": 5}, "a decode iteration has no t_uc"),
        ({**DECODE, "requests": [[1, 0]]}, "a decode iteration has no t_uc, pairs, t_rst or requests"),
    ],
)  # fmt: skip
def test_a_bad_record_is_one_line_with_its_place(
    line: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "records.jsonl", tmp_path / "out.json"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(f"{json.dumps(PREFILL)}\n\n".encode() + text.encode("latin-1") + b"\n")
    assert main([str(path), "--out", str(out)]) == 2
    told, err = capsys.readouterr()
    assert not told and err.startswith(f"evolving: {path}: line 3: ") and err.count("\n") == 1
    assert said in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give RECORDS, or --out"),
        (["nothing-there.jsonl"], "nothing-there.jsonl: cannot be read: No such file"),
        (["."], ".: cannot be read: Is a directory"),
        (["empty.jsonl"], "empty.jsonl: has no records"),
        (["few.jsonl"], "few.jsonl: 1 prefill iterations are too few to fit: 8 are needed"),
        (["good.jsonl", "--name", "tiny"], "name must not be empty or a built-in profile's, such as 'tiny'"),
        (["good.jsonl", "--name", ""], "name must not be empty"),
        (["good.jsonl", "--profile", "nothing"], "no timing profile 'nothing'; known: glm-5.2-4xgb300, tiny"),
        (["good.jsonl", "--out", "no/such/folder/p.json"], "no/such/folder/p.json: cannot be written: No such file"),
        (["good.jsonl", "--out", "."], ".: cannot be written: "),
        (["good.jsonl", "--no-such-flag", "1"], "no-such-flag"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_and_exit_2(
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    write(tmp_path / "few.jsonl", [PREFILL])
    write(tmp_path / "good.jsonl", measured(n=50))
    files = sorted(tmp_path.iterdir())
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("evolving: ") and err.count("\n") == 1 and said in err
    assert sorted(tmp_path.iterdir()) == files


def test_without_records_the_base_profile_is_written_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "base.json"
    assert main(["--name", "copy", "--out", str(out)]) == 0
    assert load_profile(str(out)) == msgspec.structs.replace(GLM, name="copy")


def test_fit_is_a_command() -> None:
    assert COMMANDS["fit"][:2] == ("loadtest.fit", "main")
