"""Time of a collective as NCCL's own model has it: the best of ring and tree in each of its three protocols.

t = hops x latency per hop + bytes on the busiest link / bandwidth. Latencies by protocol and kind of hop, and the share of the
bandwidth that a protocol reaches, are those of NCCL's ``tuning.cc`` (version 2.19). A ring passes every rank once: n - N hops
inside nodes and N between them (N nodes); all-reduce goes round twice. A double binary tree goes down and up log2 N levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protocol:
    """One NCCL protocol: seconds per hop inside and between nodes, base seconds, share of the bandwidth."""

    name: str
    base_s: float
    intra_hop_s: float
    inter_hop_s: float
    bandwidth_share: float


RING = (
    Protocol("LL", 6.6e-6, 0.6e-6, 2.7e-6, 0.25),
    Protocol("LL128", 14.0e-6, 1.9e-6, 4.0e-6, 0.92),
    Protocol("Simple", 8.4e-6, 3.4e-6, 14.0e-6, 1.0),
)
TREE = (
    Protocol("LL", 6.8e-6, 0.6e-6, 5.0e-6, 0.25),
    Protocol("LL128", 14.0e-6, 1.25e-6, 8.5e-6, 0.85),
    Protocol("Simple", 8.4e-6, 4.0e-6, 14.0e-6, 0.90),
)
# Share of a NIC's line rate that reaches the application, by the kind of network in the link's name; first match wins.
# 0.62 to 0.94 measured for RDMA networks (Echo's NCCL logs on HDR, AWS nccl-tests on EFA), 0.9 for large messages on NDR.
# 0.40 on TCP of AWS g5 nodes, 0.9 of GCP's (Mist's tables). Omni-Path copies through the host: 0.04
# to 0.10 measured for one group of four nodes, 0.06 to 0.22 on an older system (BigScience chronicles); fitted within 0.05 to 0.40.
LINE_RATE_SHARE: tuple[tuple[str, float], ...] = (
    ("omni-path", 0.20), ("aws tcp", 0.40), ("tcp", 0.70), ("ethernet", 0.75), ("efa", 0.80), ("", 0.85),
)  # fmt: skip
# Two nodes exchange the tensor once in each direction by trees, twice in a ring: up to 2 in theory; 1.0 measured on HDR (Echo's
# logs, 16 GPUs), 1.2 on p5 and 1.56 on p4de (AWS nccl-tests).
TWO_NODE_TREE_GAIN = 1.25


def line_rate_share(kind: str) -> float:
    """Usable share of a link's line rate."""
    lower = kind.lower()
    return next(share for word, share in LINE_RATE_SHARE if word in lower)


def ring_s(
    op: str, size_bytes: float, volume: float, num_ranks: int, num_nodes: int, intra: float, inter: float, hop_s: float
) -> float:
    """Seconds of a collective over several nodes. ``volume``: times the tensor passes each link. ``intra``, ``inter``: bytes/s of
    the group inside a node and through its share of the uplink. ``hop_s``: extra seconds per hop between nodes (the network's own
    latency beyond that of the constants)."""
    rounds = 2 if op == "all_reduce" else 1
    moved = volume * (num_ranks - 1) / num_ranks * size_bytes
    bandwidth = min(intra, inter)
    times = [_ring(item, rounds, num_ranks, num_nodes, hop_s) + moved / (bandwidth * item.bandwidth_share) for item in RING]
    if op == "all_reduce":
        through = bandwidth if num_nodes > 2 else min(intra, TWO_NODE_TREE_GAIN * inter)
        times += [_tree(item, num_ranks, num_nodes, hop_s) + moved / (through * item.bandwidth_share) for item in TREE]
    return min(times)


def _ring(item: Protocol, rounds: int, num_ranks: int, num_nodes: int, hop_s: float) -> float:
    between = rounds * num_nodes - (rounds == 1)
    inside = rounds * (num_ranks - 1) - between
    return item.base_s + max(0, inside) * item.intra_hop_s + between * (item.inter_hop_s + hop_s)


def _tree(item: Protocol, num_ranks: int, num_nodes: int, hop_s: float) -> float:
    inside = num_ranks / num_nodes - 1
    return item.base_s + 2 * (inside * item.intra_hop_s + math.log2(num_nodes) * (item.inter_hop_s + hop_s))
