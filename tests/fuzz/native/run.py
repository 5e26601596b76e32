"""Fuzz the native codec and layouts of batches for so many seconds: `python -m tests.fuzz.native.run SECONDS`.

It changes the golden vectors and the corpus at random, and goes on from what reached new code. What it finds there is
put to Python's, too: both must say the same. With `--keep`, it goes into the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runtime.triton.both_codecs import CORPUS, LAYOUTS, agree, corpus, layouts_of_batches, vectors
from tests.runtime.triton.codec_program import Asked, CodecFuzzer, file_of
from tests.vectors.make import CHANNELS

CRASH = Path("crash-native")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.native.run")
    parser.add_argument("seconds", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    if shutil.which("c++") is None:
        print("There is no C++ compiler: nothing native is fuzzed.")
        return
    known = [asked for channel in CHANNELS for asked, _ in vectors(channel)]
    known += [Asked("layout", 0, packet) for packet in LAYOUTS]
    known += layouts_of_batches() + corpus()
    print(f"The native codec and layouts are fuzzed with --seed={arguments.seed}.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = CodecFuzzer(Path(folder))
        try:
            found = fuzzer.find(known, arguments.seconds, arguments.seed, CRASH)
        except subprocess.CalledProcessError as error:
            sys.exit(f"It did not bear what is in {CRASH}: {error}.")
    for asked, told in found:
        try:
            agree(asked, told)
        except AssertionError as difference:
            CRASH.write_bytes(file_of(asked))
            sys.exit(f"Both ends do not agree on what is in {CRASH}: {difference}.")
        if arguments.keep:
            data = file_of(asked)
            (CORPUS / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    print(f"{len(found)} of them reached code that none before them did.")


if __name__ == "__main__":
    main()
