"""Model cards: metadata for the Hub, and the card of a model without measured figures."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from worldmodel.config import ActionSpec, WorldModelConfig, height_width
from worldmodel.models.backbone.causal_lm import Backbone


def card_text(
    name: str,
    body: str,
    config: WorldModelConfig | None = None,
    license_name: str | None = None,
    results: list[EvalResult] | None = None,
    base_model: str | None = None,
) -> str:
    """Return a model card: a metadata block for the Hub, a title and the text.

    Args:
        name: Name of the model.
        body: Sections in markdown.
        config: Configuration of the model, for its tags.
        license_name: Identifier of the license on the Hub, such as `apache-2.0`.
        results: Measured figures, for the `model-index` of the metadata.
        base_model: Repository on the Hub of the language model that it refers to.
    """
    data = ModelCardData(
        license=license_name,
        library_name="worldmodel",
        pipeline_tag="image-to-video",
        tags=_tags(config),
        model_name=name if results else None,
        eval_results=results,
        base_model=base_model,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{body}"))


def plain_card(model: nn.Module, config: WorldModelConfig, name: str, training: dict[str, Any] | None) -> str:
    """Return the card of a model: its components, actions and training."""
    height, width = height_width(config.codec.image_size)
    actions = [kind for kind, takes in config.action.takes.items() if takes]
    lines = [
        "A world model: it takes text, images, video and actions, and generates video, images and text.\n",
        "```python\nfrom worldmodel import WorldModel\n",
        f'session = WorldModel.from_pretrained("{name}").session(seed=0)',
        'session.reset("first_frame.png")\nframes = session.step("...").frames\n```\n',
        "| Component | Kind | Parameters |\n|---|---|---:|",
    ]
    for child, module in model.named_children():
        count = sum(parameter.numel() for parameter in module.parameters())
        if not count:
            continue
        kind = module.model.config.model_type if isinstance(module, Backbone) else type(module).__name__
        lines.append(f"| {child} | {kind} | {count / 1e6:,.1f} M |")
    backbone = getattr(model, "backbone", None)
    base = backbone.reference if isinstance(backbone, Backbone) else None
    if base is not None:
        lines.append(
            f"\nThe backbone is {base.title}, {base.num_layers or 'all'} layers, with what `backbone` adds; "
            "if it is not found, `--base FOLDER` says where it is."
        )
    lines += [
        f"\nIt generates {config.chunk_frames} frames of {width} x {height} pixels per round at {config.fps} "
        f"frames per second. Actions: {', '.join(actions) or 'none'}.\n",
        *action_section(config.action.spec),
        "## Training\n",
    ]
    stages = (training or {}).get("stages") or {}
    if stages:
        lines += ["| Stage | Objective | Steps |\n|---|---|---:|"]
        lines += [f"| {key} | {stage['objective']} | {stage['steps']} |" for key, stage in stages.items()]
        lines.append(
            "\nThe resolved config is `training` in config.json; `worldmodel train CONFIG` runs it.\n"
        )
    else:
        lines.append("Not recorded.\n")
    lines.append("## Figures\n\nNot measured.\n")
    return card_text(name, "\n".join(lines), config, base_model=base and base.revision and base.name)


def action_section(specs: Sequence[ActionSpec]) -> list[str]:
    """Return a section on what the keys and numbers of an action mean, line by line; none without specs."""
    if not specs:
        return []
    head = "| Action | Kind | Range | Unit | Scale | Per second | Frame |\n|---|---|---|---|---:|---:|---|"
    rows = [
        f"| {spec.name} | {spec.kind} | {'–' if spec.low is None else f'{spec.low:g} to {spec.high:g}'} "
        f"| {spec.unit or '–'} | {spec.scale:g} | {spec.rate:g} | {spec.frame or '–'} |"
        for spec in specs
    ]
    return ["## Actions\n", head, *rows, ""]


def _tags(config: WorldModelConfig | None) -> list[str]:
    tags = ["world-model", "video-generation", "image-to-video"]
    if config and config.action.text:
        tags += ["any-to-any", "text-to-image"]
    if config and config.generator:
        tags.append("flow-matching")
    return tags
