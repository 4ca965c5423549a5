from __future__ import annotations

import sys

from services.planner.service import PlannerService
from services.planner.settings import PlannerSettings
from shared.service import run_with_settings


def main(argv: list[str]) -> int:
    """The planner as a process; returns its exit code."""
    return run_with_settings(
        PlannerService, PlannerSettings, argv, "Learn the nodes' speeds and set the split."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
