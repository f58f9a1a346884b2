"""Readers of what people have at hand: ``nvidia-smi topo -m``, hostfiles, nccl-tests tables (free of torch).

Each raises :class:`InvalidInput` with every violation; ``loc`` is the line number, from 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from specs.cluster import CollectiveCurve, CurvePoint, DeviceType, Link, NodeGroup
from specs.errors import InvalidInput, Violation
from specs.units import GB

# Kinds of nvidia-smi's legend, best first: NVLink, one PCIe bridge, several bridges, host bridge, NUMA node, across sockets.
PCIE_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_LINK_KIND = re.compile(r"^(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|PSB|SOC)$")
_MPI_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# One NVLink lane, one direction (datasheets): 2 to 4 have 25 GB/s, NVLink 5 has 50, NVLink 1 has 20.
_LANE_BYTES_PER_S = {"Pascal": 20 * GB, "Blackwell": 50 * GB, "Blackwell Ultra": 50 * GB}
_LANES = {"Pascal": 4, "Volta": 6, "Ampere": 12, "Hopper": 18, "Grace Hopper": 18, "Blackwell": 18, "Blackwell Ultra": 18}


@dataclass(frozen=True, slots=True)
class Topology:
    """The device matrix of one node. ``links[(a, b)]`` is the kind between devices a and b, ``nics`` their names."""

    num_devices: int
    links: Mapping[tuple[int, int], str]
    nics: tuple[str, ...] = ()
    nic_links: Mapping[tuple[int, str], str] | None = None

    def nvlink_lanes(self, a: int, b: int) -> int:
        """NVLink lanes between two devices, 0 without."""
        kind = self.links[a, b]
        return int(kind[2:]) if kind.startswith("NV") else 0

    def islands(self) -> list[tuple[int, ...]]:
        """Groups of devices that NVLink connects, directly or over each other; a device without NVLink stands alone."""
        left = set(range(self.num_devices))
        groups = []
        while left:
            reached, frontier = set(), [min(left)]
            while frontier:
                here = frontier.pop()
                reached.add(here)
                frontier += [other for other in left - reached if other != here and self.nvlink_lanes(here, other)]
            groups.append(tuple(sorted(reached)))
            left -= reached
        return groups

    def worst_kind(self) -> str:
        """The slowest kind between any two devices: an NVLink one only where every pair has NVLink."""
        kinds = set(self.links.values())
        for kind in reversed(PCIE_KINDS):
            if kind in kinds:
                return kind
        return min(kinds, key=lambda kind: int(kind[2:])) if kinds else "X"

    def link(self, device: DeviceType) -> Link:
        """The link tier of such a node: NVLink lanes where every pair has them, else the slowest PCIe path.

        Rates are the datasheet's (lanes x rate of a lane, or the device's host link); the latency is assumed.
        """
        kind = self.worst_kind()
        if kind.startswith("NV"):
            per_peer = [sum(self.nvlink_lanes(a, b) for b in range(self.num_devices) if b != a) for a in range(self.num_devices)]
            # Behind a switch each pair shows all lanes of the device, so the sum over the peers exceeds what it has.
            switched = max(per_peer) > _LANES.get(device.arch, 18)
            lanes = int(kind[2:]) if switched else min(per_peer)
            lane = _LANE_BYTES_PER_S.get(device.arch, 25 * GB)
            source = f"datasheet: {lanes} NVLink lanes at {lane / GB:.0f} GB/s"
            return _link("NVLink", lanes * lane, 20e-6, source)
        rate = device.host_link_bytes_per_s or 16 * GB
        if kind in ("NODE", "SYS"):
            return _link(f"PCIe ({kind})", rate / 2, 22e-6, "assumed: half the device's host link between sockets or bridges")
        return _link(f"PCIe ({kind})", rate, 22e-6, "assumed: the device's host link")


def _link(kind: str, bandwidth: float, latency: float, source: str) -> Link:
    provenance = {"bandwidth_bytes_per_s": source, "latency_s": "assumed: start of a collective, not measured"}
    return Link(kind=kind, bandwidth_bytes_per_s=bandwidth, latency_s=latency, provenance=provenance)


def parse_topology(text: str) -> Topology:
    """Read the matrix that ``nvidia-smi topo -m`` prints."""
    lines = [(number, _ANSI.sub("", line).rstrip()) for number, line in enumerate(text.splitlines(), 1)]
    header = next((line.split() for _, line in lines if line.split()[:1] == ["GPU0"] and "X" not in line.split()[1:2]), None)
    if header is None:
        raise InvalidInput.single("no_topology", "no line that starts with the column heads GPU0 GPU1 ...", subject="topology")
    columns = [name for name in header if re.match(r"^(?:GPU\d+|NIC\d+|mlx\w+)$", name)]
    num_devices = sum(name.startswith("GPU") for name in columns)
    found: list[Violation] = []
    rows: dict[int, list[str]] = {}
    for number, line in lines:
        cells = line.split()
        if cells and cells != header and re.match(r"^GPU\d+$", cells[0]):
            kinds = cells[1 : 1 + len(columns)]
            wrong = [kind for kind in kinds if not _LINK_KIND.match(kind)]
            if len(kinds) < len(columns) or wrong:
                message = f"'{wrong[0]}' is no link kind" if wrong else f"{len(kinds)} of {len(columns)} columns"
                found.append(
                    Violation(
                        code="bad_topology_row", message=message, loc=("line", number), allowed="X, NV#, PIX, PXB, PHB, NODE, SYS"
                    )
                )
            rows[int(cells[0][3:])] = kinds
    if missing := sorted(set(range(num_devices)) - set(rows)):
        found.append(Violation(code="missing_topology_row", message=f"no row for GPU{missing[0]}", actual=missing))
    if found:
        raise InvalidInput(found, subject="topology")
    links = {
        (a, int(name[3:])): kind
        for a, kinds in rows.items()
        for name, kind in zip(columns, kinds, strict=True)
        if name.startswith("GPU") and int(name[3:]) != a
    }
    for (a, b), kind in links.items():
        if a < b and links[b, a] != kind:
            message = f"GPU{a} to GPU{b} is {kind}, back it is {links[b, a]}"
            found.append(Violation(code="unsymmetric_topology", message=message))
    if found:
        raise InvalidInput(found, subject="topology")
    nics = tuple(name for name in columns if not name.startswith("GPU"))
    nic_links = {(a, name): kind for a, kinds in rows.items() for name, kind in zip(columns, kinds, strict=True) if name in nics}
    return Topology(num_devices=num_devices, links=links, nics=nics, nic_links=nic_links)


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One line of a hostfile."""

    host: str
    slots: int


def parse_hostfile(text: str, *, default_slots: int | None = None) -> tuple[HostEntry, ...]:
    """Read lines ``host slots=8`` (MPI, DeepSpeed; ``host:8`` too). ``default_slots`` stands for a line without."""
    entries: list[HostEntry] = []
    found: list[Violation] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        host, _, tail = words[0].partition(":")
        options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        slots = options.get("slots", tail or (str(default_slots) if default_slots is not None else ""))
        if not slots.isdigit() or int(slots) < 1 or any("=" not in word for word in words[1:]):
            message = f"'{line.strip()}' is not 'host slots=<number>'"
            found.append(Violation(code="bad_hostfile_line", message=message, loc=("line", number), allowed="host slots=8"))
        elif any(entry.host == host for entry in entries):
            found.append(Violation(code="duplicate_host", message=f"host '{host}' stands twice", loc=("line", number), actual=host))
        else:
            entries.append(HostEntry(host, int(slots)))
    if not entries and not found:
        found.append(Violation(code="empty_hostfile", message="no host in it"))
    if found:
        raise InvalidInput(found, subject="hostfile")
    return tuple(entries)


def node_groups(entries: Sequence[HostEntry], *, device: str | None = None, preset: str | None = None) -> tuple[NodeGroup, ...]:
    """Hosts as node groups in the file's order, so that device numbers follow it; equal neighbours share a group."""
    return tuple(
        NodeGroup(count=len(list(same)), device=device, preset=preset, devices_per_node=slots)
        for slots, same in groupby(entries, key=lambda entry: entry.slots)
    )


def parse_nccl_tests(text: str, *, op: str | None = None, group_size: int | None = None, in_place: bool = False) -> CollectiveCurve:
    """Read the output of an nccl-tests program. ``op`` and ``group_size`` are taken from its header where it has them.

    A row whose bandwidth contradicts its size and time (by more than 3%) is a violation, and so are wrong results.
    """
    lines = [(number, _MPI_TAG.sub("", line).strip()) for number, line in enumerate(text.splitlines(), 1)]
    op = op or _op_of(text)
    group_size = group_size or sum(bool(re.match(r"^#\s+Rank\s+\d+", line)) for _, line in lines) or None
    heads = next((line.lstrip("# ").split() for _, line in lines if re.match(r"^#\s*size\s+count", line)), None)
    found: list[Violation] = []
    if op is None:
        found.append(Violation(code="unknown_collective", message="the table does not name its collective; give 'op'"))
    if group_size is None:
        found.append(Violation(code="unknown_group_size", message="the table does not list its ranks; give 'group_size'"))
    if heads is None or "time" not in heads:
        found.append(Violation(code="no_table", message="no head line '# size count type ... time algbw busbw'"))
        raise InvalidInput(found, subject="nccl-tests table")
    times = [index for index, name in enumerate(heads) if name == "time"]
    column = times[-1] if in_place else times[0]
    points = []
    for number, line in lines:
        cells = line.split()
        if len(cells) < 4 or not cells[0].isdigit() or not cells[1].isdigit():
            continue
        if len(cells) != len(heads):
            message = f"{len(cells)} columns, the head has {len(heads)}"
            found.append(Violation(code="bad_table_row", message=message, loc=("line", number)))
            continue
        row = _row(number, cells, heads, column, found)
        if row is not None and row.size_bytes > 0:
            points.append(row)
    if not points and not found:
        found.append(Violation(code="empty_table", message="the table has no rows"))
    if found or op is None or group_size is None:
        raise InvalidInput(found, subject="nccl-tests table")
    return CollectiveCurve(op=op, group_size=group_size, points=tuple(sorted(points, key=lambda point: point.size_bytes)))


def _row(number: int, cells: Sequence[str], heads: Sequence[str], column: int, found: list[Violation]) -> CurvePoint | None:
    try:
        size, time_us, bandwidth = float(cells[0]), float(cells[column]), float(cells[column + 1])
    except (ValueError, IndexError):
        found.append(
            Violation(code="bad_table_row", message=f"'{' '.join(cells)}' has no number for the time", loc=("line", number))
        )
        return None
    wrong = cells[column + 3] if heads[column + 3 : column + 4] == ["#wrong"] else "N/A"
    if wrong not in ("N/A", "0", "0e+00"):
        found.append(Violation(code="wrong_results", message=f"{wrong} wrong results in this row", loc=("line", number)))
    if time_us > 0 and bandwidth >= 1 and abs(size / time_us / 1e3 / bandwidth - 1) > 0.03:
        message = f"{size:.0f} bytes in {time_us} us is {size / time_us / 1e3:.2f} GB/s, the table says {bandwidth}"
        found.append(Violation(code="contradicting_row", message=message, loc=("line", number), actual=bandwidth))
    return CurvePoint(size_bytes=size, time_s=time_us / 1e6) if time_us > 0 else None


def _op_of(text: str) -> str | None:
    match = re.search(r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)(?:_perf)?\b", text)
    if match is None:
        return None
    return {"alltoall": "all_to_all", "sendrecv": "p2p"}.get(match[1], match[1])
