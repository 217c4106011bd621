"""Real workers on real servers, broken on purpose: `python -m tests.chaos`."""
