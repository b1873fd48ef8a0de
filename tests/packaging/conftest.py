"""C++ compilers that have libstdc++ as a static library alone, made of the machine's own."""

import os
import shlex
import shutil
from pathlib import Path

import pytest


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def compiler() -> str:
    """Return the machine's C++ compiler: what CXX says, or g++."""
    command = os.environ.get("CXX") or "g++"
    if shutil.which(shlex.split(command)[0]) is None:
        pytest.skip(f"no C++ compiler ({command})")
    return command


@pytest.fixture
def quick_compiler(tmp_path, compiler) -> str:
    """Return one that optimizes nothing: for tests of what is packed, not of how fast it is."""
    return script(tmp_path / "quick", f'exec {compiler} "$@" -O0')


@pytest.fixture
def dangling_compiler(tmp_path, compiler) -> str:
    """Return one whose link to libstdc++.so dangles: it takes libstdc++.a in silence, but finds libstdc++.so.6 where that is named."""
    return script(tmp_path / "dangling", f'exec {compiler} "$@" -static-libstdc++')


@pytest.fixture
def static_compiler(tmp_path, compiler) -> str:
    """Return one that has libstdc++.a, and no shared library at all."""
    drop = 'for word; do shift; [ "$word" = -l:libstdc++.so.6 ] || set -- "$@" "$word"; done'
    return script(tmp_path / "static", f'{drop}\nexec {compiler} "$@" -static-libstdc++')
