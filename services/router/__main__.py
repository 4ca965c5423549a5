from __future__ import annotations

import sys

from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.service import run_with_settings


def main(argv: list[str]) -> int:
    """The router as a process; returns its exit code."""
    return run_with_settings(RouterService, RouterSettings, argv, "Serve the API and route to the workers.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
