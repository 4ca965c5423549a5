"""What a process costs, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int | None = None) -> float:
    """Resident megabytes of a process, of this one without a number."""
    text = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    return int(next(x for x in text.splitlines() if x.startswith("VmRSS")).split()[1]) * 1024 / 1e6
