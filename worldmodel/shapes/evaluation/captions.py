"""Clips generated from captions: text to video."""

from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, Tally
from worldmodel.eval.judge import Judge
from worldmodel.eval.runner import Subject
from worldmodel.shapes.captions import sample_captioned_clip
from worldmodel.shapes.evaluation.cases import case_of


def text_to_video(
    subject: Subject, judge: Judge, count: int, seed: int, album: Album | None = None
) -> dict[str, Figure]:
    """Generate clips from captions that determine them.

    Returns:
        The rates `first` (the whole first frame is right), `named` and `strict` (in the last frame, the
        object that acts or the whole frame is right), `every_frame` (all frames are right), and
        `still_named`: the true first frame would have the object right at the end.
    """
    tally = Tally()
    for start in range(0, count, BATCH):
        indices = range(start, min(start + BATCH, count))
        cases = [case_of(sample_captioned_clip(seed, index)) for index in indices]
        clips = subject.imagine([case.caption for case in cases], [seed + index for index in indices])
        for case, clip in zip(cases, clips, strict=True):
            verdicts = [judge(frame, truth) for frame, truth in zip(clip, case.truths, strict=True)]
            last = verdicts[-1]
            tally.count(
                first=verdicts[0].strict,
                named=last.named,
                strict=last.strict,
                every_frame=all(verdict.strict for verdict in verdicts),
                still_named=judge(case.start, case.truths[-1]).named,
            )
            if album is not None:
                album.add(Example("text to video", case.caption, last.strict, case.frames, clip, last.note))
    return tally.figures()
