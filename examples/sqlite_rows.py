"""Predictions in an SQLite database, by a callback: python examples/sqlite_rows.py frames rows.db"""

import json
import sqlite3
import sys
from typing import Any

from remtta import Callback, adapt_stream, load_model


class SqliteRows(Callback):
    """Writes the row of each frame into a table, batch by batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_start(self, run: Any) -> None:
        self.database = sqlite3.connect(self.path)
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS predictions (frame INTEGER PRIMARY KEY, label TEXT, row TEXT)"
        )

    def on_batch(self, report: Any) -> None:
        rows = [(row["index"], row.get("label"), json.dumps(row)) for row in report.rows]
        with self.database:  # a transaction; a resumed run reports some rows again
            self.database.executemany("INSERT OR REPLACE INTO predictions VALUES (?, ?, ?)", rows)

    def on_end(self, summary: Any) -> None:
        self.database.close()


if __name__ == "__main__":
    adapt_stream(load_model("vit_base_patch16_224"), sys.argv[1], callbacks=[SqliteRows(sys.argv[2])])
