"""`moonpool sandbox`: what this machine offers to the sandboxes of models."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

from moonpool.runtime.cli.session import logged_to
from moonpool.runtime.cli.table import table
from moonpool.runtime.output import harmless
from moonpool.runtime.terminal import Terminal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from moonpool.runtime.sandbox.offers import Offer, Offers

NAME = "sandbox"
HELP = "say what this machine offers to the sandboxes of models"
DESCRIPTION = """\
Try each layer of the sandbox in a process of its own: put it on, try what it is to prevent, look at it from outside.
One line a layer, with what to do where there is none. The last lines say what the level `strict` is here, as
a real model got it.

It depends on the kernel, on the user, and on the container: ask as the user, and where, the models are to run.
Exits with 1 where `strict` does not work. docs/SANDBOX.md says what the layers are for.
"""
EXAMPLES = """\
examples:
  moonpool sandbox
  moonpool sandbox --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    # Not for those who only infer.
    from moonpool.runtime.sandbox.offers import find_offers

    # What a model's stub would log is in what is printed.
    with logged_to(logging.NullHandler(), logging.CRITICAL):
        offers = find_offers()
    if options.json:
        print(json.dumps(offers.as_dict(), indent=2))
    else:
        terminal = Terminal(sys.stdout)
        for text, style in _lines(offers):
            terminal.line(terminal.paint(harmless(text), style) if style else harmless(text))
    return 0 if offers.strict.works else 1


def _lines(offers: Offers) -> Iterator[tuple[str, str]]:
    yield f"{offers.kernel} on {offers.machine}, user {offers.user}", "bold"
    rows = [
        [each.layer, "yes" if each.is_offered else "no", _about(each)] for each in offers.layers
    ]
    for line, offer in zip(table(rows, align="<<<"), offers.layers, strict=True):
        yield line, "" if offer.is_offered else "red" if offer.is_required else "yellow"
    yield from _about_strict(offers)
    for gpu in offers.gpus:
        if gpu.why:
            yield f"GPU {gpu.number} cannot be given to a contained model: {gpu.why}", "yellow"
        else:
            nodes = ", ".join(gpu.devices)
            yield f"GPU {gpu.number} is given to contained models that name it, by {nodes}", ""


def _about_strict(offers: Offers) -> Iterator[tuple[str, str]]:
    strict = offers.strict
    if not strict.works:
        yield f"strict does not work here: {strict.why}", "red"
        return
    yield f"strict works here, with {', '.join(strict.layers)}", "green"
    said = {sentence.partition(":")[0] for sentence in strict.left_out}
    missing = [each for each in offers.layers if not each.is_offered and each.layer not in said]
    for sentence in (*strict.left_out, *(f"{each.layer}: {each.why}" for each in missing)):
        yield f"without {sentence}", "yellow"


def _about(offer: Offer) -> str:
    if offer.is_offered:
        return offer.detail
    return f"{offer.why} ({'strict needs it' if offer.is_required else 'strict does without'})"
