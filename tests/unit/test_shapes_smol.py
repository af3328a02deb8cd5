"""The shipped world on a pretrained language model, which is not in the package."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from worldmodel import WorldModel
from worldmodel.env import WorldEnv
from worldmodel.errors import ModelError
from worldmodel.eval.action_following import action_following
from worldmodel.eval.runner import ModelSubject
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.loading.location import resolve
from worldmodel.serving.client import Client
from worldmodel.shapes.evaluation.cases import cases_of, judge_frame
from worldmodel.shapes.evaluation.paraphrases import paraphrase_cases

SEED = 99
"""Not that of the published figures."""
BASE = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def folder(smollm2: str) -> Path:
    """The folder of the model, whose base is on this machine."""
    assert smollm2 == BASE
    return resolve("shapes-smol")


@pytest.fixture(scope="module")
def model(folder: Path) -> WorldModel:
    return WorldModel.from_pretrained(folder)


def test_it_ships_what_was_trained_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve("shapes-smol")
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 40 * 2**20
    assert not (folder / "backbone" / "model.safetensors").exists()
    with pytest.raises(ModelError, match=f"worldmodel download {BASE}"):
        WorldModel.from_pretrained("shapes-smol")


def test_without_lora_its_language_model_is_the_untouched_base(folder: Path) -> None:
    untouched, adapted = (Backbone.from_pretrained(BASE, num_layers=10).model.eval() for _ in range(2))
    ids = torch.arange(50, 90)[None]
    with torch.no_grad():
        expected = untouched(ids).logits
        added = PeftModel.from_pretrained(adapted, folder / "backbone")
        assert not torch.allclose(added(ids).logits, expected, atol=0.1)
        with added.disable_adapter():
            assert torch.equal(added(ids).logits, expected)


def test_it_obeys_sentences(model: WorldModel) -> None:
    figures = action_following(ModelSubject(model), cases_of("held-out", SEED, 24), judge_frame, SEED)
    assert figures["named"]["value"] >= 0.7 > 0.3 > figures["copy_named"]["value"]


def test_it_is_served_and_stepped_as_other_models_are(
    model: WorldModel, serve: Callable[..., str], image: np.ndarray
) -> None:
    said = "the red ball moves left"
    session = model.session(seed=3)
    session.reset(image)
    expected = session.step(said).frames
    env = WorldEnv(model, actions="text", obs_type="clip", start={"observation": image})
    env.reset(seed=3)
    assert env.step(said)[0].shape == expected.shape
    with Client(serve(model)) as client, client.worlds.create(image, seed=3) as world:
        np.testing.assert_array_equal(world.step(said).frames, expected)


@pytest.mark.slow
def test_it_understands_verbs_that_occurred_in_no_training(model: WorldModel) -> None:
    asked = [case for case in paraphrase_cases(SEED, 240) if "known words" in case.kinds]
    figures = action_following(ModelSubject(model), asked, judge_frame, SEED)
    assert figures["named"]["value"] > 0.45 > 0.3 > figures["copy_named"]["value"]
