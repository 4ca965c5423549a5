"""The `evolving` command: one word, then that part's settings.

Parts are imported only when asked for, so that `evolving router` does not load a planner's libraries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence

from shared.config import ConfigError
from shared.streams import BusError

# command -> module, function, what it does
COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("services.up", "main", "run a whole cluster with simulated workers on this machine"),
    "demo": ("services.demo", "main", "start a cluster, replay a bundled agent trace, print the report"),
    "router": ("services.router.__main__", "main", "serve the API and route to the workers"),
    "directory": (
        "services.directory.__main__",
        "main",
        "count which KV pages active branches reference; verify, show",
    ),
    "planner": ("services.planner.__main__", "main", "learn the nodes' speeds and set the split"),
    "telemetry": ("services.telemetry.__main__", "main", "windows for the planner, metrics, the live page"),
    "worker": ("worker.agent.__main__", "main", "run one node with its engine"),
    "replay": ("loadtest.command", "replay", "replay an agent trace against a router"),
    "generate": ("loadtest.command", "generate", "write a synthetic agent trace"),
    "simulate": (
        "loadtest.simulate.command",
        "main",
        "run a trace on a simulated cluster, ours or a baseline",
    ),
    "reproduce": (
        "loadtest.reproduce.command",
        "main",
        "the paper's tables and figures, from simulated runs",
    ),
    "fit": ("loadtest.fit", "main", "fit a timing profile to measured iterations"),
    "status": ("services.status", "main", "show nodes, phases, queues, split and KV hit rate"),
    "keys": ("services.router.keys_command", "main", "add, list and revoke the router's API keys"),
    "split": ("services.split_command", "main", "ask the planner for a split, such as 3P1D"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: evolving COMMAND [--help] [settings]", ""]
    lines += [f"  {name:{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
    lines += ["", "Settings come from --config FILE.toml, the environment (EI_*) and flags, in rising order."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 after a failure, 2 for what the caller must mend (one line on standard error)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"evolving-infra {importlib.metadata.version('evolving-infra')}")
        return 0
    entry = COMMANDS.get(words[0])
    if entry is None:
        print(f"evolving: no command {words[0]!r} (known: {', '.join(COMMANDS)})", file=sys.stderr)
        return 2
    module, function, _ = entry
    try:
        run: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
        return run(words[1:])
    except (ConfigError, BusError) as error:
        print(f"evolving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
