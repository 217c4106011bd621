"""Readers: pure functions from an open file to what is in it. No database, no Django.

A reader never trusts a file: not its name, not its size, not what it says of itself. What it
returns is bounded and can be stored.
"""

from __future__ import annotations


class Unreadable(Exception):
    """The file can never be read, however often one tries. The text says why."""


def storable(text: str) -> str:
    """The text without what PostgreSQL cannot store: NUL characters and halves of characters."""
    return text.replace("\x00", "").encode(errors="replace").decode()


def printable(name: str) -> str:
    """A file name that can be stored and shown on a screen, with odd characters written out.

    Names are bytes to the system: what is no UTF-8 arrives as lone surrogates, and a line break or
    a terminal's control sequence is a legal part of a name.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in name
    )
