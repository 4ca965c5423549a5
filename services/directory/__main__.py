"""`python -m services.directory`, and `evolving directory [verify | show]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared.service import run_with_settings


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if words[:1] in (["verify"], ["show"]):
        from services.directory import command

        return (command.verify_main if words[0] == "verify" else command.show_main)(words[1:])
    if words and not words[0].startswith("-"):
        print(f"evolving: no command 'directory {words[0]}' (known: verify, show)", file=sys.stderr)
        return 2
    from services.directory.service import DirectoryService
    from services.directory.settings import DirectorySettings

    summary = "Count which KV pages active branches reference. Also: evolving directory verify, directory show BRANCH."
    return run_with_settings(DirectoryService, DirectorySettings, words, summary)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
