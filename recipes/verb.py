"""The parser of one `octet` verb, whose help is the docstring of the function that does it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable


def verb_parser(verb: str, act: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """An empty parser for `octet VERB`; abbreviations of options are errors."""
    return argparse.ArgumentParser(
        prog=f"octet {verb}", description=inspect.cleandoc(act.__doc__ or ""), allow_abbrev=False
    )
