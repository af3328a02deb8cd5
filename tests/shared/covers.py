"""Which files and folders the long tests (marker `slow`) of a test file or of a folder of tests cover.

Of a folder that ends in `/`, only the names of its files count.
"""

EVERYTHING = ("worldmodel", "train", "serving", "demo", "configs", "pretrained")
"""What a test file covers that is not listed."""

MODEL = ("worldmodel/models", "worldmodel/diffusion", "worldmodel/rollout")
PARALLEL = ("train", "worldmodel/parallel", *MODEL)
FLOW = ("worldmodel/flow", "worldmodel/plugins")
WORLDS = ("worldmodel/shapes", "worldmodel/pretrained", "pretrained", *MODEL)

COVERS: dict[str, tuple[str, ...]] = {
    "tests/browser": ("demo", "serving"),
    "tests/browser/test_web_page.py": (
        *(
            "worldmodel/export",
            "worldmodel/cli/export.py",
            "worldmodel/actions",
            "demo/controls.js",
            "demo/play.css",
        ),
        *("worldmodel/pretrained", *MODEL),
    ),
    "tests/distributed": PARALLEL,
    "tests/docs/test_commands.py": (
        *("README.md", "docs", "Makefile", "configs", "worldmodel/cli", "worldmodel/config"),
    ),
    "tests/docs/test_examples.py": (
        *("examples", "worldmodel/__init__.py", "worldmodel/config", "worldmodel/env", "worldmodel/rollout"),
    ),
    "tests/docs/test_imagination.py": (
        *("docs/tutorial/imagination.md", "examples/imagination.py", "worldmodel/cli"),
        *("worldmodel/config", "worldmodel/env", "worldmodel/recording"),
    ),
    "tests/docs/test_own_world.py": ("docs/tutorial/own-world.md", "worldmodel/cli", "worldmodel/config"),
    "tests/docs/test_readme.py": ("docs/tutorial/serve.md", "serving"),
    "tests/docs/test_replicas_guide.py": ("docs/how-to/replicas.md", "deploy/replicas", "serving"),
    "tests/gpu": ("train", *MODEL),
    "tests/hostile": ("serving", "worldmodel/media"),
    "tests/packaging": (
        *("worldmodel/", "train/", "serving/", "demo/", "configs/", "pretrained/"),
        *("pyproject.toml", "pretrained/pyproject.toml", "README.md", "LICENSE"),
        *("worldmodel/__init__.py", "worldmodel/__main__.py", "worldmodel/models/loading/location.py"),
    ),
    "tests/serving": ("serving", "worldmodel/rollout"),
    "tests/serving/test_generator_processes.py": ("serving", "worldmodel/parallel", *MODEL),
    "tests/serving/test_pan.py": ("serving", "configs", *MODEL),
    "tests/serving/test_ray_serve.py": ("serving/replicas", "deploy/replicas"),
    "tests/serving/test_vllm_engine.py": ("serving/engine", "worldmodel/models/backbone"),
    "tests/serving/test_vllm_families.py": ("serving/engine", "worldmodel/models/backbone"),
    "tests/unit/diffusers": ("train", *MODEL),
    "tests/unit/diffusers/test_presets.py": (
        *("configs", "serving", "train", "worldmodel/cli", "worldmodel/config", "worldmodel/data"),
        *("worldmodel/recording", *MODEL),
    ),
    "tests/unit/flow": FLOW,
    "tests/unit/flow/test_flow_training.py": (*FLOW, "worldmodel/data", "train"),
    "tests/unit/test_action_chunks.py": ("train", *MODEL),
    "tests/unit/test_action_words.py": ("train", "worldmodel/actions", *MODEL),
    "tests/unit/test_backbone.py": ("worldmodel/models",),
    "tests/unit/test_checkpoint.py": ("train",),
    "tests/unit/test_cli.py": ("worldmodel/cli", "train/finetune.py"),
    "tests/unit/test_codec_ceiling.py": ("train", "worldmodel/eval/codec.py"),
    "tests/unit/test_distillation.py": ("train", *MODEL),
    "tests/unit/test_dit.py": MODEL,
    "tests/unit/test_env_rl.py": ("worldmodel/env", "worldmodel/rollout"),
    "tests/unit/test_eval.py": ("worldmodel/eval", "worldmodel/shapes"),
    "tests/unit/test_eval_data.py": ("worldmodel/eval", "worldmodel/data"),
    "tests/unit/test_flow_engines.py": FLOW,
    "tests/unit/test_games.py": ("worldmodel/games", "worldmodel/recording"),
    "tests/unit/test_gpu_benchmark.py": ("benchmarks", "train", "worldmodel/models"),
    "tests/unit/test_inference.py": MODEL,
    "tests/unit/test_new.py": ("worldmodel/cli", "worldmodel/config", "worldmodel/data", "train"),
    "tests/unit/test_no_generator.py": ("train", *MODEL),
    "tests/unit/test_one_frame_rounds.py": ("train", *MODEL),
    "tests/unit/test_own_kind.py": ("worldmodel/actions", "worldmodel/config", "serving", "train", *MODEL),
    "tests/unit/test_planning.py": ("worldmodel/planning", "worldmodel/env"),
    "tests/unit/test_precomputed.py": ("train", "worldmodel/data", *MODEL),
    "tests/unit/test_recorder.py": ("worldmodel/recording", "worldmodel/games"),
    "tests/unit/test_repair.py": ("worldmodel/data", "worldmodel/cli/data.py"),
    "tests/unit/test_shapes_memory_model.py": WORLDS,
    "tests/unit/test_shapes_smol.py": WORLDS,
    "tests/unit/test_shapes_tiny.py": WORLDS,
    "tests/unit/test_stage.py": ("train", "worldmodel/data"),
    "tests/unit/test_start.py": ("train", "worldmodel/models"),
    "tests/unit/test_train.py": ("train", *MODEL),
    "tests/unit/test_train_sigterm.py": ("train",),
    "tests/unit/test_twins.py": (
        *("train", "worldmodel/cli/new.py", "worldmodel/data", "worldmodel/eval", "worldmodel/recording"),
    ),
    "tests/unit/test_verify.py": ("worldmodel/eval", *WORLDS),
}
