"""Provide C++ compilers that have libstdc++ only as a static library, made from the machine's own."""

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
    """Return the machine's C++ compiler: CXX, or g++."""
    command = os.environ.get("CXX") or "g++"
    if shutil.which(shlex.split(command)[0]) is None:
        pytest.skip(f"no C++ compiler ({command})")
    return command


@pytest.fixture
def quick_compiler(tmp_path, compiler) -> str:
    """Return a compiler that optimizes nothing, for tests of what is packed rather than of its speed."""
    return script(tmp_path / "quick", f'exec {compiler} "$@" -O0')


@pytest.fixture
def dangling_compiler(tmp_path, compiler) -> str:
    """Return a compiler that silently takes libstdc++.a, as with a dangling libstdc++.so, but finds libstdc++.so.6."""
    return script(tmp_path / "dangling", f'exec {compiler} "$@" -static-libstdc++')


@pytest.fixture
def static_compiler(tmp_path, compiler) -> str:
    """Return a compiler that has libstdc++.a and no shared library at all."""
    drop = 'for word; do shift; [ "$word" = -l:libstdc++.so.6 ] || set -- "$@" "$word"; done'
    return script(tmp_path / "static", f'{drop}\nexec {compiler} "$@" -static-libstdc++')
