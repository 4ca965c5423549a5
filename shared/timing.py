"""How long prefill, decode and fetches take: Equations 1 to 4 (paper, section 5.1), and hardware profiles.

Rules that hold here
- Everything is a pure function of its arguments. Times are seconds, lengths are tokens, as float where a mean
  may be passed.
- Coefficients are finite and not negative, so no prediction is negative and more work never takes less time.
- Symbols: t_uc and t_c are a request's uncached and cached prompt tokens, t_out its output tokens, t_acc the
  mean tokens accepted per decode iteration, t_fwd the tokens a running request feeds into one, A its
  query-key pairs, t_rst the tokens restored from host memory, B the running requests of a decode node.
- A is not linear in the lengths: the mean of A over requests is not A of the mean lengths. Functions that
  take means therefore take the mean of A as well (`pairs`).
- A fit is nonnegative least squares over iteration records, weighted so that the *relative* error of an
  iteration is what it minimises: a 10 ms error matters on a 20 ms iteration and not on a 2 s one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.messages import Iteration, Phase

# Iterations below which a fit is refused: fewer say more about noise than about the node.
MIN_FIT_ITERATIONS = 8


def _phi(batch: float, experts_per_token: int, experts: int, t_fwd: float) -> float:
    missed: float = (1 - experts_per_token / experts) ** (t_fwd * batch)
    return 1 - missed


def _check_coefficients(**seconds: float) -> None:
    for name, value in seconds.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, not {value}")


def _check_experts(experts_per_token: int, experts: int, t_fwd: float) -> None:
    if not 1 <= experts_per_token <= experts:
        raise ValueError(f"each token selects 1 to {experts} experts, not {experts_per_token}")
    if not t_fwd > 0:
        raise ValueError(f"t_fwd must be above 0, not {t_fwd}")


def query_key_pairs(t_uc: float, t_c: float) -> float:
    """A = t_uc t_c + t_uc (t_uc + 1) / 2: pairs that t_uc tokens compute after t_c cached ones (section 5.1).

    Adds up over chunks when each chunk counts the chunks before it as cached.
    """
    return t_uc * t_c + t_uc * (t_uc + 1) / 2


class Work(msgspec.Struct, frozen=True):
    """The work w of one request, or the mean lengths of several."""

    t_uc: float
    t_c: float
    t_out: float
    t_acc: float

    @property
    def pairs(self) -> float:
        """A of one request; for mean lengths only a lower estimate."""
        return query_key_pairs(self.t_uc, self.t_c)


class PrefillModel(msgspec.Struct, frozen=True):
    """Prefill coefficients: seconds per iteration, uncached token, query-key pair and restored token."""

    c0: float
    c1: float
    c2: float
    c3: float

    def __post_init__(self) -> None:
        _check_coefficients(c0=self.c0, c1=self.c1, c2=self.c2, c3=self.c3)

    def iteration_s(self, t_uc: float, pairs: float, t_rst: float) -> float:
        """Equation 1. The arguments are sums over the batch."""
        return self.c0 + self.c1 * t_uc + self.c2 * pairs + self.c3 * t_rst

    def request_s(self, t_uc: float, t_c: float, t_bar: float, f: float, pairs: float | None = None) -> float:
        """Equation 3: seconds that a request occupies the node, with its share of the iterations' fixed cost.

        `t_bar` is the mean of new tokens per prefill iteration, `f` the fraction of cached tokens restored
        from host memory. `pairs` is A, taken from the lengths when None: give it when they are means.
        Raises ValueError when t_bar is not above 0.
        """
        if not t_bar > 0:
            raise ValueError(f"t_bar, the new tokens per prefill iteration, must be above 0, not {t_bar}")
        if pairs is None:
            pairs = query_key_pairs(t_uc, t_c)
        return self.c0 * t_uc / t_bar + self.c1 * t_uc + self.c2 * pairs + self.c3 * f * t_c


class DecodeModel(msgspec.Struct, frozen=True):
    """Decode coefficients of a node, seconds: fixed, reading all routed experts, per running request.

    Each token selects `experts_per_token` (k) of `experts` (E); a dense model is 1 of 1.
    """

    d0: float
    d1: float
    d2: float
    experts_per_token: int = 8
    experts: int = 256
    t_fwd: float = 4

    def __post_init__(self) -> None:
        _check_coefficients(d0=self.d0, d1=self.d1, d2=self.d2)
        _check_experts(self.experts_per_token, self.experts, self.t_fwd)

    def phi(self, batch: float) -> float:
        """Expected fraction of the routed experts that `batch` requests select (Appendix B.3)."""
        return _phi(batch, self.experts_per_token, self.experts, self.t_fwd)

    def iteration_s(self, batch: float) -> float:
        """Equation 2. A mean `batch` need not be whole."""
        return self.d0 + self.d1 * self.phi(batch) + self.d2 * batch

    def request_s(self, t_out: float, t_acc: float, batch: float) -> float:
        """Equation 4: seconds that a request occupies the node, its share among `batch` running requests.

        The request itself takes `batch` times as long. Raises ValueError when t_acc or batch is not above 0.
        """
        if not t_acc > 0:
            raise ValueError(f"t_acc, the tokens accepted per decode iteration, must be above 0, not {t_acc}")
        if not batch > 0:
            raise ValueError(f"a request shares its node with itself at least: batch {batch} is not above 0")
        return self.iteration_s(batch) / batch * t_out / t_acc


class FetchModel(msgspec.Struct, frozen=True):
    """tau: how long a fetch of KV from a peer takes."""

    base_s: float
    per_token_s: float
    min_tokens: int

    def __post_init__(self) -> None:
        _check_coefficients(base_s=self.base_s, per_token_s=self.per_token_s)

    def seconds(self, tokens: float) -> float:
        """tau(x): base_s + per_token_s x, or 0 for fewer than `min_tokens` tokens, which are not fetched."""
        if tokens < self.min_tokens:
            return 0.0
        return self.base_s + self.per_token_s * tokens


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a node's hardware: its times and its capacities."""

    name: str
    prefill: PrefillModel
    decode: DecodeModel
    fetch: FetchModel
    page_size: int  # tokens
    chunk_tokens: int  # uncached tokens of a prefill iteration, at most
    l1_tokens: int  # KV capacity of GPU memory
    l2_tokens: int  # KV capacity of host memory
    max_context: int  # tokens of prompt and output together
    t_acc: float  # tokens accepted per decode iteration
    idle_gap_s: float  # between a prefill iteration's end and the next launch
    switch_s: float  # phase switch of a drained node
    kv_bytes_per_token: int  # on the wire
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "l1_tokens", "l2_tokens", "max_context"):
            tokens = getattr(self, name)
            if tokens <= 0 or tokens % self.page_size:
                raise ValueError(
                    f"profile {self.name}: {name} must be whole pages of {self.page_size}, not {tokens}"
                )


GLM_52_4XGB300 = Profile(
    name="glm-5.2-4xgb300",
    prefill=PrefillModel(c0=12.5e-3, c1=0.050e-3, c2=2.5e-10, c3=1.5e-7),
    decode=DecodeModel(d0=8.7e-3, d1=7.4e-3, d2=0.45e-3, experts_per_token=8, experts=256, t_fwd=4),
    fetch=FetchModel(base_s=0.45, per_token_s=1e-6, min_tokens=512),
    page_size=64,
    chunk_tokens=8192,
    # 2.06 M and 8.25 M tokens, the second four times the first, in whole pages.
    l1_tokens=2_062_464,
    l2_tokens=8_249_856,
    max_context=1_048_576,
    t_acc=1.4,
    idle_gap_s=0.010,
    # The 0.7 s of the paper include the messages between planner and node, which are sent for real here.
    switch_s=0.65,
    kv_bytes_per_token=54_600,
    link_bytes_per_s=52e9,
)

TINY = Profile(
    name="tiny",
    prefill=PrefillModel(c0=2e-3, c1=1e-5, c2=1e-9, c3=1e-7),
    decode=DecodeModel(d0=1e-3, d1=1e-3, d2=0.1e-3, experts_per_token=8, experts=256, t_fwd=1),
    fetch=FetchModel(base_s=0.005, per_token_s=1e-6, min_tokens=32),
    page_size=16,
    chunk_tokens=256,
    l1_tokens=8_192,
    l2_tokens=32_768,
    max_context=8_192,
    t_acc=1.0,
    idle_gap_s=0.5e-3,
    switch_s=0.05,
    kv_bytes_per_token=64,
    link_bytes_per_s=1e9,
)

PROFILES = {p.name: p for p in (GLM_52_4XGB300, TINY)}


def profile(name: str) -> Profile:
    """The profile of that name. Raises ValueError with the known names."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"no timing profile {name!r}; known: {', '.join(PROFILES)}") from None


class PrefillFit(NamedTuple):
    model: PrefillModel
    error: float  # mean relative error over the fitted iterations: 0.05 is 5 %


class DecodeFit(NamedTuple):
    model: DecodeModel
    error: float  # mean relative error over the fitted iterations: 0.05 is 5 %


def fit_prefill(records: Sequence[Iteration]) -> PrefillFit:
    """Equation 1's coefficients from a node's prefill iterations (section 5.1, online fitting).

    Records of other phases, or without time or iterations, are passed over. A term that never varied or never
    occurred cannot be told apart: one that never occurred gets 0 (c3 where nothing was restored), and terms
    that always went together share their time evenly, so that even equal batches give a model that is right
    for them. Raises ValueError with fewer than MIN_FIT_ITERATIONS iterations or no uncached token in them.
    """
    used = _usable(records, Phase.PREFILL)
    if not any(record.t_uc > 0 for record in used):
        raise ValueError("no prefill iteration to fit computed any uncached token")
    (c0, c1, c2, c3), error = _fit(used, lambda r: (1.0, r.t_uc, r.pairs, r.t_rst))
    return PrefillFit(PrefillModel(c0, c1, c2, c3), error)


def fit_decode(
    records: Sequence[Iteration], experts_per_token: int = 8, experts: int = 256, t_fwd: float = 4
) -> DecodeFit:
    """Equation 2's coefficients from a node's decode iterations (section 5.1, online fitting).

    k, E and t_fwd belong to the model served and are given, not fitted. Otherwise as `fit_prefill`; raises
    ValueError with fewer than MIN_FIT_ITERATIONS iterations or no running request in them.
    """
    _check_experts(experts_per_token, experts, t_fwd)
    used = _usable(records, Phase.DECODE)
    if not any(record.batch > 0 for record in used):
        raise ValueError("no decode iteration to fit had a running request")
    (d0, d1, d2), error = _fit(
        used, lambda r: (1.0, _phi(r.batch, experts_per_token, experts, t_fwd), float(r.batch))
    )
    return DecodeFit(DecodeModel(d0, d1, d2, experts_per_token, experts, t_fwd), error)


# Columns whose smallest singular value is below this part of the largest are not independent.
_DEPENDENT = 1e-7
# Ridge on dependent columns: of all equally good solutions it picks the one that shares time evenly.
_RIDGE = 1e-3
_PASSES = 3


def _usable(records: Sequence[Iteration], phase: Phase) -> list[Iteration]:
    used = [
        r for r in records if r.phase is phase and r.count > 0 and r.seconds > 0 and math.isfinite(r.seconds)
    ]
    iterations = sum(r.count for r in used)
    if iterations < MIN_FIT_ITERATIONS:
        raise ValueError(
            f"{iterations} {phase} iterations are too few to fit: {MIN_FIT_ITERATIONS} are needed"
        )
    return used


def _fit(
    records: list[Iteration], terms: Callable[[Iteration], tuple[float, ...]]
) -> tuple[list[float], float]:
    """Coefficients of `terms` and the mean relative error.

    A record stands for `count` observations of its mean time. Each row is divided by the time that the pass
    before predicted for it, the first by the measured time: dividing by the measured time to the end would
    favour the rows that happened to be fast, and predict too little.
    """
    counts = np.array([r.count for r in records], dtype=np.float64)
    measured_s = np.array([r.seconds for r in records], dtype=np.float64) / counts
    work = np.array([terms(r) for r in records], dtype=np.float64)
    weights = np.sqrt(counts)
    divisor_s = measured_s
    for _ in range(_PASSES):
        coefficients = _solve(work * (weights / divisor_s)[:, None], measured_s * weights / divisor_s)
        predicted_s = work @ coefficients
        # A far slower iteration than predicted is a stall (a compilation, a paused process): its pull is bounded.
        divisor_s = np.maximum(predicted_s, measured_s / 2)
    error = float(np.average(np.abs(predicted_s / measured_s - 1), weights=counts))
    return coefficients.tolist(), error


def _solve(rows: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Nonnegative least squares. Columns of zeros get 0, dependent columns share evenly."""
    # Imported here: scipy's memory is only for the process that fits.
    from scipy.optimize import nnls

    # Columns of unit length: query-key pairs are 1e9 times the constant term.
    scale = np.linalg.norm(rows, axis=0)
    occurs = scale > 0
    scaled = rows[:, occurs] / scale[occurs]
    columns = scaled.shape[1]
    singular = np.linalg.svd(scaled, compute_uv=False)
    if len(singular) < columns or singular[-1] < _DEPENDENT * singular[0]:
        scaled = np.vstack((scaled, _RIDGE * np.eye(columns)))
        target = np.concatenate((target, np.zeros(columns)))
    coefficients = np.zeros(scale.size)
    coefficients[occurs] = nnls(scaled, target)[0] / scale[occurs]
    return coefficients
