"""`worldmodel data`: examine a data source, and divide it into training and held-out episodes."""

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import combinations
from pathlib import Path

from tqdm import tqdm

from worldmodel.cli.parser import Parser, option, seed_number
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Run one of the two."""
    args = _parser().parse_args(argv)
    if args.what == "check":
        if args.fix:
            fix(args.source, args.others, args.fix, args.fix_only, args.fix_also)
            return
        if args.fix_only or args.fix_also:
            raise InputError("--fix-only and --fix-also say what --fix DIR repairs; name the folder.")
        check(args.source, args.others, args.episodes, args.sheet, args.json)
        return
    if args.others:
        raise InputError(f"A split is of one source, not also of {args.others[0]!r}.")
    divide(args.source, args.share, args.by, args.seed, args.force)


def check(source: str, others: Sequence[str], most: int, sheet: str, as_json: bool) -> None:
    """Examine sources and print what is in them, and which episodes they share.

    Args:
        source: A source of any kind.
        others: Further ones, whose episodes should be in none of the others.
        most: Episodes of each that are read; 0: all.
        sheet: Picture of the first ones that is drawn; none if empty.
        as_json: Whether to print JSON.

    Raises:
        InputError: There is no such source, or none of its videos can be read.
    """
    from worldmodel.data.argument import read_source

    for each in (source, *others):
        read_source(each)  # before PyTorch is imported, which takes seconds
    from worldmodel.data import examiner
    from worldmodel.media import write_image

    found = {}
    for name in dict.fromkeys([source, *others]):
        examined = examiner.open_examined(name)
        with tqdm(total=most or None, unit=" episodes", leave=False, disable=None) as bar:
            found[name] = examiner.examine(examined, most, lambda done, bar=bar: bar.update(done - bar.n))
    reports = {name: each.report() for name, each in found.items()}
    for name, other in combinations(found, 2):
        pair = found[name].measures, found[other].measures
        reports[other].findings += examiner.leak_findings(other, pair[1], name, pair[0])
    if as_json:
        plain = [report.as_dict() for report in reports.values()]
        print(json.dumps(plain[0] if not others else dict(zip(reports, plain, strict=True)), indent=2))
    for name, report in () if as_json else reports.items():
        print(f"{name}:\n" * bool(others) + report.as_text())
    if not sheet:
        return
    with suppress(InputError):  # every episode is broken, which the report says
        write_image(examiner.draw_sheet(found[source].examined), sheet)
        if not as_json:
            print(f"contact sheet: {sheet}")


def fix(source: str, others: Sequence[str], folder: str, only: str = "", also: str = "") -> None:
    """Examine all episodes of a source, write a repaired copy, and print what was done.

    Args:
        source: A source of any kind.
        others: Further ones, which a repair cannot have.
        folder: New folder of the copy, a LeRobot dataset.
        only: Kinds of faults that are repaired, with commas between them, in place of those that are sure.
        also: Kinds that are repaired beside these.

    Raises:
        InputError: There is no such source or kind, or no episode would be left.
        OutputError: The folder has something in it, lies in the source, or cannot be written.
    """
    from worldmodel.data import examiner
    from worldmodel.recording.repair import REPORT, chosen_fixes, repair

    if others:
        raise InputError(f"A repair is of one source, not also of {others[0]!r}.")
    fixes = chosen_fixes(only, also)
    with tqdm(unit=" episodes", leave=False, disable=None) as bar:
        found = examiner.examine(examiner.open_examined(source), 0, lambda done: bar.update(done - bar.n))
        bar.reset(len(found.measures))
        done = repair(found, folder, fixes, lambda done: bar.update(done - bar.n))
    print(f"{done.as_text()}\nreport: {Path(folder).expanduser() / REPORT}")


def divide(source: str, share: float = 0.1, by: str = "episode", seed: int = 0, force: bool = False) -> None:
    """Hold out episodes of a source, store which, and print what they share with the others.

    Args:
        source: A LeRobot dataset, or a table.
        share: Share of the episodes that is held out.
        by: `episode`, or `layout` for all episodes with the same first picture.
        seed: Seed of the choice.
        force: Whether to replace the parts of a table.

    Raises:
        InputError: The source is not on this machine, or cannot be divided so.
    """
    from worldmodel.data import examiner
    from worldmodel.data.facts import write_parts
    from worldmodel.data.tables import open_table
    from worldmodel.io import atomic_file

    examined = examiner.open_examined(source)
    kind, path = examined.config.kind, Path(examined.config.path).expanduser()
    if kind not in ("clips", "lerobot"):
        raise InputError(
            f"{source!r} is of kind {kind}, which is not divided; pass a LeRobot dataset or clips."
        )
    if not path.exists():
        raise InputError(
            f"{source!r} is on the Hub, where a split cannot be stored; download it to a folder."
        )
    held, counts = examiner.split(examined, share, by, seed)
    if kind == "clips":
        with closing(open_table(path)) as table:
            train, stored = write_parts(table, held, path, force)
        use = f"the rest: {train}"
    else:
        stored, use = path / "meta" / "split.json", "data.sources.NAME.split: held-out"
        with atomic_file(stored) as temporary:
            temporary.write_text(json.dumps({"by": by, "seed": seed, "held-out": held}), encoding="utf-8")
    print(f"{len(held)} of {examined.size} episodes are held out: {stored} ({use})")
    for name in ("exact", "near"):
        part = counts[name] / max(counts["pairs"], 1)
        print(f"(frame, action) pairs of these that are in training, {name}: {counts[name]} ({part:.1%})")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel data",
        "check: read episodes of a source and say what is in it: lengths, how often each action changed\n"
        "pixels, whether actions are in their places, and what is wrong with which episodes; of several\n"
        "sources, also which episodes they share.\n"
        "split: hold out episodes, and count what they share with training. A LeRobot dataset stores which;\n"
        "a table, or a folder without one, is divided into NAME-train.jsonl and NAME-held.jsonl beside it.",
        "worldmodel data check doorkey\n  worldmodel data check webdataset:train.tar webdataset:held.tar\n"
        "  worldmodel data split doorkey --by layout",
    )
    parser.add_argument("what", choices=("check", "split"), help="what to do")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="LeRobot dataset, table of clips, folder, KIND:PATH (webdataset, huggingface, minari, flow, …), "
        "or CONFIG:NAME",
    )
    parser.add_argument(
        "others", nargs="*", metavar="OTHER", help="check: sources that must share no episode"
    )
    option(parser, "--episodes", "check: episodes that are read, spread over the source; 0: all", 1000)
    parser.add_argument("--json", action="store_true", help="check: print JSON")
    option(parser, "--sheet", "check: also draw some episodes", "", metavar="FILE")
    option(parser, "--fix", "check: write a repaired copy, a LeRobot dataset", "", metavar="DIR")
    option(parser, "--fix-only", "--fix: repair these kinds of faults only", "", metavar="KIND,…")
    option(parser, "--fix-also", "--fix: repair these suspicions, too, such as lag", "", metavar="KIND,…")
    parser.add_argument(
        "--share", type=float, default=0.1, help="split: share of episodes (default: %(default)s)"
    )
    parser.add_argument(
        "--by", choices=("episode", "layout"), default="episode", help="split: what is held out"
    )
    parser.add_argument("--force", action="store_true", help="split: replace the parts of a table")
    option(parser, "--seed", "split: seed", 0, kind=seed_number)
    return parser
