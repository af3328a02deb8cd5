"""Documents: the text columns of tables and streamed datasets, for the objective `language`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldmodel.config import DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip
from worldmodel.data.columns import check_column
from worldmodel.data.huggingface import HuggingFaceSource
from worldmodel.data.tables import ParquetTable, is_table, open_table
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError


@dataclass(frozen=True)
class Document:
    """Recipe of an episode that is text alone."""

    name: str
    text: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
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
        self.column = _column(key, config)
        self.table = open_table(config.path)
        check_column(f"{key}.columns.text", self.column, self.table.columns)
        if isinstance(self.table, ParquetTable):
            self.table.wanted = [self.column]
        self.label, self.size = Path(config.path).name, len(self.table)
        first = self.at(0)
        if isinstance(first, BrokenClip):
            raise ConfigError(f"{key}: {first.name}: {first.reason}.")

    def at(self, index: int) -> Document | BrokenClip:
        number = index % self.size
        name = f"{self.label} row {number + 1}"
        try:
            row = self.table.row(number)
        except InputError as error:
            return BrokenClip(name, str(error))
        return _document(name, row.get(self.column))

    def cost(self, index: int, rounds: int) -> float:
        """Return the same for all documents, which are cut to one length."""
        return rounds

    def close(self) -> None:
        self.table.close()


class TextStream(HuggingFaceSource):
    """The rows of a streamed Hugging Face dataset with a text column, each of which is a document.

    Raises:
        ConfigError: the dataset or its column is wrong.
    """

    tasks = ("document",)

    def __init__(self, name: str, config: DataConfig, model: WorldModelConfig) -> None:
        source = config.sources[name]
        self.key, self.path = f"data.sources.{name}", source.path
        self.column = _column(self.key, source)
        dataset, types = self._open(source.split)
        check_column(f"{self.key}.columns.text", self.column, list(types))
        self._divide(dataset, [self.column], config, source.streams)

    def at(self, index: int) -> Document | BrokenClip:
        row = self._stream(index % self.streams).row(index // self.streams)
        return _document(f"{self.path} row {index + 1}", row[self.column])


def open_text(name: str, config: DataConfig, model: WorldModelConfig) -> TextSource | TextStream:
    """Open a table of documents, or a Hugging Face dataset if the path does not end as one of a table.

    Raises:
        ConfigError: as the two sources.
    """
    return (TextSource if is_table(config.sources[name].path) else TextStream)(name, config, model)


def _column(key: str, config: SourceConfig) -> str:
    if unknown := sorted({*config.columns} - {"text"}):
        raise ConfigError(f"{key}.columns has {unknown[0]!r}; a source of documents has only text.")
    return config.columns.get("text", "text")


def _document(name: str, text: Any) -> Document | BrokenClip:
    if isinstance(text, str) and text.strip():
        return Document(name, text)
    return BrokenClip(name, "it has no text")
