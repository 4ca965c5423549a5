"""`evolving fit`: a timing profile from measured iterations (`loadtest/profiles.py` takes it back in).

Rules that hold here
- The coefficients of Equations 1 and 2 come from `shared.timing`'s own fits, the ones that a live planner makes. All
  else of the profile is the base profile's, and so is a phase of which there is no record.
- What the records do not determine is said. A term that never occurred keeps the base profile's coefficient; one that
  cannot be told from others keeps the fit's, which is right for batches like the recorded ones only.
- A record that does not fit is refused with its file and line: none is passed over.

Exit codes: 0 all well, warnings or not; 2 it could not be done, said in one line; 130 interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadtest.files import whole_file
from loadtest.outcome import carried_out
from loadtest.profiles import load_profile, read_file
from loadtest.report import percent
from services.planner import fitting
from shared.config import Doc, load
from shared.messages import Iteration, Phase
from shared.timing import PROFILES, Profile, fit_decode, fit_prefill, query_key_pairs

UNCERTAIN = 0.25  # a standard error above this part of a coefficient: the records do not determine it
LEAST_NOISE = 0.01  # of a measured time, however well the records agree
ACCEPTED = 0.05  # t_acc of the records and of the profile may differ by so much
UNITS = {
    "c0": (1e3, "ms an iteration"), "c1": (1e6, "us an uncached token"), "c2": (1e9, "ns a query-key pair"),
    "c3": (1e6, "us a restored token"), "d0": (1e3, "ms an iteration"), "d1": (1e3, "ms for all routed experts"),
    "d2": (1e3, "ms a running request"),
}  # fmt: skip


class FitSettings(msgspec.Struct, kw_only=True):
    records: Annotated[
        str, Doc("measured iterations, a JSON object a line (none: the base profile as is)")
    ] = ""
    profile: Annotated[str, Doc("base for all that is not fitted, name or file")] = "glm-5.2-4xgb300"
    name: Annotated[str, Doc("name of the profile")] = "fitted"
    out: Annotated[str, Doc("file for the whole profile as JSON, for `evolving simulate --profile`")] = ""

    def __post_init__(self) -> None:
        if not (self.records or self.out):
            raise ValueError("give RECORDS, or --out to write the base profile as it is")
        if not self.name or self.name in PROFILES:
            raise ValueError(f"name must not be empty or a built-in profile's, such as {self.name!r}")


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A line of RECORDS: `count` equal iterations that took `seconds` together; the rest is of each one of them.

    `requests` are the (t_uc, t_c) of the batch, from which `pairs` is computed. Raises ValueError.
    """

    phase: Literal["prefill", "decode"]
    batch: int
    seconds: float
    t_uc: int = 0
    pairs: float | None = None
    t_rst: int = 0
    tokens: int = 0
    count: int = 1
    requests: list[tuple[int, int]] | None = None
    t_c: int = 0  # this and the next one are in the workers' records; no model needs them
    begun: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be above 0, not {self.seconds}")
        for field, least in (("batch", 1), ("count", 1), ("t_uc", 0), ("t_rst", 0), ("tokens", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, not {getattr(self, field)}")
        if self.phase == "prefill":
            self._check_prefill()
        elif self.t_uc or self.t_rst or self.requests or self.pairs:
            raise ValueError("a decode iteration has no t_uc, pairs, t_rst or requests")

    def _check_prefill(self) -> None:
        if self.t_uc < 1:
            raise ValueError(f"t_uc of a prefill iteration must be at least 1, not {self.t_uc}")
        if (self.pairs is None) == (self.requests is None):
            raise ValueError("a prefill iteration needs either pairs or requests")
        if self.requests is not None:
            if any(t_uc < 1 or t_c < 0 for t_uc, t_c in self.requests):
                raise ValueError("requests must be [t_uc, t_c], at least 1 and at least 0")
            count, t_uc = len(self.requests), sum(t_uc for t_uc, _ in self.requests)
            if (count, t_uc) != (self.batch, self.t_uc):
                said = f"batch and t_uc say {self.batch} with {self.t_uc}"
                raise ValueError(f"requests are {count} with {t_uc} uncached tokens, {said}")
            self.pairs = sum(query_key_pairs(t_uc, t_c) for t_uc, t_c in self.requests)
        # No batch has fewer pairs than one whose requests are equally long and have nothing cached.
        least = self.batch * query_key_pairs(self.t_uc / self.batch, 0)
        if not (self.pairs is not None and least * (1 - 1e-6) <= self.pairs < math.inf):
            raise ValueError(f"pairs must be at least {least:.0f} for such a batch, not {self.pairs}")

    @property
    def iteration(self) -> Iteration:
        return Iteration(
            Phase(self.phase), self.count, self.batch, self.t_uc, self.pairs or 0.0, self.t_rst, self.tokens,
            self.seconds,
        )  # fmt: skip


def read_records(path: str) -> list[Iteration]:
    """The iterations of a file; blank lines are passed over. Raises ValueError: file, line, what was wrong."""
    decoder = msgspec.json.Decoder(Record)
    records = []
    for number, line in enumerate(read_file(path).splitlines(), 1):
        if line.strip():
            try:
                records.append(decoder.decode(line).iteration)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
    if not records:
        raise ValueError(f"{path}: has no records")
    return records


Terms = dict[str, tuple[float, float]]  # coefficient: seconds, and the standard error as a part of them


class PhaseFit(NamedTuple):
    told: str  # how many records of which kind
    terms: Terms
    warnings: list[str]


def calibrate(records: Sequence[Iteration], base: Profile) -> tuple[Profile, list[PhaseFit]]:
    """The base profile with the coefficients that the records give. Raises ValueError when a phase has too few."""
    node, fits = base, []
    for phase, fit in ((Phase.PREFILL, _fit_prefill), (Phase.DECODE, _fit_decode)):
        if of := [record for record in records if record.phase is phase]:
            node, fitted = fit(of, node)
        else:
            fitted = PhaseFit(f"{phase}: no records", {}, [f"{phase} stays the base profile's"])
        fits.append(fitted)
    return node, fits


def _fit_prefill(records: list[Iteration], node: Profile) -> tuple[Profile, PhaseFit]:
    model, error = fit_prefill(records)
    work = np.array([(1.0, r.t_uc, r.pairs, r.t_rst) for r in records])
    terms = _terms(msgspec.structs.asdict(model), work, records)
    sizes = {r.t_uc.bit_length(): r.t_uc for r in records}  # alike within a factor of two
    warnings = _alike(terms, ("c0", "c1"), "uncached tokens", sizes.values(), fitting.LEAST_PREFILL_SIZES)
    if not work[:, 3].any():
        model = msgspec.structs.replace(model, c3=node.prefill.c3)
        del terms["c3"]
        warnings.append("c3 is not determined: nothing was restored; it stays the base profile's")
    more = (
        f", {_range(r.t_uc for r in records)} uncached and {_range(r.t_rst for r in records)} restored tokens"
    )
    warnings += _uncertain(terms)
    return msgspec.structs.replace(node, prefill=model), PhaseFit(
        _told(records, error, more), terms, warnings
    )


def _fit_decode(records: list[Iteration], node: Profile) -> tuple[Profile, PhaseFit]:
    shape = node.decode
    model, error = fit_decode(records, shape.experts_per_token, shape.experts, shape.t_fwd)
    work = np.array([(1.0, model.phi(r.batch), r.batch) for r in records])
    terms = _terms({"d0": model.d0, "d1": model.d1, "d2": model.d2}, work, records)
    batches = {r.batch for r in records}
    warnings = _alike(terms, tuple(terms), "running requests", batches, fitting.LEAST_DECODE_KINDS)
    full = [r for r in records if r.tokens]
    t_acc = sum(r.tokens for r in full) / max(1, sum(r.batch * r.count for r in full))
    if full and abs(t_acc / node.t_acc - 1) > ACCEPTED:
        warnings.append(f"the records say t_acc {t_acc:.3g}, the profile keeps {node.t_acc:g}")
    warnings += _uncertain(terms)
    return msgspec.structs.replace(node, decode=model), PhaseFit(_told(records, error), terms, warnings)


def _terms(values: dict[str, float], work: npt.NDArray[np.float64], records: list[Iteration]) -> Terms:
    """Each coefficient and its standard error as a part of it, infinite where the columns of `work` do not tell it.

    A column is known as far as the others do not follow it: the error is the noise over what is left of it once the
    others have been fitted to it. The noise is a median, which a few stalls do not move.
    """
    counts = np.array([r.count for r in records], dtype=np.float64)
    measured, predicted = (
        np.array([r.seconds for r in records]) / counts,
        work @ np.array(list(values.values())),
    )
    rows = work * (np.sqrt(counts) / predicted)[:, None]
    noise = max(LEAST_NOISE, 1.4826 * float(np.median(np.abs(measured / predicted - 1) * np.sqrt(counts))))
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    terms = {}
    for column, (name, value) in enumerate(values.items()):
        others, own = np.delete(rows / scale, column, axis=1), rows[:, column] / scale[column]
        left = float(np.linalg.norm(own - others @ np.linalg.lstsq(others, own, rcond=None)[0]))
        size = left * scale[column] * value
        terms[name] = (value, noise / size if left > 1e-7 and size > 0 else math.inf)
    return terms


def _alike(terms: Terms, names: Sequence[str], what: str, sizes: Iterable[int], least: int) -> list[str]:
    """A warning when the iterations are of too few sizes to tell these terms apart; their errors are infinite then."""
    found = sorted(sizes)
    if len(found) >= least:
        return []
    terms.update({name: (terms[name][0], math.inf) for name in names})
    shown = ", ".join(f"{size:,}" for size in found)
    return [f"too few sizes of iterations ({what}: {shown}): {least} are needed, factors of two apart"]


def _uncertain(terms: Terms) -> list[str]:
    told = []
    for name, (value, error) in terms.items():
        why = "the records do not tell it apart" if error == math.inf else f"standard error {percent(error)}"
        if error > UNCERTAIN:
            told.append(f"{name} is not determined: {why if value else 'it came out as 0'}")
    return told


def _told(records: list[Iteration], error: float, more: str = "") -> str:
    kinds = f"{sum(r.count for r in records):,} iterations of {_range(r.batch for r in records)} requests"
    return (
        f"{records[0].phase}: {len(records):,} records, {kinds}{more}; mean relative error {percent(error)}"
    )


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def print_fits(node: Profile, fits: Sequence[PhaseFit]) -> None:
    values = msgspec.structs.asdict(node.prefill) | msgspec.structs.asdict(node.decode)
    for fit, letter in zip(fits, "cd", strict=True):
        print(fit.told)
        for name in (name for name in UNITS if name.startswith(letter)):
            factor, unit = UNITS[name]
            error = fit.terms.get(name, (0.0, None))[1]
            known = "base profile" if error is None else f"± {percent(error)}" if error <= UNCERTAIN else "?"
            print(f"  {name} {values[name] * factor:10.4g} {unit:26} {known}")
    for warning in [text for fit in fits for text in fit.warnings]:
        print(f"warning: {warning}")


def main(argv: Sequence[str]) -> int:
    """`evolving fit RECORDS.jsonl ...`"""
    return carried_out(lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    settings = load(
        FitSettings, "fit", argv, positional=("records",),
        summary="Fit a timing profile to measured iterations (Equations 1 and 2) and say what they tell.",
    )  # fmt: skip
    node = msgspec.structs.replace(load_profile(settings.profile), name=settings.name)
    if settings.records:
        records = read_records(settings.records)
        try:
            node, fits = calibrate(records, node)
        except ValueError as error:
            raise ValueError(f"{settings.records}: {error}") from None
        print_fits(node, fits)
    if settings.out:
        try:
            with whole_file(settings.out) as file:
                file.write(msgspec.json.format(msgspec.json.encode(node), indent=2) + b"\n")
        except OSError as error:
            raise ValueError(f"{settings.out}: cannot be written: {error.strerror or error}") from None
        print(f"profile {settings.name} written to {settings.out}")
