"""Video generators and autoencoders of diffusers (Wan, LTX-Video, CogVideoX) as parts of a world model."""

import importlib.util

from worldmodel.errors import ConfigError, pip_install

if importlib.util.find_spec("diffusers") is None:
    raise ConfigError(
        "This model's generator or codec is one of diffusers, which is not installed: "
        f"{pip_install('diffusers')}."
    )
