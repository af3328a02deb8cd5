"""Answers that were paid for: kept, so that an interrupted clip goes on after its last finished request."""

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import connect, insert, lock_schema, reads, transaction, writes
from worldmodel.flow.errors import StageError

_metadata = sa.MetaData()
answer = sa.Table(
    "caption_answer",
    _metadata,
    sa.Column("request", sa.String(64), primary_key=True),  # SHA-256 of all that the model gets
    sa.Column("text", sa.Text, nullable=False),
)
spent = sa.Table(
    "caption_spent",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)


class Answers:
    """Answers by their requests, and what they have cost. Thread-safe.

    Args:
        url: database, as `worldmodel.database.connect`; several workers may share it.
        budget_tokens: tokens, of prompts and answers, after which no request is made; 0 sets no limit.
        budget_requests: likewise requests.

    Raises:
        ConfigError: the URL is wrong.
        DatabaseError: it cannot be used.
    """

    def __init__(self, url: str, budget_tokens: int = 0, budget_requests: int = 0) -> None:
        self.engine = connect(url)
        self.budgets = {"tokens": budget_tokens, "requests": budget_requests}
        transaction(self.engine, self._create)

    @staticmethod
    def _create(db: Connection) -> None:
        lock_schema(db)
        _metadata.create_all(db)

    @reads
    def find(self, db: Connection, request: str) -> str | None:
        """Return the answer to a request that was made before."""
        return db.execute(sa.select(answer.c.text).where(answer.c.request == request)).scalar()

    @writes
    def count(self, db: Connection, tokens: int) -> None:
        """Count a request that was answered, whether or not the answer is of use."""
        row = {"id": 1, "requests": 1, "tokens": tokens}
        sums = {"requests": spent.c.requests + 1, "tokens": spent.c.tokens + tokens}
        statement = insert(db, spent).values(row)
        db.execute(statement.on_conflict_do_update(index_elements=[spent.c.id], set_=sums))

    @writes
    def keep(self, db: Connection, request: str, text: str) -> None:
        """Keep an answer."""
        db.execute(insert(db, answer).values(request=request, text=text).on_conflict_do_nothing())

    def check_budget(self) -> None:
        """Check that another request may be made.

        Raises:
            StageError: the budget is spent. It ends the run; answers are kept.
        """
        if not any(self.budgets.values()):
            return
        found = self.spent()
        for name, budget in self.budgets.items():
            if budget and found[name] >= budget:
                raise StageError(
                    f"The budget of caption is spent: {found[name]} {name} of {budget}; raise its setting "
                    f"budget_{name} and start the flow again, which goes on where it ended."
                )

    @reads
    def spent(self, db: Connection) -> dict[str, int]:
        """Return the numbers of requests and tokens so far."""
        row = db.execute(sa.select(spent)).mappings().first()
        return {name: row[name] if row else 0 for name in ("requests", "tokens")}
