"""Download Debian packages apart from the system's own apt, for tools that unpack them instead of installing them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

APT = """
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def download(folder: Path, *command: str, options: str = "") -> list[Path]:
    """Run ``apt-get command`` with a state of its own in ``folder``, and return the packages that it downloaded.

    Args:
        folder: where apt's state and the packages are kept.
        command: what apt-get is to do.
        options: more lines of apt.conf.
    """
    archives = folder / "cache/archives"
    for path in (folder / "state/lists/partial", archives / "partial"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "apt.conf").write_text(APT.format(folder=folder) + options)
    env = os.environ | {"APT_CONFIG": str(folder / "apt.conf")}
    run("apt-get", "update", "-qq", env=env, stdout=sys.stderr)
    run("apt-get", "-qq", *command, env=env, cwd=archives, stdout=sys.stderr)
    return sorted(archives.glob("*.deb"))
