#!/usr/bin/env python
"""The commands of the example project."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command on the command line."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # also while Django is still being imported
        sys.exit(130)
