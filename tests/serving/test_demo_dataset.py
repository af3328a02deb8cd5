"""What was played in the demo as a dataset: read back by the data reader, and checked by its examiner."""

import asyncio
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worldmodel.actions import Action
from worldmodel.cli import main as check
from worldmodel.config import ActionConfig, DataConfig, SourceConfig
from worldmodel.data.sources import open_source
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import AsyncClient
from worldmodel.worlds import World

pytest.importorskip("pyarrow", reason="pyarrow is not installed: openworldmodel[data]")


@pytest.mark.parametrize(
    ("takes", "played"),
    [
        (ActionConfig(text=False, keys=("left", "right")), [{"keys": ["left"]}, {"keys": ["right"]}, None]),
        (ActionConfig(text=True, keys=("left",)), ["the ball jumps", {"keys": ["left"]}, "it falls"]),
        (
            ActionConfig(text=False, vector={"low": (-1.0, 0.0), "high": (1.0, 3.0)}),
            [{"vector": [0.5, 2.0]}, {"vector": [-0.25, 1.0]}, {"vector": [1.0, 0.0]}],
        ),
    ],
    ids=["keys", "words", "numbers"],
)
def test_a_session_is_a_dataset(
    takes: ActionConfig,
    played: list[Any],
    make_model: Callable[..., WorldModel],
    serve: Callable[..., str],
    image: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from worldmodel.demo.history import Origin, RolloutHistory

    own = make_model(action=takes, outcomes=True)
    address = serve(own, requests_per_minute=60_000)

    async def run() -> tuple[bytes, list[np.ndarray]]:
        async with AsyncClient(address) as client:
            model = await client.model((await client.models())[0])
            history = await RolloutHistory.start(client, World(), model, Origin(3, image))
            with pytest.raises(InputError, match="Nothing was played"):
                history.dataset()
            for action in played:
                await history.step(action)
            await history.fork()
            await history.step(played[0])
            packed = history.dataset()
            films = [
                np.concatenate([branch.moments[0].clip[-1:], *(each.clip for each in branch.moments[1:])])
                for branch in history.branches
            ]
            await history.close()
            return packed, films

    packed, films = asyncio.run(run())
    zipfile.ZipFile(io.BytesIO(packed)).extractall(tmp_path)
    folder = str(tmp_path / "played")
    source = open_source("mine", DataConfig({"mine": SourceConfig("lerobot", folder)}), own.config)
    assert source.size == len(films) == 2
    for index, film in enumerate(films):
        found = source.at(index).episode("rounds", 0, index, 999)
        actions = [Action.of(each) for each in [*played, played[0]][: len(found.actions)]]
        assert len(actions) == len(played) + index
        assert list(found.actions) == actions
        seen = np.concatenate(found.observations)[-len(film) + 1 :]
        assert np.abs(seen.astype(int) - film[1:]).mean() < 8  # of 255: the video of noise is not lossless

    # The pictures of an untrained model are noise, which the examiner says; nothing else is wrong.
    assert check(["data", "check", folder, "--json", "--sheet", str(tmp_path / "sheet.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    faults = {each["kind"] for each in report["findings"] if each["fault"]}
    assert faults <= {"noise"}, report
    assert (tmp_path / "sheet.png").is_file()
