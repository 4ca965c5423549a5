"""Fits the iteration-time models of every node from what it ran (section 5.1, online fitting).

Rules that hold here
- No I/O, no clock, no randomness: the same records in the same order give the same models.
- Memory is bounded: a node's records are kept by kind of batch, a few of each kind, spread evenly over time.
- A node is fitted on its own records when they tell enough, else on those of all nodes with its profile.
- A fitted model is frozen: what is recorded later does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from services.planner.split import IterationModels
from shared.messages import Iteration, Iterations, Phase
from shared.timing import PROFILES, DecodeFit, PrefillFit, fit_decode, fit_prefill

PER_BUCKET = 8  # records kept of one kind of batch
LEAST_PREFILL = 20  # records for a prefill fit: the paper fits 20 settings
LEAST_DECODE = 10  # and for a decode fit: the paper fits ten
LEAST_PREFILL_KINDS = 4  # as many different batches as the model has coefficients, or it is not determined
LEAST_PREFILL_SIZES = 3  # full chunks alone do not tell an iteration's fixed cost from its tokens'
LEAST_DECODE_KINDS = 3
MOST_NODES = 1024  # models kept, nodes that left included

Source = Literal["own", "pooled"]


class Bucket(msgspec.Struct):
    """Records of one kind. Of all that were seen, every `stride`-th is kept, from the first on."""

    stride: int = 1
    seen: int = 0
    records: list[Iteration] = []

    def add(self, record: Iteration) -> None:
        if self.seen % self.stride == 0:
            if len(self.records) == PER_BUCKET:
                self.records = self.records[::2]
                self.stride *= 2
            if self.seen % self.stride == 0:
                self.records.append(record)
        self.seen += 1


class NodeSamples(msgspec.Struct):
    """What was kept of one node's iterations."""

    profile: str
    prefill: dict[str, Bucket] = {}
    decode: dict[str, Bucket] = {}

    def add(self, record: Iteration) -> None:
        if record.count < 1 or not record.seconds > 0 or (record.phase is Phase.PREFILL and record.t_uc < 1):
            return
        buckets = self.prefill if record.phase is Phase.PREFILL else self.decode
        buckets.setdefault(_kind(record), Bucket()).add(record)


def _kind(record: Iteration) -> str:
    """Batches of one kind are alike within a factor of two in every term of their phase's model."""
    if record.phase is Phase.DECODE:
        return str(record.batch if record.batch < 16 else 1 << (record.batch.bit_length() - 1))
    context = record.pairs / record.t_uc
    return ".".join(str(int(x).bit_length()) for x in (record.t_uc, context, record.t_rst))


def _records(buckets: Iterable[Mapping[str, Bucket]]) -> tuple[list[Iteration], set[str]]:
    """All records, and the kinds that they are of."""
    kinds: set[str] = set()
    records = []
    for part in buckets:
        kinds |= part.keys()
        records += [record for bucket in part.values() for record in bucket.records]
    return records, kinds


class Fit(msgspec.Struct, frozen=True):
    """The frozen models of a node, and how well each follows the records it was fitted on."""

    profile: str
    models: IterationModels
    prefill_source: Source
    decode_source: Source
    prefill_records: int
    decode_records: int
    prefill_error: float  # mean relative error over these records
    decode_error: float


class LearnerState(msgspec.Struct):
    """Frozen models: of each node, and of each profile for nodes that join later."""

    fits: dict[str, Fit] = {}
    pools: dict[str, Fit] = {}


F = TypeVar("F", bound=PrefillFit | DecodeFit)


class _Fitted(NamedTuple, Generic[F]):
    fit: F
    records: int


class Learner:
    """Keeps records until every node has its models."""

    def __init__(
        self, state: LearnerState | None = None, samples: Mapping[str, NodeSamples] | None = None
    ) -> None:
        self.state = state or LearnerState()
        self.samples = dict(samples or {})

    def wants(self, nodes: Mapping[str, str]) -> list[str]:
        """Of `nodes` (node -> profile), those without models."""
        return [node for node, profile in nodes.items() if self._fit(node, profile) is None]

    def fits(self, nodes: Mapping[str, str]) -> dict[str, Fit]:
        """Of `nodes` (node -> profile), those that have models, with them."""
        found = {node: self._fit(node, profile) for node, profile in nodes.items()}
        return {node: fit for node, fit in found.items() if fit is not None}

    def _fit(self, node: str, profile: str) -> Fit | None:
        own = self.state.fits.get(node)
        return own if own is not None and own.profile == profile else self.state.pools.get(profile)

    def add(self, message: Iterations, profile: str) -> None:
        """Records of a node; those of a node that has its models are left out."""
        if self._fit(message.node, profile) is not None:
            return
        kept = self.samples.get(message.node)
        if kept is None or kept.profile != profile:
            kept = self.samples[message.node] = NodeSamples(profile)
        for record in message.records:
            kept.add(record)

    def progress(self) -> dict[str, tuple[int, int]]:
        """Prefill and decode records kept of each node that is being learned."""
        return {
            node: (len(_records([kept.prefill])[0]), len(_records([kept.decode])[0]))
            for node, kept in self.samples.items()
        }

    def freeze(self, nodes: Mapping[str, str]) -> list[str]:
        """Fit those of `nodes` (node -> profile) that can be, own records first; returns them.

        The first call takes seconds when scipy is not loaded yet: call it off the event loop.
        """
        wanted = self.wants(nodes)
        for profile in sorted({nodes[node] for node in wanted}):
            group = [kept for kept in self.samples.values() if kept.profile == profile]
            prefill = _fit_prefill([kept.prefill for kept in group])
            decode = _fit_decode([kept.decode for kept in group], profile)
            if prefill is None or decode is None:
                continue
            for node in wanted:
                if nodes[node] == profile:
                    kept = self.samples.get(node, NodeSamples(profile))
                    own_prefill = _fit_prefill([kept.prefill])
                    own_decode = _fit_decode([kept.decode], profile)
                    self.state.fits[node] = _joined(profile, own_prefill, prefill, own_decode, decode)
            self.state.pools[profile] = _joined(profile, None, prefill, None, decode)
        self.samples = {n: kept for n, kept in self.samples.items() if kept.profile not in self.state.pools}
        gone = [node for node in self.state.fits if node not in nodes]
        for node in gone[: max(0, len(self.state.fits) - MOST_NODES)]:
            del self.state.fits[node]
        return [node for node in wanted if self._fit(node, nodes[node]) is not None]


def _joined(
    profile: str,
    own_prefill: _Fitted[PrefillFit] | None,
    pooled_prefill: _Fitted[PrefillFit],
    own_decode: _Fitted[DecodeFit] | None,
    pooled_decode: _Fitted[DecodeFit],
) -> Fit:
    prefill, decode = own_prefill or pooled_prefill, own_decode or pooled_decode
    return Fit(
        profile=profile,
        models=IterationModels(prefill.fit.model, decode.fit.model),
        prefill_source="own" if own_prefill else "pooled",
        decode_source="own" if own_decode else "pooled",
        prefill_records=prefill.records,
        decode_records=decode.records,
        prefill_error=prefill.fit.error,
        decode_error=decode.fit.error,
    )


def _fit_prefill(buckets: Iterable[Mapping[str, Bucket]]) -> _Fitted[PrefillFit] | None:
    records, kinds = _records(buckets)
    sizes = {kind.partition(".")[0] for kind in kinds}
    if len(records) < LEAST_PREFILL or len(kinds) < LEAST_PREFILL_KINDS or len(sizes) < LEAST_PREFILL_SIZES:
        return None
    return _Fitted(fit_prefill(records), len(records))


def _fit_decode(buckets: Iterable[Mapping[str, Bucket]], profile: str) -> _Fitted[DecodeFit] | None:
    records, kinds = _records(buckets)
    if len(records) < LEAST_DECODE or len(kinds) < LEAST_DECODE_KINDS:
        return None
    known = PROFILES.get(profile)
    if known is None:
        return _Fitted(fit_decode(records), len(records))
    shape = known.decode
    fit = fit_decode(records, shape.experts_per_token, shape.experts, shape.t_fwd)
    return _Fitted(fit, len(records))
