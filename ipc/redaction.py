"""Takes private facts out of texts that leave the process."""

from __future__ import annotations

import re

# A path in quotes may have spaces in it. In other paths, a name ends at a space, or at a character that names rarely have.
_QUOTED = re.compile(r"""(["'])(?:file://)?/(?:[^"'\n/]*/)+([^"'\n/]*)\1""")
_PATH = re.compile(r"""(?:file:/?/?|(?<![\w./-]))/(?:[^\s/"'(),:;<>=|]+/)+([^\s/"'(),:;<>=|]*)""")
# A repository may be named by a relative path, and then errors of its configurations are.
_RELATIVE = re.compile(r"""(?<![\w./-])(?:[^\s/"'(),:;<>=|]+/)+(config\.pbtxt)\b""")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_FRAME = re.compile(r'\s*File ".*", line \d+')
_SOURCE = " " * 4


def scrubbed(text: str) -> str:
    """Return the text without folders, addresses and lines of source. The last name of a path stays, and the line of a frame."""
    text = _QUOTED.sub(r"\1\2\1", text)
    text = _RELATIVE.sub(r"\1", _PATH.sub(r"\1", text))
    text = _ADDRESS.sub("0x…", text)
    if 'File "' not in text:
        return text
    kept = []
    is_frame = False
    for line in text.split("\n"):
        if is_frame and line.startswith(_SOURCE):
            continue
        is_frame = _FRAME.match(line) is not None
        kept.append(line)
    return "\n".join(kept)
