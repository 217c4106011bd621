"""A database engine that brings its own PostgreSQL.

The server starts at the first connection, is shared by all processes of the project, and is gone
after the last of them. `base.py` is what Django loads, `server.py` the side of the processes that
use the server, `keeper.py` the process that owns it; `programs.py` finds `postgres` and `initdb`,
`folders.py` guards against other users.
"""
