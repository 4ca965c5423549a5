from __future__ import annotations

import sys

from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings
from shared.service import run_with_settings


def main(argv: list[str]) -> int:
    """The directory as a process; returns its exit code."""
    return run_with_settings(
        DirectoryService, DirectorySettings, argv, "Count which KV pages active branches reference."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
