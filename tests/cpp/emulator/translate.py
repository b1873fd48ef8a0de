"""Rewrite the three things of CUDA C++ that a host compiler cannot parse or lay out; lines stay where they are.

translate.py IN OUT
"""

import re
import sys
from pathlib import Path


def split(declarators: str) -> list[str]:
    """Split at the commas between declarators, not at those inside brackets; < and > are brackets outside others."""
    parts, depth, angles = [""], 0, 0
    for char in declarators:
        depth += (char in "([{") - (char in ")]}")
        angles += ((char == "<") - (char == ">")) * (depth == 0)
        if char == "," and depth == 0 and angles == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def shared(match: re.Match[str]) -> str:
    """Make variables that live as long as their block: a static variable would be shared by all blocks."""
    text, kind = "", ""
    for part in split(re.sub(r"alignas\([^)]*\)", lambda found: "\n" * found[0].count("\n"), match[1])):
        found = re.fullmatch(r"(?s)(.*?)(\w+)\s*((?:\[.*\])?)\s*", part)
        assert found, part
        kind = found[1] if found[1].strip() else kind
        name = found[2]
        text += f"static char {name}_key; using {name}_shared = {kind}{found[3]}; "
        text += f"{name}_shared& {name} = ::emulator::shared<{name}_shared>(&{name}_key); "
    return text


def translate(source: str) -> str:
    source = source.replace("<<<", " << ::emulator::Launch(").replace(">>>(", ")(")
    source = re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"unsigned char* \1 = ::emulator::dynamic_shared();", source)
    return re.sub(r"__shared__\s+([^;]*);", shared, source)


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    target = Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f'#line 1 "{path}"\n' + translate(path.read_text()))
