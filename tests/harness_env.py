"""Programs from PyPI that the tests run, each in a virtual environment of its own, never in the project's.

They lie in the folder that EI_TEST_HARNESSES names, else in ~/.cache/evolving-tests, and are made when missing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

INSTALL_S = 900.0


class Missing(Exception):
    """It cannot be installed here; the text says why."""


def folder() -> Path:
    given = os.environ.get("EI_TEST_HARNESSES")
    return Path(given) if given else Path.home() / ".cache" / "evolving-tests"


def python_of(package: str, version: str) -> Path:
    """The Python that can import that package, which is installed if need be. Raises Missing.

    Two test runs at a time make one environment; one that is not whole is made anew.
    """
    base = folder()
    home = base / f"{package}-{version}"
    done = home / ".installed"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / f"{home.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(home, ignore_errors=True)
                _call([sys.executable, "-m", "venv", str(home)])
                _call([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet",
                       "--disable-pip-version-check", f"{package}=={version}"])  # fmt: skip
                done.touch()
    except OSError as error:
        raise Missing(f"{home}: {error}") from None
    return home / "bin" / "python"


def _call(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"{' '.join(argv[1:])}: not done after {INSTALL_S:g} s") from None
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"{' '.join(argv[1:])}: {told[-1] if told else f'exit code {done.returncode}'}")


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """A program's environment: nobody's settings or keys, `home` as its home, and no way out through a proxy."""
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LANG": "C.UTF-8"} | more
