"""Compositions that shift in time and arrivals in the rhythm of a day."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads.agents import WORKLOADS
from loadtest.workloads.arrivals import DAY_S, Arrival, DayRhythm, arrivals
from loadtest.workloads.composition import Composition, CompositionError, Phase, parse_composition

PAPERS = "288*putnam@3600,144*putnam+72*osworld@3600,144*osworld@3600"

_phases = st.builds(
    Phase,
    duration_s=st.floats(min_value=1e-3, max_value=1e7),
    agents=st.dictionaries(
        st.sampled_from(WORKLOADS), st.integers(min_value=1, max_value=999_999_999), min_size=1
    ),
)


def test_the_papers_run() -> None:
    run = parse_composition(PAPERS)
    assert [phase.agents for phase in run.phases] == [
        {"putnam": 288},
        {"putnam": 144, "osworld": 72},
        {"osworld": 144},
    ]
    assert run.duration_s == 10_800 and run.starts_s() == [0, 3600, 7200]
    assert run.at(0) is run.phases[0] and run.at(3599.9) is run.phases[0]
    assert run.at(3600) is run.phases[1] and run.at(10_799) is run.phases[2]
    assert run.at(-0.1) is None and run.at(10_800) is None
    assert parse_composition(" 288 * putnam @ 3600 , 144*putnam + 72*osworld@3600,144*osworld@3.6e3 ") == run


@given(st.lists(_phases, min_size=1, max_size=5))
def test_text_and_composition_are_one(phases: list[Phase]) -> None:
    composition = Composition(tuple(phases))
    assert parse_composition(str(composition)) == composition
    assert msgspec.json.decode(msgspec.json.encode(composition), type=Composition) == composition


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "phase '' lacks its seconds"),
        ("288*putnam", "phase '288*putnam' lacks its seconds"),
        ("288*putnam@3600,", "phase '' lacks its seconds"),
        ("288*putnam@1h", "'1h' is not a number of seconds"),
        ("288*putnam@0", "must be above 0, not 0"),
        ("288*putnam@-5", "must be above 0"),
        ("288*putnam@nan", "must be above 0"),
        ("288*putnam@inf", "must be above 0"),
        ("@3600", "'' is not AGENTS*WORKLOAD"),
        ("putnam@3600", "'putnam' is not AGENTS*WORKLOAD"),
        ("288*putnam+@3600", "'' is not AGENTS*WORKLOAD"),
        ("0*putnam@3600", "'0' is not a number of agents"),
        ("2.5*putnam@3600", "'2.5' is not a number of agents"),
        ("-1*putnam@3600", "'-1' is not a number of agents"),
        ("٣*putnam@3600", "is not a number of agents"),
        ("3*swe@3600", "no workload 'swe' (there are claude-code, codex, osworld, putnam)"),
        ("3*@3600", "no workload ''"),
        ("1*codex+2*codex@60", "names codex twice"),
    ],
)
def test_what_is_no_composition_is_said_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(CompositionError) as error:
        parse_composition(text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def _until(rhythm: DayRhythm, seed: int, end_s: float, start_s: float = 0.0) -> list[Arrival]:
    return list(takewhile(lambda a: a.t_s < end_s, arrivals(rhythm, seed, start_s=start_s)))


def test_a_day_has_its_mean_and_its_rhythm() -> None:
    rhythm = DayRhythm(user_per_min=3.0, automatic_per_min=1.0, swing=0.8, peak_h=15.0)
    days = 20
    found = _until(rhythm, 7, days * DAY_S)
    by_user = np.array([a.t_s for a in found if a.by_user])
    by_machine = np.array([a.t_s for a in found if not a.by_user])
    assert by_user.size == pytest.approx(3 * 1440 * days, rel=0.02)
    assert by_machine.size == pytest.approx(1440 * days, rel=0.03)
    hours = np.histogram(by_user % DAY_S / 3600, bins=24, range=(0, 24))[0] / (60 * days)
    wanted = [rhythm.rate_per_min((h + 0.5) * 3600) - 1.0 for h in range(24)]
    assert hours == pytest.approx(wanted, rel=0.05, abs=0.1)
    assert rhythm.rate_per_min(15 * 3600) == pytest.approx(1 + 3 * 1.8) == rhythm.highest_per_min
    assert rhythm.rate_per_min(3 * 3600) == pytest.approx(1 + 3 * 0.2)
    flat = np.histogram(by_machine % DAY_S / 3600, bins=24, range=(0, 24))[0] / (60 * days)
    assert flat == pytest.approx([1.0] * 24, rel=0.12)


def test_a_flat_rate_is_a_poisson_process() -> None:
    found = [a.t_s for a in _until(DayRhythm(automatic_per_min=1.5), 3, 20_000 * 60.0)]
    gaps = np.diff(found)
    assert gaps.mean() == pytest.approx(40.0, rel=0.02) and gaps.std() == pytest.approx(40.0, rel=0.03)
    counts = np.histogram(found, bins=2_000)[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_arrivals_follow_from_rhythm_seed_and_start() -> None:
    rhythm = DayRhythm(user_per_min=1.0, automatic_per_min=0.5)
    first = _until(rhythm, 1, DAY_S)
    assert first == _until(rhythm, 1, DAY_S) and first != _until(rhythm, 2, DAY_S)
    assert first[:100] == _until(rhythm, 1, DAY_S / 2)[:100]
    afternoon = _until(rhythm, 1, DAY_S, start_s=13 * 3600.0)
    assert all(13 * 3600 < a.t_s < DAY_S for a in afternoon) and afternoon
    assert all(a.t_s < b.t_s for a, b in zip(first, first[1:], strict=False))
    assert all(a.by_user for a in _until(DayRhythm(user_per_min=1.0), 1, DAY_S))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "no agent ever arrives"),
        ({"user_per_min": -1.0}, "user_per_min must be"),
        ({"automatic_per_min": float("inf")}, "automatic_per_min must be"),
        ({"user_per_min": 1.0, "swing": 1.5}, "swing must be"),
        ({"user_per_min": 1.0, "peak_h": 24.0}, "peak_h must be"),
        ({"user_per_min": float("nan")}, "user_per_min must be"),
    ],
)
def test_rhythms_out_of_range_are_refused(values: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DayRhythm(**values)
