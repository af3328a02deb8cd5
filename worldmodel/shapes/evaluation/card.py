"""The world's sections of a model card."""

from worldmodel.eval.suite import CardText
from worldmodel.shapes.judge import NAMED_PLACE_TOLERANCE, PLACE_TOLERANCE

CARD = CardText(
    about="""A small any-to-any world model of a procedural world: shapes of eight colours on dark backgrounds
that obey sentences such as "the red ball moves left". A language model predicts the state after an action,
which is shown as video, by a flow-matching generator where the model has one; the same language model
describes images and answers questions about them.
""",
    usage="""```python
from worldmodel import WorldModel

session = WorldModel.from_pretrained("{name}").session(seed=0)
session.reset("first_frame.png")            # or reset(text="night background, a small red ball at the left")
frames = session.step("the red ball moves left").frames    # uint8 [8, 64, 64, 3]; call it again and again
print(session.describe(), "|", session.infer_action())
session.save("rollout.mp4")
```
""",
    data="""All training data are generated from a seed by the library's own simulator
(`worldmodel.shapes`): no files, no people, no third-party data. One eighth of all combinations of
colour, shape and verb is held out.
""",
    judging=(
        "*Right* is decided by finding the objects in the pixels: colour, shape, size, and position within "
        f"{PLACE_TOLERANCE:g} pixels ({NAMED_PLACE_TOLERANCE:g} for an object that the action names). "
        "*Held-out* combinations of colour, shape and verb do not occur in training."
    ),
    limits=(
        "It knows one world of flat shapes at 64 x 64 pixels and 8 frames a second, and the sentences of "
        "that world; on photographs or other sentences its output is meaningless, without a warning.",
    ),
    dataset="shapes",
    license_name="apache-2.0",
)
