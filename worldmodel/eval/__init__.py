"""Evaluation of world models.

A world brings a suite (`World.eval_suite`): a judge of frames, cases with known outcomes, and goals. The
suite of recorded episodes is in `eval.data`. This package plays the cases, measures them by `metrics`, and
prints one result table as text, HTML report, model card and JSON.

    model = WorldModel.from_pretrained("shapes-tiny")
    results = evaluate(model, EvalSettings(), worlds.suite_of(model.config))
    write_report(results, "outputs/eval-shapes-tiny")
"""
