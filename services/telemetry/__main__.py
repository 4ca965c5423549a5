from __future__ import annotations

import sys

from services.telemetry.service import TelemetryService
from services.telemetry.settings import TelemetrySettings
from shared.service import run_with_settings


def main(argv: list[str]) -> int:
    """Telemetry as a process; returns its exit code."""
    summary = "Make windows for the planner, metrics and the live page."
    return run_with_settings(TelemetryService, TelemetrySettings, argv, summary)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
