"""What an examination found."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from worldmodel.errors import cause

MIN_ALIKE = 5
"""Episodes from which on equal lengths are named."""
MAX_NAMED = 3
"""Episodes of a finding that a line names."""


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Facts are true of good sources, too; faults are not.
    """

    kind: str
    """Short name of the cause, such as `black` or `lag`."""
    text: str
    """What it is, and the remedy."""
    fault: bool = True
    episodes: tuple[str, ...] = ()
    """Names of the episodes that have it; empty: it is about the source."""
    amount: int = 0
    """Frames of a lag, or of a rhythm; 0 where it has none."""

    def as_text(self) -> str:
        """Return the finding for a terminal."""
        if not self.episodes:
            return self.text
        named = ", ".join(self.episodes[:MAX_NAMED])
        more = f" and {len(self.episodes) - MAX_NAMED} more" if len(self.episodes) > MAX_NAMED else ""
        return f"{self.text} ({named}{more})"


@dataclass
class Effects:
    """Number of times an action was taken, and of times pixels changed after it."""

    count: int = 0
    changed: int = 0

    def add(self, changed: bool) -> None:
        """Count an action."""
        self.count += 1
        self.changed += changed


@dataclass
class Report:
    """Contents of a source."""

    fps: int
    examined: int = 0
    """Episodes that were looked at, broken ones included."""
    size: int | None = None
    """Episodes of the source; None if only reading it would tell."""
    lengths: list[int] = field(default_factory=list)
    """Actions of every episode."""
    broken: list[str] = field(default_factory=list)
    effects: dict[str, Effects] = field(default_factory=dict)
    outcomes: int = 0
    """Actions whose reward, and whether the episode ended after them, is known."""
    rewards: int = 0
    """Actions after which the reward was not 0."""
    ends: int = 0
    """Actions after which an episode ended."""
    unseen: list[str] = field(default_factory=list)
    """Keys that were never held, numbers that never changed, directions, rewards and ends that never came."""
    repeated: int = 1
    """Frames for which each action is repeated."""
    lag: int | None = 0
    """Frames by which pictures follow actions late (above 0) or early; None: it cannot be told."""
    lag_certainty: float = 0.0
    """Share of resamples of the episodes with the same lag."""
    information: dict[int, float] = field(default_factory=dict)
    """Mutual information, in nats, of an action and whether the picture changed, by lag in frames."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def summary(self) -> list[str]:
        """Return three lines: what it is, whether actions act, and its faults."""
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in self.faults))
        return [
            self._counts(),
            self._lag(),
            f"faults: {kinds}; see `worldmodel data check`" if kinds else "faults: none found",
        ]

    def as_text(self) -> str:
        """Return the findings for a terminal."""
        lines = [self._counts()]
        if self.lengths and max(self.lengths):
            low, middle, high = _quartiles(self.lengths)
            alike = low == high and len(self.lengths) >= MIN_ALIKE
            lines.append(
                f"actions per episode: {low} in all: a limit, or all end at the same place"
                if alike
                else f"actions per episode: {low} to {high}, median {middle}"
            )
        width = min(max(map(len, self.effects), default=0), 40)
        for name, effect in sorted(self.effects.items()):
            of_all, after = effect.count / max(1, sum(self.lengths)), effect.changed / effect.count
            lines.append(
                f"  {name:{width}s}  {effect.count:7d} times, {of_all:6.1%} of all, "
                f"pixels changed after {after:6.1%}"
            )
        if len(self.effects) > 1 and all(each.changed == each.count for each in self.effects.values()):
            lines.append(
                "pixels changed after every action, so this does not tell what each one does: record twin "
                "futures (`worldmodel record --twins`), which differ by their actions alone"
            )
        if self.outcomes:
            lines.append(
                f"a reward other than 0 after {self.rewards} of {self.outcomes} actions, "
                f"the end of an episode after {self.ends}"
            )
        if self.unseen:
            lines.append(f"never seen, so it cannot be learned: {', '.join(self.unseen)}")
        if unmoved := [name for name, effect in sorted(self.effects.items()) if not effect.changed]:
            lines.append(f"without any effect: {', '.join(unmoved)}")
        lines.append(self._lag())
        lines += [finding.as_text() for finding in self.findings if not finding.fault]
        lines += [f"fault, {finding.kind}: {finding.as_text()}" for finding in self.faults]
        if not self.faults:
            lines.append("faults: none found")
        return "\n".join(filter(None, lines))

    def _counts(self) -> str:
        size = f" of {self.size}" if self.size is not None and self.size > self.examined else ""
        rate = f", {self.fps} frames per second"
        return f"{self.examined}{size} episodes, {sum(self.lengths)} actions{rate}"

    def _lag(self) -> str:
        if not self.information:
            return ""
        told = ", ".join(f"{lag:+d}: {value:.2f}" for lag, value in sorted(self.information.items()))
        if self.lag is None:
            return (
                f"whether actions are in their places cannot be told from the pictures (nats by lag {told})"
            )
        where = "in their places" if not self.lag else f"{_late(self.lag)}"
        return f"actions are {where}, certainty {self.lag_certainty:.0%} (nats by lag {told})"


def _late(lag: int) -> str:
    frames = f"{abs(lag)} frame{'s' if abs(lag) > 1 else ''}"
    return (
        f"{frames} early: pictures follow them late" if lag > 0 else f"{frames} late: pictures precede them"
    )


def _quartiles(lengths: Sequence[int]) -> tuple[int, int, int]:
    ordered = sorted(lengths)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]


def in_episodes(
    found: Iterable[tuple[str, str, str]], of: int, amounts: Mapping[str, int] | None = None
) -> list[Finding]:
    """Return one finding for each kind and text, with the episodes that have it.

    Args:
        found: kind, text and name of the episode.
        of: number of episodes that were looked at.
        amounts: amounts of findings, by their text.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for kind, text, name in found:
        names.setdefault((kind, text), []).append(name)
    return [
        Finding(
            kind, f"in {len(each)} of {of} episodes {text}", True, tuple(each), (amounts or {}).get(text, 0)
        )
        for (kind, text), each in names.items()
    ]


def grouped(reasons: Iterable[tuple[str, str]], of: int) -> list[Finding]:
    """Return one finding for each kind of reason why an episode cannot be read, with a count.

    Args:
        reasons: names of episodes, and why each is broken.
        of: number of episodes that were looked at.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for name, reason in reasons:
        kinds.setdefault(cause(reason), []).append((name, reason))
    order = Counter({kind: len(found) for kind, found in kinds.items()}).most_common()
    return [
        Finding(
            "unreadable",
            f"{count} of {of} episodes cannot be used: {kinds[kind][0][1].rstrip('.')}",
            episodes=tuple(name for name, _ in kinds[kind]),
        )
        for kind, count in order
    ]
