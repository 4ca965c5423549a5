"""How a command of this folder ends: 0 all well, 2 with one line on standard error for what the caller must mend, 130
interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable

from loadtest.traces import TraceError
from loadtest.workloads.composition import CompositionError
from shared.config import ConfigError


def carried_out(run: Callable[[], None]) -> int:
    """The exit code of a command that `run` carries out."""
    try:
        run()
    except (ConfigError, TraceError, CompositionError, ValueError) as error:
        return _refused(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refused(f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return 0


def _refused(why: str) -> int:
    print(f"evolving: {why}", file=sys.stderr)
    return 2
