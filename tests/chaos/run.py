"""One run: the wanted scenarios one after another, each with servers and workers of its own."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from django.db import connection
from rich.console import Console

from example_project.postgres.server import folder_mode
from tests.chaos.record import make_tables
from tests.chaos.report import kinds_of, log_tails, row_of, table_of
from tests.chaos.scenario import Ports, Result, Scenario
from tests.chaos.scenarios import FULL, SCENARIOS, SHORT
from tests.chaos.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was asked for, and where it takes place."""

    seed: int
    short: bool
    only: str | None
    folder: Path
    ports: Ports
    console: Console

    def play_all(self) -> bool:
        """Show a line for each scenario and a table in the end. Returns whether all promises held.

        What a broken scenario found, and the ends of its logs, are shown at once.
        """
        wanted = [kind for kind in SCENARIOS if self._is_wanted(kind)]
        if not wanted:
            names = ", ".join(kind.name for kind in SCENARIOS)
            self.console.print(f"No scenario has {self.only!r} in its name. There are: {names}.")
            return False
        return self._play(wanted)

    def _play(self, wanted: Sequence[type[Scenario]]) -> bool:
        template = self._template()
        results: list[Result] = []
        broken: list[str] = []
        for kind in wanted:
            scenario = self._made(kind, template)
            try:
                results.append(scenario.play())
            except Exception:
                broken.append(scenario.name)
                self._show_failure(scenario)
            else:
                self.console.print(row_of(results[-1]), markup=False)
        self.console.print(table_of(results, broken), kinds_of(results))
        return not broken

    def _template(self) -> Server:
        """A server with all tables, made once and copied by every scenario."""
        server = Server(self.folder / "template", self.ports.server)
        server.create()
        try:
            server.start()
            make_tables()
            connection.close()
        finally:
            server.stop()
        return server

    def _is_wanted(self, kind: type[Scenario]) -> bool:
        if self.only is not None:
            return self.only.lower() in kind.name.lower()
        return kind.in_short or not self.short

    def _made(self, kind: type[Scenario], template: Server) -> Scenario:
        return kind(
            template=template,
            folder=self._subfolder(kind.__name__),
            ports=self.ports,
            size=SHORT if self.short else FULL,
            rng=random.Random(f"{self.seed} {kind.__name__}"),
        )

    def _subfolder(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir()
        made.chmod(folder_mode())  # the server's account passes through
        return made

    def _show_failure(self, scenario: Scenario) -> None:
        self.console.print(log_tails(scenario.folder), markup=False)
        self.console.print(traceback.format_exc(), markup=False)
        self.console.print(f"BROKEN: {scenario.name}, seed {self.seed}", style="red")
