"""Errors in the words of the command line: an argument's name in Python becomes its option."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def named(options: Mapping[str, str]) -> Iterator[None]:
    """Within it, an error that begins with a name of `options` says the option instead; so do hints of `name=...`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        for name, option in options.items():
            text = re.sub(rf"\A{name}\b(?= must)", option, text)
            text = re.sub(rf"\b{name}=\.\.\.", option, text)
        raise type(error)(text) from error
