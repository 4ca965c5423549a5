"""Nodes, slices and records that the planner's tests share."""

from __future__ import annotations

from services.planner.split import IterationModels, NodeRates
from shared.messages import Iteration, NodeInfo, NodeSlice, NodeState, Phase, Slice
from shared.timing import DecodeModel, PrefillModel, query_key_pairs

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH

# With work (1000, 2000, 400, 2), pairs 1e5, t-bar 500, f 0.5: prefill 0.2 + 1.0 + 0.1 + 0.1 = 1.4 s.
# With B = 10: iterations of 0.01 + 0.01 + 10 * 0.001 = 0.03 s, 200 of them, shared by 10: 0.6 s.
PLAIN = IterationModels(
    PrefillModel(c0=0.1, c1=1e-3, c2=1e-6, c3=1e-4),
    DecodeModel(d0=0.01, d1=0.01, d2=1e-3, experts_per_token=1, experts=1, t_fwd=1),
)


def rates(models: IterationModels = PLAIN, t_bar: float = 500.0, f: float = 0.5) -> NodeRates:
    return NodeRates(models, t_bar, f)


def phases(prefill: int, decode: int) -> dict[str, Phase]:
    """n1..; the prefill nodes first."""
    return {f"n{i + 1}": P if i < prefill else D for i in range(prefill + decode)}


def slice_(
    t0: float,
    split: dict[str, Phase],
    *,
    t_uc: float = 1000.0,
    t_c: float = 2000.0,
    pairs: float = 1e5,
    t_out: float = 400.0,
    t_acc: float = 2.0,
    in_decode: float = 20.0,
    requests: int = 10,
    seconds: float = 60.0,
    t_bar: float = 500.0,
    f: float = 0.5,
) -> Slice:
    nodes = [
        NodeSlice(node, phase, t_bar if phase.prefills else 0.0, f, 100 if phase.prefills else 0)
        for node, phase in split.items()
    ]
    return Slice(t0, t0 + seconds, requests, t_uc, t_c, pairs, t_out, t_acc, in_decode, nodes)


def node_info(
    node: str, phase: Phase = BOTH, epoch: int = 0, profile: str = "tiny", **more: object
) -> NodeInfo:
    fields = {
        "url": f"http://{node}",
        "incarnation": f"{node}-1",
        "model": "m",
        "page_size": 16,
        "max_context": 8192,
        "l1_tokens": 8192,
        "l2_tokens": 32768,
        "chunk_tokens": 256,
        **more,
    }
    return NodeInfo(node=node, phase=phase, epoch=epoch, profile=profile, **fields)


def prefill_record(model: PrefillModel, t_uc: int, t_c: int, t_rst: int = 0, error: float = 1.0) -> Iteration:
    pairs = query_key_pairs(t_uc, t_c)
    seconds = model.iteration_s(t_uc, pairs, t_rst) * error
    return Iteration(P, 1, 1, t_uc, pairs, t_rst, 0, seconds, t_c, 1)


def decode_record(model: DecodeModel, batch: int, count: int = 5, error: float = 1.0) -> Iteration:
    return Iteration(D, count, batch, 0, 0.0, 0, batch * count, model.iteration_s(batch) * count * error)


def node_state(node: str, t: float, phase: Phase = P, **more: object) -> NodeState:
    values = {"queue": [], "decodes": [], "decode_tokens": 0, "draining": False, **more}
    return NodeState(
        node=node, t=t, phase=phase, epoch=1, busy_until=0.0, running_prefills=["x"], l1_free_tokens=5, l1_pages=10,
        l2_pages=30, l2_counted_pages=20, **values,
    )  # fmt: skip
