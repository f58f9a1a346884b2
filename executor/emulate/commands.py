"""Commands of the kernel's network and namespace tools, with errors in plain words."""

from __future__ import annotations

import os
import shutil
import subprocess

from profiler.worker_env import die_with_parent
from specs.errors import ExecutionFailed, InvalidInput

TOOLS = ("ip", "tc", "nsenter", "unshare")
COMMAND_TIMEOUT_S = 20.0


def require_network_tools() -> None:
    """Raise :class:`InvalidInput` unless this process may make network namespaces and has the tools."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        message = f"slow links need {', '.join(missing)} (Debian: iproute2, util-linux)"
        raise InvalidInput.single("tools_missing", message, subject="emulation")
    if os.geteuid() != 0:
        message = (
            "slow links are made of network namespaces, which need root; without links and with slow_by 'dilation' an emulated "
            "cluster needs no rights"
        )
        raise InvalidInput.single("needs_root", message, subject="emulation")


def run_tool(*command: str) -> None:
    """Run to its end; raise :class:`ExecutionFailed` with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise ExecutionFailed(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}")


def run_inside(holder: int, *command: str) -> None:
    """Run in the network namespace of process ``holder``."""
    run_tool("nsenter", f"--net={namespace_path(holder)}", *command)


def namespace_path(holder: int) -> str:
    """The network namespace of a process."""
    return f"/proc/{holder}/ns/net"


def hold_namespace() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own. The namespace has no name: with the last process in it, it is gone, links and
    all; and this process goes with ours, however ours ends."""
    parent = os.getpid()
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: die_with_parent(parent), start_new_session=True,
    )  # fmt: skip
    if holder.stdout is None or holder.stdout.readline().strip() != b"ready":
        _, words = holder.communicate()
        raise ExecutionFailed(f"no network namespace could be made: {words.decode(errors='replace').strip()}")
    return holder
