"""Documents: the text columns of tables, for the objective `language`."""

from dataclasses import dataclass
from pathlib import Path

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip
from worldmodel.data.columns import check_column
from worldmodel.data.tables import ParquetTable, open_table
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import Episode


@dataclass(frozen=True)
class Document:
    """Recipe of an episode that is text alone."""

    name: str
    text: str

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return the episode."""
        return Episode(self.name, answer=self.text)


class TextSource:
    """The rows of a table with a text column, each of which is a document.

    Raises:
        ConfigError: the table or its column is wrong, or its first row has no text.
    """

    tasks = ("document",)
    streams = 0

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        config, key = data.sources[name], f"data.sources.{name}"
        if unknown := sorted({*config.columns} - {"text"}):
            raise ConfigError(f"{key}.columns has {unknown[0]!r}; a source of documents has only text.")
        self.column = config.columns.get("text", "text")
        self.table = open_table(config.path)
        check_column(f"{key}.columns.text", self.column, self.table.columns)
        if isinstance(self.table, ParquetTable):
            self.table.wanted = [self.column]
        self.label, self.size = Path(config.path).name, len(self.table)
        first = self.at(0)
        if isinstance(first, BrokenClip):
            raise ConfigError(f"{key}: {first.name}: {first.reason}.")

    def at(self, index: int) -> Document | BrokenClip:
        """Return the document of a row."""
        number = index % self.size
        name = f"{self.label} row {number + 1}"
        try:
            text = self.table.row(number).get(self.column)
            if not isinstance(text, str) or not text.strip():
                raise InputError("it has no text")
        except InputError as error:
            return BrokenClip(name, str(error))
        return Document(name, text)

    def cost(self, index: int, rounds: int) -> float:
        """Return the same for all documents, which are cut to one length."""
        return rounds

    def close(self) -> None:
        """Close the table."""
        self.table.close()
