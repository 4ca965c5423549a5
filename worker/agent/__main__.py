from __future__ import annotations

import sys

from shared.service import run_with_settings
from worker.agent.service import WorkerService
from worker.agent.settings import WorkerSettings


def main(argv: list[str]) -> int:
    """A worker as a process; returns its exit code."""
    return run_with_settings(WorkerService, WorkerSettings, argv, "Run one node with its engine.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
