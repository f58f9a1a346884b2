"""Nodes as network namespaces around a bridge, their links limited by the kernel's token buckets.

    node 0 [up0] --- [port0  bridge  port1] --- [up0] node 1        (the bridge in a namespace of its own)

A node's ranks reach each other over its own loopback. Its uplink is limited at both ends, so sending and receiving are each as
fast as the rate. A limit between two nodes is a class of its own on either node's uplink. Nothing is touched outside of the
namespaces, and they end with the processes that hold them.
"""

from __future__ import annotations

import contextlib
import subprocess

from executor.emulate.commands import hold_namespace, namespace_path, require_network_tools, run_inside
from specs.cluster import Emulation

UPLINK = "up0"
SUBNET = "10.231.0"
BURST_BYTES = 128 * 1024  # smaller ones fall far short of the rate at 1 Gbit/s
QUEUE_LATENCY = "50ms"
UNLIMITED_BIT_PER_S = 40e9


class Network:
    """The namespaces of ``num_nodes`` nodes; a context manager. ``addresses``: of each node."""

    def __init__(self, num_nodes: int, emulation: Emulation) -> None:
        self.addresses = [f"{SUBNET}.{node + 1}" for node in range(num_nodes)]
        self._emulation = emulation
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        require_network_tools()
        try:
            for _ in range(len(self.addresses) + 1):
                self._holders.append(hold_namespace())
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """End the namespaces. May be called again."""
        for holder in self._holders:
            with contextlib.suppress(ProcessLookupError):
                holder.kill()
            holder.communicate()
        self._holders = []

    def prefix(self, node: int) -> list[str]:
        """What to put before a command so that it runs on ``node``."""
        return ["nsenter", f"--net={namespace_path(self._holders[node].pid)}"]

    def _build(self) -> None:
        *nodes, hub = (holder.pid for holder in self._holders)
        run_inside(hub, "ip", "link", "add", "bridge", "type", "bridge")
        run_inside(hub, "ip", "link", "set", "bridge", "up")
        for node, pid in enumerate(nodes):
            port = f"port{node}"
            run_inside(hub, "ip", "link", "add", port, "type", "veth", "peer", "name", UPLINK, "netns", str(pid))
            run_inside(hub, "ip", "link", "set", port, "master", "bridge", "up")
            run_inside(pid, "ip", "address", "add", f"{self.addresses[node]}/24", "dev", UPLINK)
            for device in ("lo", UPLINK):
                run_inside(pid, "ip", "link", "set", device, "up")
            self._limit(node, pid, hub, port)

    def _limit(self, node: int, pid: int, hub: int, port: str) -> None:
        rate = self._emulation.uplink_bytes_per_s.get(node)
        if rate is not None:
            run_inside(hub, "tc", "qdisc", "add", "dev", port, "root", *_bucket(8 * rate))
        pairs = [pair for pair in self._emulation.pair_links if node in (pair.node_a, pair.node_b)]
        if not pairs:
            if rate is not None:
                run_inside(pid, "tc", "qdisc", "add", "dev", UPLINK, "root", *_bucket(8 * rate))
            return
        whole = 8 * rate if rate is not None else UNLIMITED_BIT_PER_S
        run_inside(pid, "tc", "qdisc", "add", "dev", UPLINK, "root", "handle", "1:", "htb", "default", "1")
        run_inside(pid, "tc", "class", "add", "dev", UPLINK, "parent", "1:", "classid", "1:1", *_class(whole))
        for number, pair in enumerate(pairs, start=2):
            other = pair.node_b if pair.node_a == node else pair.node_a
            limit = min(whole, 8 * pair.bandwidth_bytes_per_s)
            run_inside(pid, "tc", "class", "add", "dev", UPLINK, "parent", "1:", "classid", f"1:{number}", *_class(limit))
            run_inside(
                pid, "tc", "filter", "add", "dev", UPLINK, "protocol", "ip", "parent", "1:", "u32", "match", "ip", "dst",
                f"{self.addresses[other]}/32", "flowid", f"1:{number}",
            )  # fmt: skip


def _bucket(bit_per_s: float) -> list[str]:
    return ["tbf", "rate", f"{bit_per_s:.0f}bit", "burst", str(BURST_BYTES), "latency", QUEUE_LATENCY]


def _class(bit_per_s: float) -> list[str]:
    return ["htb", "rate", f"{bit_per_s:.0f}bit", "burst", str(BURST_BYTES), "cburst", str(BURST_BYTES)]
