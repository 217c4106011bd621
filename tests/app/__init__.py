"""A project's app, as the tests see one: handlers in `jobs.py` and in `tasks.py`."""
